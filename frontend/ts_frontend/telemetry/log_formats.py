"""Records as lines: TorchServe's two patterns, and JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from ts_frontend.telemetry.log_entries import MAIN, Entry, Lines, folded, iso_time, printable

_LEVEL_NAMES = {"WARNING": "WARN", "CRITICAL": "FATAL"}


def level_name(record: logging.LogRecord) -> str:
    """The level's name in log4j2."""
    return _LEVEL_NAMES.get(record.levelname, record.levelname)


def thread_name(record: logging.LogRecord) -> str:
    """`source` of the record (W-9000-model_1.0-stdout) where it names one, else the thread."""
    name = str(getattr(record, "source", None) or record.threadName)
    return MAIN if name == "MainThread" else printable(name)


class TextFormatter(logging.Formatter):
    """TorchServe's patterns: `TIME [LEVEL] THREAD LOGGER - TEXT`, or (`bare`) `TIME - TEXT`."""

    def __init__(self, *, bare: bool = False) -> None:
        super().__init__()
        self._bare = bare

    def format(self, record: logging.LogRecord) -> str:
        origin = self._origin(record)
        lines: Lines | None = getattr(record, "entry_lines", None)
        if lines is not None:
            return "\n".join([f"{moment}{origin} - {text}" for _, moment, text in lines.parts])
        text = f"{iso_time(record.created)}{origin} - {record.getMessage()}"
        return f"{text}\n{folded(record.exc_text)}" if record.exc_text else text

    def _origin(self, record: logging.LogRecord) -> str:
        return "" if self._bare else f" [{level_name(record):<5}] {thread_name(record)} {record.name}"


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, thread, logger, message or a request's parts, request_id where known."""

    def format(self, record: logging.LogRecord) -> str:
        entries: Sequence[Entry] = getattr(record, "entries", ())
        if entries:
            return "\n".join([json.dumps(self._object(record, one.seconds) | one.parts()) for one in entries])
        tree = self._object(record, record.created) | {"message": record.getMessage()}
        request_id = getattr(record, "request_id", None)
        if request_id:
            tree["request_id"] = str(request_id)
        return json.dumps(tree | ({"exception": record.exc_text} if record.exc_text else {}))

    def _object(self, record: logging.LogRecord, seconds: float) -> dict[str, Any]:
        return {
            "time": iso_time(seconds),
            "level": record.levelname,
            "thread": thread_name(record),
            "logger": record.name,
        }
