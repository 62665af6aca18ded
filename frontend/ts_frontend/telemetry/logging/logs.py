"""The logs of a server as its settings say: TorchServe's files (names, directories, line patterns) or those of
`log_config`; and the workers' output: lines of a handler go to the model log, metric records to the metrics.

Loggers: `ts_frontend.*` are the server's own messages; MODEL_LOG has the workers' output, TS_METRICS and MODEL_METRICS
the metrics, ACCESS_LOG one line per request."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ts.protocol.text import unmarked
from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import PROCESS_DIED
from ts_frontend.telemetry.logging import log_config as log_settings
from ts_frontend.telemetry.logging.formats import AccessFormatter, JsonFormatter, TerminalFormatter, TextFormatter
from ts_frontend.telemetry.logging.log_config import read_plan
from ts_frontend.telemetry.logging.writer import (
    ACCESS,
    MODEL,
    SERVER,
    Complaints,
    Console,
    Deferred,
    LogEntry,
    Logs,
    ModelLine,
    RotatedFile,
    Writer,
    daily,
    loggers,
)
from ts_frontend.telemetry.metrics.registry import MetricsRegistry
from ts_frontend.telemetry.metrics.requests import METRICS_PREFIX, parse_record

#: The logger of messages for the author of a handler.
AUTHORS = f"{SERVER}.reloading"
#: The logger of a worker's ends and starts in TorchServe's words, which its alerts look for and its author doesn't.
RECOVERY = f"{SERVER}.recovery"
METRICS = ("TS_METRICS", "MODEL_METRICS")


def setup_logs(config: ServerConfig) -> Logs:
    """Open the logs as the settings say, and log the notes about the settings. Call once, before threads start to log.

    :raises ConfigError: log_config can't be used.
    A file that can't be written doesn't stop the start: it is reported on standard error once per directory.
    """
    warnings = _set_up_handlers(config)
    writer = Writer(polls=config.access_log_polls)
    for logger in loggers():
        if logger.handlers:
            logger.handlers[:] = [Deferred(logger.handlers, writer)]
    writer.start()
    _log_notes(config, warnings)
    return Logs(writer, config.access_log and logging.getLogger(ACCESS).isEnabledFor(logging.INFO), config.log_format)


def _set_up_handlers(config: ServerConfig) -> list[str]:
    path = config.log_config
    if path is None:
        _open_files(config)
        return []
    if log_settings.is_dict_config(path):
        log_settings.apply_dict_config(path)
        return []
    plan = read_plan(path, _lookups(config))
    if not plan.appenders:
        _open_files(config)
    warnings = log_settings.apply_plan(plan, console=config.console_log)
    return [f"log_config {path}: {text}" for text in dict.fromkeys(warnings)]


def _lookups(config: ServerConfig) -> dict[str, dict[str, str]]:
    """The values for `${env:…}` and `${sys:…}`: the environment, overridden by the settings' log directories."""
    metrics = str(config.metrics_location or config.log_location)
    places = {"LOG_LOCATION": str(config.log_location), "METRICS_LOCATION": metrics}
    java = {"user.dir": str(Path.cwd()), "java.io.tmpdir": str(config.temp_dir)}
    return {"env": {**config.environment, **places}, "sys": {**java, **places}}


def _open_files(config: ServerConfig) -> None:
    """Opens the five files of TorchServe, which all exist from then on, and the console."""
    metrics_location = config.metrics_location or config.log_location
    complaints = Complaints()
    bare, full = (JsonFormatter(),) * 2 if config.log_format == "json" else (TextFormatter(bare=True), TextFormatter())
    console = [_with(Console(sys.stdout), full)] if config.console_log else []
    if config.dev_model is not None:
        console = [_with(_Lines(sys.stdout), TerminalFormatter())]
    ours = [_with(_Worth(sys.stdout), TerminalFormatter())] if config.dev_model is not None else console
    _attach("", [_file(config.log_location, "ts_log.log", full, complaints), *ours], logging.INFO)
    logging.getLogger(SERVER).setLevel(config.log_level.upper())
    _attach(ACCESS, _access_handlers(config, bare, console, complaints), logging.INFO)
    _attach(MODEL, [_file(config.log_location, "model_log.log", full, complaints), *console], logging.INFO)
    told = console if config.dev_model is None else []
    for name in METRICS:
        _attach(name, [_file(metrics_location, f"{name.lower()}.log", bare, complaints), *told], logging.INFO)


class _Lines(Console):
    """A console with requests and workers' lines for the author of a handler, without the line of TorchServe that comes
    before the traceback of each load: a traceback is shown once."""

    def emit(self, record: logging.LogRecord) -> None:
        entries: Sequence[LogEntry] = getattr(record, "entries", ())
        kept = [one for one in entries if one.text() != PROCESS_DIED]
        if len(kept) < len(entries):
            record = logging.makeLogRecord(record.__dict__ | {"entries": kept})
        if kept or not entries:
            super().emit(record)


class _Worth(Console):
    """A console with the server's messages for the author of a handler. A message whose record has `retold` is left
    out: another one says the same."""

    def emit(self, record: logging.LogRecord) -> None:
        told = record.levelno >= logging.WARNING and record.name != RECOVERY and not getattr(record, "retold", False)
        if told or record.name == AUTHORS:
            super().emit(record)


def _access_handlers(
    config: ServerConfig, bare: logging.Formatter, console: Sequence[logging.Handler], complaints: Complaints
) -> list[logging.Handler]:
    if config.access_log_format is None:
        return [_file(config.log_location, "access_log.log", bare, complaints), *console]
    own = AccessFormatter(config.access_log_format)
    shown = [_with(Console(sys.stdout), own)] if console else []
    return [_file(config.log_location, "access_log.log", own, complaints), *shown]


def _attach(name: str, handlers: Sequence[logging.Handler], level: int) -> None:
    logger = logging.getLogger(name)
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = not name


def _file(directory: Path, name: str, formatter: logging.Formatter, complaints: Complaints) -> logging.Handler:
    path = directory / name
    return _with(RotatedFile(path, daily(path), complaints=complaints), formatter)


def _with(handler: logging.Handler, formatter: logging.Formatter) -> logging.Handler:
    handler.setFormatter(formatter)
    return handler


def _log_notes(config: ServerConfig, warnings: Iterable[str]) -> None:
    logger = logging.getLogger(f"{SERVER}.config")
    for note in config.notes:
        logger.log(note.level, "%s", note.text)
    for text in warnings:
        logger.warning("%s", text)


#: The limits for one stream of one worker per second; lines beyond them are only counted. A handler that prints without
#: end must neither slow down the server nor fill the disk.
LINES_PER_S_MAX = 10_000
CHARS_PER_S_MAX = 16 << 20


class _Stream:
    """Counts of one stream's output. `dropped` only grows; `reported` belongs to the writing thread."""

    __slots__ = ("chars", "dropped", "lines", "reported", "source", "until_s")

    def __init__(self, source: str) -> None:
        self.source = source
        self.until_s = 0.0
        self.lines = self.chars = self.dropped = self.reported = 0

    def has_room(self, size: int) -> bool:
        now_s = time.monotonic()
        if now_s >= self.until_s:
            self.until_s = now_s + 1.0
            self.lines = self.chars = 0
        self.lines += 1
        self.chars += size
        if self.lines <= LINES_PER_S_MAX and self.chars <= CHARS_PER_S_MAX:
            return True
        self.dropped += 1
        return False


class ModelLog:
    """Routes workers' lines to the model log or the metrics."""

    def __init__(self, logs: Logs, metrics: MetricsRegistry) -> None:
        self._logs = logs
        self._metrics = metrics
        self._streams: dict[tuple[int, str], _Stream] = {}
        logs.every_period(self._dropped)

    def line(self, worker_id: int, name: str, stream: str, line: str) -> None:
        """One line of worker `worker_id`; `name` is MODEL_VERSION, `stream` stdout or stderr."""
        request_id, line = unmarked(line)
        if line.startswith(METRICS_PREFIX):
            record = parse_record(line)
            if record is not None:
                self._metrics.handler_value(record, name)
                return
        known = self._streams.get((worker_id, stream))
        if known is None:
            source = f"W-{worker_id}-{name}-{stream}"
            known = self._streams[worker_id, stream] = _Stream(source)
        if known.has_room(len(line)):
            level = logging.WARNING if stream == "stderr" else logging.INFO
            self._logs.model_line(known.source, line, level, request_id)

    def _dropped(self) -> Iterator[tuple[str, list[ModelLine]]]:
        """Log lines with the number of dropped lines by stream. Called by the writing thread."""
        limits = f"more than {LINES_PER_S_MAX} lines or {CHARS_PER_S_MAX} characters in a second"
        found = []
        for stream in list(self._streams.values()):
            count = stream.dropped - stream.reported
            if count:
                stream.reported += count
                text = f"{count} lines were dropped: {limits}"
                found.append(ModelLine(time.time(), stream.source, logging.WARNING, text))
        yield MODEL, found
