"""What workers write: lines of a handler go to the model log, metric records to the metrics."""

from __future__ import annotations

import logging

from ts_frontend.telemetry.logs import Logs
from ts_frontend.telemetry.metrics import MetricsRegistry
from ts_frontend.telemetry.metrics_record import METRICS_PREFIX, parse_record


class ModelLog:
    """Sorts workers' lines."""

    def __init__(self, logs: Logs, metrics: MetricsRegistry) -> None:
        self._logs = logs
        self._metrics = metrics

    def line(self, worker_id: int, name: str, stream: str, line: str) -> None:
        """One line of worker `worker_id`; `name` is MODEL_VERSION, `stream` stdout or stderr."""
        if line.startswith(METRICS_PREFIX):
            record = parse_record(line)
            if record is not None:
                self._metrics.handler_value(record)
                return
        level = logging.WARNING if stream == "stderr" else logging.INFO
        self._logs.model_line(f"W-{worker_id}-{name}-{stream}", line, level)
