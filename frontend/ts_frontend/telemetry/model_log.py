"""What workers write: lines of a handler go to the model log, metric records to the metrics log."""

from __future__ import annotations

import logging
import re

from ts_frontend.telemetry.logs import Logs

METRICS_PREFIX = "[METRICS]"
MODEL_METRICS = "MODEL_METRICS"

#: `NAME.UNIT:VALUE|#DIM:VALUE,…|#type:COUNTER|#hostname:HOST,EPOCH_S[,REQUEST_ID,…]`
_RECORD = re.compile(r"(?P<metric>[\w\s]+\.[\w\s]+:[^|]+\|#[^|]*)\|#type:\w+\|#hostname:(?P<host>[^,]*),(?P<rest>.*)")


def metric_record(line: str) -> str | None:
    """A worker's metric line as the metrics log has it; None when it isn't one."""
    match = _RECORD.fullmatch(line.removeprefix(METRICS_PREFIX))
    if match is None:
        return None
    timestamp, _, request_ids = match["rest"].partition(",")
    ids = f"requestID:{request_ids}," if request_ids else ""
    return f"{match['metric']}|#hostname:{match['host']},{ids}timestamp:{timestamp}"


class ModelLog:
    """Sorts workers' lines."""

    def __init__(self, logs: Logs) -> None:
        self._logs = logs
        self._metrics = logging.getLogger(MODEL_METRICS)

    def line(self, worker_id: int, name: str, stream: str, line: str) -> None:
        """One line of worker `worker_id`; `name` is MODEL_VERSION, `stream` stdout or stderr."""
        if line.startswith(METRICS_PREFIX):
            record = metric_record(line)
            if record is not None:
                self._metrics.info("%s", record)
                return
        level = logging.WARNING if stream == "stderr" else logging.INFO
        self._logs.model_line(f"W-{worker_id}-{name}-{stream}", line, level)
