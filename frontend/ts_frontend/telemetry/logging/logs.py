"""The logs of a server: TorchServe's files (names, directories, line patterns) or those of `log_config`, and the thread
that writes them.

Loggers: `ts_frontend.*` are the server's own messages; MODEL_LOG has the workers' output, TS_METRICS and MODEL_METRICS
the metrics, ACCESS_LOG one line per request.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import PROCESS_DIED
from ts_frontend.telemetry.logging import log_config as log_settings
from ts_frontend.telemetry.logging.files import Complaints, Console, RotatedFile, daily
from ts_frontend.telemetry.logging.formats import AccessFormatter, JsonFormatter, TerminalFormatter, TextFormatter
from ts_frontend.telemetry.logging.log_config import read_plan
from ts_frontend.telemetry.logging.writer import ACCESS, MODEL, SERVER, Deferred, LogEntry, ModelLine, Source, Writer
from ts_frontend.telemetry.timing import RequestTimes

#: The logger of messages for the author of a handler.
AUTHORS = f"{SERVER}.models.reloading"
#: The logger of a worker's ends and starts in TorchServe's words, which its alerts look for and its author doesn't.
RECOVERY = f"{SERVER}.workers.failures"
METRICS = ("TS_METRICS", "MODEL_METRICS")


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
        for logger in _loggers():
            for deferred in [handler for handler in logger.handlers if isinstance(handler, Deferred)]:
                logger.removeHandler(deferred)
                for target in deferred.targets:
                    target.close()


def setup_logs(config: ServerConfig) -> Logs:
    """Open the logs as the settings say, and log the notes about the settings. Call once, before threads start to log.

    :raises ConfigError: log_config can't be used.
    A file that can't be written doesn't stop the start: it is reported on standard error once per directory.
    """
    warnings = _set_up_handlers(config)
    writer = Writer(polls=config.access_log_polls)
    for logger in _loggers():
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


def _loggers() -> list[logging.Logger]:
    known = logging.Logger.manager.loggerDict.values()
    return [logging.getLogger(), *(logger for logger in known if isinstance(logger, logging.Logger))]
