"""The workers' output: lines of a handler go to the model log, metric records to the metrics."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from ts.protocol.text import unmarked
from ts_frontend.telemetry.logging.logs import Logs
from ts_frontend.telemetry.logging.writer import MODEL, ModelLine
from ts_frontend.telemetry.metrics.registry import MetricsRegistry
from ts_frontend.telemetry.metrics.text import METRICS_PREFIX, parse_record

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
