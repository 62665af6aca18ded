"""The logs of a server, the thread that writes them, so that the event loop never waits for a disk or a reader, and
what it writes to: rotated files, and a console that may go away.

Log records come one by one. Frequent entries (requests, workers' lines, metrics) don't go through `logging`: they are
collected as plain tuples, and formatted here, many at a time.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import itertools
import logging
import os
import re
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol, TextIO, TypeAlias

from ts.protocol.text import printable
from ts_frontend.config.files import LOG_MODE
from ts_frontend.telemetry.timing import RequestTimes

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


FILE_BYTES_MAX = 100 << 20
FILES_KEPT_MAX = 5
#: The interval of checks whether a file was moved, removed or emptied.
LOOK_S = 1.0
#: The pause after an error (a full disk) before writing or rotating is tried again.
RETRY_S = 5.0
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def daily_name(path: Path) -> Callable[[datetime, int], Path]:
    """TorchServe's file names: `ts_log.20-Nov.log.gz`; a second file of that day has a number before `.log`."""

    def name(moment: datetime, number: int) -> Path:
        day = f"{moment.day:02d}-{_MONTHS[moment.month - 1]}"
        return path.with_name(f"{path.stem}.{day}{f'.{number}' if number else ''}.log.gz")

    return name


class Rotation(NamedTuple):
    """When a log file is rotated, and its new name: the next free one that `name` gives for the time the file began
    and 0, 1, …. Of the files that `found` matches (a glob in their directory), the newest `kept_max` are kept.
    `by_time`: the file is also rotated when `name` gives another name for the current time."""

    name: Callable[[datetime, int], Path]
    found: str
    bytes_max: int = FILE_BYTES_MAX
    kept_max: int = FILES_KEPT_MAX
    by_time: bool = True


def daily(path: Path, bytes_max: int = FILE_BYTES_MAX, kept_max: int = FILES_KEPT_MAX) -> Rotation:
    """TorchServe's rotation."""
    return Rotation(daily_name(path), f"{path.stem}.*.log.gz", bytes_max, kept_max)


class Complaints:
    """Reports on standard error that files of a directory can't be written, once until all of them can be."""

    def __init__(self) -> None:
        self._failing: set[Path] = set()

    def failed(self, path: Path, error: OSError) -> None:
        if not any(one.parent == path.parent for one in self._failing):
            where = f"Log file {path} can't be written, nor may the others of its directory: their lines are lost until"
            _complain(f"{where} they can: {error}. LOG_LOCATION and METRICS_LOCATION name the directories of logs.")
        self._failing.add(path)

    def written(self, path: Path) -> None:
        self._failing.discard(path)


class RotatedFile(logging.Handler):
    """A log file; without `rotation` it grows without limit. Lines that can't be written (the disk is full, the
    directory is read-only, also on opening) are counted; their number is written once the file can be written again.
    `now` returns the local time; `complaints` are shared by the files of a server."""

    def __init__(
        self,
        path: Path,
        rotation: Rotation | None = None,
        now: Callable[[], datetime] = datetime.now,
        append: bool = True,
        complaints: Complaints | None = None,
    ) -> None:
        super().__init__()
        self.path, self._rotation, self._now = path, rotation, now
        self._complaints = complaints or Complaints()
        self._fd = -1
        self._place = 0, 0
        self._size = 0
        self._look_at_s = self._retry_at_s = self._rotate_at_s = 0.0
        self._lost = 0
        self._broken_line = False
        try:
            self._make(os.O_APPEND if append else os.O_TRUNC | os.O_APPEND)
        except OSError as error:
            self._failed(error, time.monotonic(), 0)

    def _make(self, flags: int = os.O_APPEND) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._open(flags)

    def _open(self, flags: int = os.O_APPEND) -> None:
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, LOG_MODE)
        information = os.fstat(self._fd)
        self._place = information.st_dev, information.st_ino
        self._size = information.st_size
        self._began = datetime.fromtimestamp(information.st_mtime) if self._size else self._now()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            data = f"{self.format(record)}\n".encode("utf-8", "backslashreplace")
        except Exception:
            self.handleError(record)
            return
        now_s = time.monotonic()
        if now_s < self._retry_at_s:
            self._lost += data.count(b"\n")
            return
        try:
            self._prepare(now_s, len(data))
            self._write(data)
        except OSError as error:
            self._failed(error, now_s, data.count(b"\n"))
            return
        self._complaints.written(self.path)

    def _prepare(self, now_s: float, more_bytes: int) -> None:
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_S
            self._look()
        if self._size and now_s >= self._rotate_at_s and self._is_done(more_bytes):
            self._rotate(now_s)
        if self._lost or self._broken_line:
            self._resume()

    def _look(self) -> None:
        """Reopens the file when it was moved or removed, and updates the size when it was truncated."""
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            there = None
        if self._fd < 0 or there is None or (there.st_dev, there.st_ino) != self._place:
            self._close()
            self._make()
        else:
            self._size = there.st_size

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = os.write(self._fd, view)
            self._size += written
            self._broken_line = written < len(view)
            view = view[written:]

    def _resume(self) -> None:
        """Writes how many lines are missing; the count is reset only when that is written."""
        text = f"{self._lost} lines are missing here: they couldn't be written\n" if self._lost else ""
        self._write(f"{chr(10) if self._broken_line else ''}{text}".encode())
        self._lost, self._broken_line = 0, False

    def _failed(self, error: OSError, now_s: float, lines: int) -> None:
        self._complaints.failed(self.path, error)
        self._lost += lines
        self._retry_at_s = now_s + RETRY_S
        if self._fd < 0:
            self._look_at_s = self._retry_at_s  # the file is looked for then

    def close(self) -> None:
        self._close()
        super().close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # --- rotation

    def _is_done(self, more_bytes: int) -> bool:
        rotation = self._rotation
        if rotation is None:
            return False
        if self._size + more_bytes > rotation.bytes_max:
            return True
        return rotation.by_time and rotation.name(self._began, 0) != rotation.name(self._now(), 0)

    def _rotate(self, now_s: float) -> None:
        assert self._rotation is not None
        try:
            _put_away(self.path, self._rotated_path(self._rotation))
            self._delete_old(self._rotation)
        except OSError as error:
            self._rotate_at_s = now_s + RETRY_S
            _complain(f"Log file {self.path} can't be rotated, it grows: {error}")
            return
        self._close()
        self._open()

    def _rotated_path(self, rotation: Rotation) -> Path:
        number = 0
        while (path := rotation.name(self._began, number)).exists():
            number += 1
        return path

    def _delete_old(self, rotation: Rotation) -> None:
        directory = rotation.name(self._began, 0).parent
        old = [path for path in directory.glob(rotation.found) if path != self.path]
        for path in sorted(old, key=lambda path: path.stat().st_mtime_ns)[: -rotation.kept_max]:
            with contextlib.suppress(OSError):
                path.unlink()


def _put_away(source: Path, target: Path) -> None:
    """Moves `source` to `target`, compressed if its suffix is .gz (at level 1, since the log waits for it)."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix != ".gz":
        source.rename(target)
        return
    try:
        with (
            open(source, "rb") as plain,
            open(target, "wb", opener=_group_reads) as file,
            gzip.GzipFile("", "wb", compresslevel=1, fileobj=file) as packed,
        ):
            shutil.copyfileobj(plain, packed, 1 << 20)
    except OSError:
        target.unlink(missing_ok=True)
        raise
    source.unlink()


def _group_reads(path: str, flags: int) -> int:
    return os.open(path, flags, LOG_MODE)


def _complain(text: str) -> None:
    """Writes to standard error, since the logs can't be written."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


class Console(logging.StreamHandler[TextIO]):
    """Standard output; silent once its reader is gone (a closed terminal or pipe)."""

    def emit(self, record: logging.LogRecord) -> None:
        if self.stream.closed:
            return
        try:
            self.stream.write(self.format(record) + self.terminator)
            self.stream.flush()
        except OSError:
            self._silence()
        except Exception:
            self.handleError(record)

    def _silence(self) -> None:
        """Point the descriptor at /dev/null: flushing the buffered output would fail again at exit."""
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)


@dataclass(frozen=True, slots=True)
class Logs:
    """The open logs of a server. `access_enabled` False: `access` does nothing. `format`: text or json."""

    writer: Writer
    access_enabled: bool
    format: str = "text"

    def access(
        self,
        peer: str,
        request: str,
        status: int,
        duration_ms: float,
        request_id: str = "",
        times: RequestTimes | None = None,
    ) -> None:
        """Note one request, for example ("127.0.0.1:5", "GET /ping HTTP/1.1", 200, 1.2). Costs about a microsecond.
        `times`: the parts of its time, for the line of a timed request."""
        if self.access_enabled:
            self.writer.put_access(
                (time.time(), peer, request, status, duration_ms, request_id, "" if times is None else times.text())
            )

    def every_period(self, source: Source) -> None:
        """Makes the writing thread read `source` a few times a second, and at the end until it is empty."""
        self.writer.sources.append(source)

    def soon(self, source: Source) -> None:
        """Makes the writing thread read `source` now, at most a few times in a period."""
        self.writer.hurry(source)

    def model_line(self, source: str, line: str, level: int = logging.INFO, request_id: str = "") -> None:
        """A line that a worker wrote; `source` is W-<id>-<model>_<version>-stdout or -stderr."""
        self.writer.put_line(ModelLine(time.time(), source, level, line, request_id))

    @property
    def level(self) -> int:
        return logging.getLogger(SERVER).getEffectiveLevel()

    def set_level(self, level: int) -> None:
        logging.getLogger(SERVER).setLevel(level)

    def flush(self, timeout_s: float) -> bool:
        """Waits until the server's own messages so far are written; returns False after `timeout_s`."""
        return self.writer.flush(timeout_s)

    def close(self) -> None:
        """Write the waiting records, close the files, and remove our handlers from `logging`."""
        self.writer.close()
        for logger in loggers():
            for deferred in [handler for handler in logger.handlers if isinstance(handler, Deferred)]:
                logger.removeHandler(deferred)
                for target in deferred.targets:
                    target.close()


def loggers() -> list[logging.Logger]:
    known = logging.Logger.manager.loggerDict.values()
    return [logging.getLogger(), *(logger for logger in known if isinstance(logger, logging.Logger))]
