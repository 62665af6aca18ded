"""The log files of TorchServe (names, places, line patterns), written by one thread so that the event loop never waits.

Loggers: `ts_frontend.*` are the server's own messages; MODEL_LOG has the workers' output, TS_METRICS and MODEL_METRICS
the metrics, ACCESS_LOG one line per request. Requests don't go through `logging` one by one: `Logs.access` collects
them and the thread writes them together, a few times a second.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol, TypeAlias

from ts_frontend.config_table import ServerConfig
from ts_frontend.telemetry import log_settings
from ts_frontend.telemetry.log_files import Console, RotatedFile

RECORDS_WAITING_MAX = 100_000
ACCESS_PERIOD_S = 0.25
ENTRIES_PER_WRITE = 64

SERVER, ACCESS, MODEL = "ts_frontend", "ACCESS_LOG", "MODEL_LOG"
METRICS = ("TS_METRICS", "MODEL_METRICS")
_LEVEL_NAMES = {"WARNING": "WARN", "CRITICAL": "FATAL"}


class Entry(Protocol):
    """One of the lines that are written together. `seconds`: since 1970."""

    @property
    def seconds(self) -> float: ...

    def text(self) -> str: ...

    def parts(self) -> dict[str, object]:
        """What a JSON line has of it."""


#: Gives what is to be written now, as (name of the logger, its lines). Called by the writing thread.
Source: TypeAlias = "Callable[[], Iterable[tuple[str, Sequence[Entry]]]]"


class Access(NamedTuple):
    """One request answered. `peer`: `ip:port`; `request`: method, path, protocol; `seconds`: since 1970, at its end."""

    seconds: float
    peer: str
    request: str
    status: int
    duration_ms: float

    def text(self) -> str:
        return f'/{self.peer} "{self.request}" {self.status} {self.duration_ms:.0f}'

    def parts(self) -> dict[str, object]:
        return {
            "peer": self.peer,
            "request": self.request,
            "status": self.status,
            "duration_ms": round(self.duration_ms, 3),
        }


class _Lines:
    """Entries as text, made once for all handlers: `parts` are (time, text)."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.parts = [(iso_time(one.seconds), one.text()) for one in entries]

    def __str__(self) -> str:
        return "\n".join([text for _, text in self.parts])


class TextFormatter(logging.Formatter):
    """TorchServe's patterns: `TIME [LEVEL] THREAD LOGGER - TEXT`, or (`bare`) `TIME - TEXT`."""

    def __init__(self, *, bare: bool = False) -> None:
        super().__init__()
        self._bare = bare

    def format(self, record: logging.LogRecord) -> str:
        origin = self._origin(record)
        lines: _Lines | None = getattr(record, "entry_lines", None)
        if lines is not None:
            return "\n".join([f"{moment}{origin} - {text}" for moment, text in lines.parts])
        text = f"{iso_time(record.created)}{origin} - {record.getMessage()}"
        return f"{text}\n{record.exc_text}" if record.exc_text else text

    def _origin(self, record: logging.LogRecord) -> str:
        if self._bare:
            return ""
        level = _LEVEL_NAMES.get(record.levelname, record.levelname)
        return f" [{level:<5}] {_thread(record)} {record.name}"


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, thread, logger, message, for requests also their parts."""

    def format(self, record: logging.LogRecord) -> str:
        entries: Sequence[Entry] = getattr(record, "entries", ())
        if entries:
            return "\n".join(json.dumps(self._object(record, one.seconds) | one.parts()) for one in entries)
        tree = self._object(record, record.created) | {"message": record.getMessage()}
        return json.dumps(tree | ({"exception": record.exc_text} if record.exc_text else {}))

    def _object(self, record: logging.LogRecord, seconds: float) -> dict[str, Any]:
        return {
            "time": iso_time(seconds),
            "level": record.levelname,
            "thread": _thread(record),
            "logger": record.name,
        }


def iso_time(seconds: float) -> str:
    """Local time as TorchServe's logs have it: 2026-11-20T23:33:13,083."""
    whole = int(seconds)
    return f"{_iso_second(whole)},{int((seconds - whole) * 1000):03d}"


@functools.lru_cache(maxsize=16)
def _iso_second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))


def _thread(record: logging.LogRecord) -> str:
    """`source` of the record (W-9000-model_1.0-stdout) where it names one, else the thread."""
    name = str(getattr(record, "source", None) or record.threadName)
    return "main" if name == "MainThread" else name


class _Deferred(logging.Handler):
    """Stands in for a logger's handlers: hands each record, complete as text, to the writing thread."""

    def __init__(self, handlers: Sequence[logging.Handler], writer: Writer) -> None:
        super().__init__()
        self.targets = tuple(handlers)
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        record.msg, record.args = record.getMessage(), None
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        record.exc_info = None
        self._writer.put(record, self.targets)


class Writer:
    """The thread that writes. Records beyond RECORDS_WAITING_MAX are dropped, and counted in the log."""

    def __init__(self) -> None:
        self._records: SimpleQueue[tuple[logging.LogRecord, Sequence[logging.Handler]] | None] = SimpleQueue()
        self._accesses: deque[tuple[float, str, str, int, float]] = deque(maxlen=RECORDS_WAITING_MAX)
        self.sources: list[Source] = [self._access_portions]
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, record: logging.LogRecord, handlers: Sequence[logging.Handler]) -> None:
        if self._records.qsize() < RECORDS_WAITING_MAX:
            self._records.put((record, handlers))
        else:
            self._dropped += 1

    def put_access(self, access: tuple[float, str, str, int, float]) -> None:
        """The fields of an Access; it is made of them by the writing thread."""
        self._accesses.append(access)

    def close(self) -> None:
        """Write what is waiting and end the thread."""
        if self._thread.is_alive():
            self._records.put(None)
            self._thread.join()

    def _run(self) -> None:
        due = time.monotonic() + ACCESS_PERIOD_S
        while True:
            wait_s = due - time.monotonic()
            if wait_s <= 0:
                self._write_sources()
                due = time.monotonic() + ACCESS_PERIOD_S
                continue
            try:
                item = self._records.get(timeout=wait_s)
            except Empty:
                continue
            if item is not None:
                _write(*item)
            if self._dropped and self._records.empty():
                self._write_dropped()
            if item is None:
                return self._write_sources()

    def _access_portions(self) -> Iterator[tuple[str, list[Access]]]:
        waiting = self._accesses
        for left in range(len(waiting), 0, -ENTRIES_PER_WRITE):
            yield ACCESS, [Access(*waiting.popleft()) for _ in range(min(left, ENTRIES_PER_WRITE))]

    def _write_sources(self) -> None:
        for source in self.sources:
            for name, entries in source():
                self._write_entries(logging.getLogger(name), entries)

    def _write_entries(self, logger: logging.Logger, entries: Sequence[Entry]) -> None:
        if not logger.isEnabledFor(logging.INFO):
            return
        targets = _targets(logger)
        for start in range(0, len(entries), ENTRIES_PER_WRITE):
            portion = entries[start : start + ENTRIES_PER_WRITE]
            lines = _Lines(portion)
            record = logger.makeRecord(logger.name, logging.INFO, "", 0, "%s", (lines,), None)
            record.entries, record.entry_lines, record.source = portion, lines, "main"
            _write(record, targets)
            time.sleep(0)  # gives the event loop the interpreter, which it would else wait 5 ms for

    def _write_dropped(self) -> None:
        count, self._dropped = self._dropped, 0
        text = f"{count} log records were dropped: they came faster than they could be written"
        _write(logging.LogRecord(SERVER, logging.WARNING, "", 0, text, (), None), _targets(logging.getLogger(SERVER)))


def _write(record: logging.LogRecord, handlers: Iterable[logging.Handler]) -> None:
    for handler in handlers:
        if record.levelno >= handler.level:
            handler.handle(record)


def _targets(logger: logging.Logger) -> list[logging.Handler]:
    """The real handlers that a record of this logger reaches."""
    found: list[logging.Handler] = []
    at: logging.Logger | None = logger
    while at is not None:
        for handler in at.handlers:
            found += handler.targets if isinstance(handler, _Deferred) else [handler]
        at = at.parent if at.propagate else None
    return found


@dataclass(frozen=True, slots=True)
class Logs:
    """The open logs of a server. `access_enabled` False: `access` does nothing."""

    writer: Writer
    access_enabled: bool

    def access(self, peer: str, request: str, status: int, duration_ms: float) -> None:
        """Note one request, for example ("127.0.0.1:5", "GET /ping HTTP/1.1", 200, 1.2). Costs about a microsecond."""
        if self.access_enabled:
            self.writer.put_access((time.time(), peer, request, status, duration_ms))

    def every_period(self, source: Source) -> None:
        """Has the writing thread ask `source` for lines a few times a second, and at the end."""
        self.writer.sources.append(source)

    def model_line(self, source: str, line: str, level: int = logging.INFO) -> None:
        """A line that a worker wrote; `source` is W-<id>-<model>_<version>-stdout or -stderr."""
        logging.getLogger(MODEL).log(level, "%s", line, extra={"source": source})

    def close(self) -> None:
        """Write what is waiting, close the files, and leave `logging` without handlers of ours."""
        self.writer.close()
        for logger in _loggers():
            for deferred in [handler for handler in logger.handlers if isinstance(handler, _Deferred)]:
                logger.removeHandler(deferred)
                for target in deferred.targets:
                    target.close()


def setup_logs(config: ServerConfig) -> Logs:
    """Open the logs as the settings say, and log the notes about the settings. Call once, before threads start to log.

    :raises ConfigError: log_config can't be used.
    :raises OSError: a log directory can't be made or written.
    """
    warnings = _set_up_handlers(config)
    writer = Writer()
    for logger in _loggers():
        if logger.handlers:
            logger.handlers[:] = [_Deferred(logger.handlers, writer)]
    writer.start()
    _log_notes(config, warnings)
    return Logs(writer, config.access_log)


def _set_up_handlers(config: ServerConfig) -> list[str]:
    """Handlers and levels as the settings say; warnings about what of log_config isn't applied."""
    path = config.log_config
    if path and log_settings.is_dict_config(path):
        log_settings.apply_dict_config(path)
        return []
    levels = log_settings.read_log4j2(path) if path else []
    _open_files(config)
    return log_settings.apply_log4j2(path, levels) if path else []


def _open_files(config: ServerConfig) -> None:
    """The five files of TorchServe, all made now, and the console."""
    metrics_location = config.metrics_location or config.log_location
    bare, full = (JsonFormatter(),) * 2 if config.log_format == "json" else (TextFormatter(bare=True), TextFormatter())
    console = [_with(Console(sys.stdout), full)] if config.console_log else []
    _attach("", [_file(config.log_location, "ts_log.log", full), *console], logging.INFO)
    logging.getLogger(SERVER).setLevel(config.log_level.upper())
    _attach(ACCESS, [_file(config.log_location, "access_log.log", bare), *console], logging.INFO)
    _attach(MODEL, [_file(config.log_location, "model_log.log", full), *console], logging.INFO)
    for name in METRICS:
        _attach(name, [_file(metrics_location, f"{name.lower()}.log", bare), *console], logging.INFO)


def _attach(name: str, handlers: Sequence[logging.Handler], level: int) -> None:
    logger = logging.getLogger(name)
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = not name


def _file(directory: Path, name: str, formatter: logging.Formatter) -> logging.Handler:
    directory.mkdir(parents=True, exist_ok=True)
    return _with(RotatedFile(directory / name), formatter)


def _with(handler: logging.Handler, formatter: logging.Formatter) -> logging.Handler:
    handler.setFormatter(formatter)
    return handler


def _log_notes(config: ServerConfig, warnings: Iterable[str]) -> None:
    logger = logging.getLogger(f"{SERVER}.config")
    for note in config.notes:
        logger.log(note.level, "%s", note.text)
    for text in warnings:
        logger.warning("%s", text)


def _loggers() -> list[logging.Logger]:
    known = logging.Logger.manager.loggerDict.values()
    return [logging.getLogger(), *(logger for logger in known if isinstance(logger, logging.Logger))]
