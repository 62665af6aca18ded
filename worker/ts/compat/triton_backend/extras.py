"""The logger and the metrics that Triton gives to Python models."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from ts.compat.triton_backend.errors import TritonModelException


class Logger:
    """Writes to the model log."""

    INFO, WARNING, ERROR, VERBOSE = "INFO", "WARNING", "ERROR", "VERBOSE"

    @staticmethod
    def log(message: str, level: str = INFO) -> None:
        stream = sys.stdout if level in (Logger.INFO, Logger.VERBOSE) else sys.stderr
        print(message, file=stream, flush=True)

    @staticmethod
    def log_info(message: str) -> None:
        Logger.log(message, Logger.INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        Logger.log(message, Logger.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        Logger.log(message, Logger.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        Logger.log(message, Logger.VERBOSE)


class Metric:
    """One series of a family. Values live in the worker."""

    def __init__(self, kind: str, labels: dict[str, str]) -> None:
        self._kind, self.labels, self._value = kind, labels, 0.0

    def increment(self, value: float) -> None:
        if self._kind == MetricFamily.COUNTER and value < 0:
            raise TritonModelException("a counter can't be decremented")
        if self._kind == MetricFamily.HISTOGRAM:
            raise TritonModelException("a histogram observes values, it isn't incremented")
        self._value += value

    def set(self, value: float) -> None:
        if self._kind != MetricFamily.GAUGE:
            raise TritonModelException("only a gauge can be set")
        self._value = value

    def observe(self, value: float) -> None:
        if self._kind != MetricFamily.HISTOGRAM:
            raise TritonModelException("only a histogram observes values")
        self._value += value

    def value(self) -> float:
        return self._value


class MetricFamily:
    """Metrics of one name."""

    COUNTER, GAUGE, HISTOGRAM = "COUNTER", "GAUGE", "HISTOGRAM"

    def __init__(self, name: str, description: str, kind: str) -> None:
        self.name, self.description, self.kind = name, description, kind

    def Metric(self, labels: dict[str, str] | None = None, buckets: Sequence[float] | None = None) -> Metric:
        return Metric(self.kind, dict(labels or {}))


class PreferredMemory:
    """A model's preferred memory for another model's answer; here all answers are on the CPU."""

    def __init__(self, preferred_memory_type: Any, preferred_device_id: int = 0) -> None:
        self.type, self.device_id = preferred_memory_type, preferred_device_id
