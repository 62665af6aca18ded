"""The thread that writes the logs, so that the event loop never waits for a disk or a reader.

Log records come one by one. Frequent entries (requests, workers' lines, metrics) don't go through `logging`: they are
collected as plain tuples, and formatted here, many at a time.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol, TypeAlias

from ts.protocol.text import printable

#: The thread name of entries that don't come from a worker.
MAIN = "main"

#: One request: seconds since 1970 at its end, `ip:port`, request line, status, milliseconds, request id.
AccessFields: TypeAlias = "tuple[float, str, str, int, float, str, str]"

#: The line break within a record, whose further lines begin with blanks; no first line does.
_CONTINUED = "\n    "


class LogEntry(Protocol):
    """One of the lines that are written together. `seconds`: since 1970; `source`: the thread it names."""

    @property
    def seconds(self) -> float: ...
    @property
    def source(self) -> str: ...
    @property
    def level(self) -> int: ...

    def text(self) -> str: ...

    def parts(self) -> dict[str, object]:
        """The members of its JSON line."""


#: Returns the entries to write now, as (name of the logger, its lines). Called by the writing thread.
Source: TypeAlias = Callable[[], "Iterable[tuple[str, Sequence[LogEntry]]]"]


class Access(NamedTuple):
    """One request answered. `peer`: `ip:port`; `request`: method, path, protocol; `seconds`: since 1970, at its end."""

    seconds: float
    peer: str
    request: str
    status: int
    duration_ms: float
    request_id: str = ""
    timing: str = ""

    @property
    def source(self) -> str:
        return MAIN

    @property
    def level(self) -> int:
        return logging.INFO

    def text(self) -> str:
        request = self.request
        if '"' in request or not request.isprintable():
            request = printable(request).replace('"', "%22")
        line = f'/{self.peer} "{request}" {self.status} {self.duration_ms:.0f}'
        return f"{line} {self.timing}" if self.timing else line

    def parts(self) -> dict[str, object]:
        shown = {
            "peer": self.peer,
            "request": self.request,
            "status": self.status,
            "duration_ms": round(self.duration_ms, 3),
        }
        shown |= {"request_id": self.request_id} if self.request_id else {}
        return {**shown, "timing": self.timing} if self.timing else shown


class ModelLine(NamedTuple):
    """A line that a worker wrote. `source`: W-<id>-<model>_<version>-stdout or -stderr."""

    seconds: float
    source: str
    level: int
    line: str
    request_id: str = ""

    def text(self) -> str:
        return printable(self.line)

    def parts(self) -> dict[str, object]:
        return {"message": self.line, **({"request_id": self.request_id} if self.request_id else {})}


class Lines:
    """Entries as text, made once for all handlers: `parts` are (seconds, time, text)."""

    def __init__(self, entries: Sequence[LogEntry]) -> None:
        self.parts = [(one.seconds, iso_time(one.seconds), one.text()) for one in entries]

    def __str__(self) -> str:
        return "\n".join([text for _, _, text in self.parts])


#: The calls that probes and scrapers repeat all the time, which need no key and are not traced: paths of HTTP, and
#: the last names of gRPC methods.
PROBED = frozenset({"/ping", "/metrics", "/v2/health/live", "/v2/health/ready"})
HEALTH_METHODS = frozenset({"Ping", "ServerLive", "ServerReady", "ModelReady"})
#: The same calls as an access log writes them, and the stream that pages and `torchserve top` read.
_POLL = re.compile(
    rf"(?:GET|HEAD) (?:{'|'.join(sorted(PROBED))}|/v2/models/[^ ]+/ready|/console/events)/?(?:\?[^ ]*)? HTTP/.*"
    rf"|gRPC [^ ]+/(?:{'|'.join(sorted(HEALTH_METHODS))}) HTTP/.*"
)
#: The statuses of an HTTP answer and a gRPC call that succeeded.
_SUCCESSES = (200, 0)


def is_poll(access: Access) -> bool:
    """Whether a request is a successful poll; failed polls are always logged."""
    return access.status in _SUCCESSES and _POLL.fullmatch(access.request) is not None


def folded(text: str) -> str:
    """As `printable` for each line of a text: all lines but the first are indented."""
    if text.isprintable():
        return text
    return _CONTINUED.join(printable(line) for line in text.split("\n"))


def iso_time(seconds: float) -> str:
    """Local time as TorchServe's logs have it: 2026-11-20T23:33:13,083."""
    whole = int(seconds)
    return f"{_iso_second(whole)},{int((seconds - whole) * 1000):03d}"


@functools.lru_cache(maxsize=16)
def _iso_second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))


RECORDS_WAITING_MAX = 100_000
PERIOD_S = 0.25
ENTRIES_PER_WRITE = 64

SERVER, ACCESS, MODEL = "ts_frontend", "ACCESS_LOG", "MODEL_LOG"

_Waiting: TypeAlias = "tuple[logging.LogRecord, Sequence[logging.Handler]]"
#: The most early reads of a source in a period.
HURRIES_MAX = 8


class Deferred(logging.Handler):
    """Stands in for a logger's handlers: hands each record, complete as text, to the writing thread."""

    def __init__(self, handlers: Sequence[logging.Handler], writer: Writer) -> None:
        super().__init__()
        self.targets = tuple(handlers)
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if not message.isprintable():
            # Only a message's first line starts at the margin, so that text from outside can't pass for a record.
            message = folded(message) if "\n" in message else printable(message)
        record.msg, record.args = message, None
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        record.exc_info = None
        self._writer.put(record, self.targets)


class Writer:
    """Writes records at once, metrics each PERIOD_S, and requests with whichever of them is written first. At most
    RECORDS_WAITING_MAX of each kind wait; further ones are dropped, and counted in the log. `polls` False: requests
    for which `is_poll` is true are left out."""

    def __init__(self, *, polls: bool = True) -> None:
        self._polls = polls
        self._records: SimpleQueue[_Waiting | threading.Event | Source | None] = SimpleQueue()
        self._accesses: deque[AccessFields] = deque()
        self._lines: deque[ModelLine] = deque()
        self.sources: list[Source] = [self._access_portions]
        self._dropped = self._hurries = 0
        self._failing: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, record: logging.LogRecord, handlers: Sequence[logging.Handler]) -> None:
        if self._records.qsize() < RECORDS_WAITING_MAX:
            self._records.put((record, handlers))
        else:
            self._dropped += 1

    def put_access(self, access: AccessFields) -> None:
        """Logs a request, by the fields of an Access, which the writing thread makes."""
        if len(self._accesses) < RECORDS_WAITING_MAX:
            self._accesses.append(access)
        else:
            self._dropped += 1

    def put_line(self, line: ModelLine) -> None:
        """Takes a line of a worker; it is written before later records, together with earlier lines."""
        lines = self._lines
        if len(lines) >= RECORDS_WAITING_MAX:
            self._dropped += 1
            return
        lines.append(line)
        if len(lines) == 1:
            self._records.put(_LINES)

    def hurry(self, source: Source) -> None:
        """Writes the lines of `source` at once; after HURRIES_MAX calls in a period, at its end."""
        if self._hurries < HURRIES_MAX:
            self._hurries += 1
            self._records.put(source)

    def flush(self, timeout_s: float) -> bool:
        """Waits until the records so far are written; returns False after `timeout_s`."""
        written = threading.Event()
        self._records.put(written)
        return written.wait(timeout_s)

    def close(self) -> None:
        """Write the waiting entries and end the thread."""
        if self._thread.is_alive():
            self._records.put(None)
            self._thread.join()

    def _run(self) -> None:
        due_s = time.monotonic() + PERIOD_S
        while True:
            wait_s = due_s - time.monotonic()
            if wait_s <= 0:
                self._write_sources()
                self._hurries = 0
                due_s = time.monotonic() + PERIOD_S
                continue
            try:
                item = self._records.get(timeout=wait_s)
            except Empty:
                continue
            if self._accesses and not isinstance(item, threading.Event):
                self._attempt_source(self._access_portions)
            if item is _LINES or item is None:
                self._attempt("Lines of workers", self._write_lines)
            elif isinstance(item, threading.Event):
                item.set()
            elif isinstance(item, tuple):
                write(*item)
            else:
                self._attempt_source(item)
            if self._dropped and self._records.empty():
                self._write_dropped()
            if item is None:
                return self._finish()

    def _finish(self) -> None:
        """Reads the sources until they return nothing twice, since some keep a sum that still grows."""
        while self._write_sources() or self._write_sources():
            pass

    def _access_portions(self) -> Iterator[tuple[str, list[Access]]]:
        waiting = self._accesses
        for left in range(len(waiting), 0, -ENTRIES_PER_WRITE):
            entries = [Access(*waiting.popleft()) for _ in range(min(left, ENTRIES_PER_WRITE))]
            if not self._polls:
                entries = [one for one in entries if not is_poll(one)]
            if entries:
                yield ACCESS, entries

    def _write_sources(self) -> bool:
        """True when there was something to write."""
        found = False
        for source in self.sources:
            found = self._attempt_source(source) or found
        return found

    def _attempt_source(self, source: Source) -> bool:
        return self._attempt(f"Entries of {source.__qualname__}", partial(self._write_source, source))

    def _write_source(self, source: Source) -> bool:
        found = False
        for name, entries in source():
            self._write_entries(logging.getLogger(name), entries)
            found = found or bool(entries)
        return found

    def _attempt(self, what: str, work: Callable[[], bool | None]) -> bool:
        """The result of `work`; the first failure of a series is logged, and never ends this thread."""
        try:
            found = bool(work())
        except Exception as error:
            if what not in self._failing:
                self._failing.add(what)
                text = f"{what} could not be written: {type(error).__name__}: {error}"
                about = (type(error), error, error.__traceback__)
                record = logging.LogRecord(SERVER, logging.ERROR, "", 0, text, (), about)
                write(record, targets(logging.getLogger(SERVER)))
            return False
        self._failing.discard(what)
        return found

    def _write_lines(self) -> None:
        waiting, logger = self._lines, logging.getLogger(MODEL)
        while waiting:
            self._write_entries(logger, [waiting.popleft() for _ in range(min(len(waiting), ENTRIES_PER_WRITE))])

    def _write_entries(self, logger: logging.Logger, entries: Sequence[LogEntry]) -> None:
        """Writes workers' lines in portions of one thread and level each; other entries have only one."""
        handlers = targets(logger)
        if logger.name != MODEL:
            if entries and logger.isEnabledFor(entries[0].level):
                _write_same(logger, entries, entries[0].source, entries[0].level, handlers)
            return
        for (source, level), same in itertools.groupby(entries, lambda one: (one.source, one.level)):
            if logger.isEnabledFor(level):
                _write_same(logger, list(same), source, level, handlers)

    def _write_dropped(self) -> None:
        count, self._dropped = self._dropped, 0
        text = f"{count} log records were dropped: they came faster than they could be written"
        write(logging.LogRecord(SERVER, logging.WARNING, "", 0, text, (), None), targets(logging.getLogger(SERVER)))


#: The entry in the queue of records that says that workers' lines are waiting.
_LINES: _Waiting = (logging.LogRecord("", 0, "", 0, "", (), None), ())


def _write_same(
    logger: logging.Logger, entries: Sequence[LogEntry], source: str, level: int, handlers: Sequence[logging.Handler]
) -> None:
    for start in range(0, len(entries), ENTRIES_PER_WRITE):
        portion = entries[start : start + ENTRIES_PER_WRITE]
        lines = Lines(portion)
        record = logger.makeRecord(logger.name, level, "", 0, "%s", (lines,), None)
        record.entries, record.entry_lines, record.source = portion, lines, source
        write(record, handlers)
        time.sleep(0)  # releases the GIL to the event loop, which would otherwise wait 5 ms


def write(record: logging.LogRecord, handlers: Iterable[logging.Handler]) -> None:
    for handler in handlers:
        if record.levelno >= handler.level:
            try:
                handler.handle(record)
            except Exception:  # a record that can't be formatted doesn't stop the others
                handler.handleError(record)


def targets(logger: logging.Logger) -> list[logging.Handler]:
    found: list[logging.Handler] = []
    at: logging.Logger | None = logger
    while at is not None:
        for handler in at.handlers:
            found += handler.targets if isinstance(handler, Deferred) else [handler]
        at = at.parent if at.propagate else None
    return found
