"""The logger and the metrics that Triton gives to Python models."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from ts.compat.triton_backend.messages import TritonModelException
from ts.metrics.dimension import Dimension
from ts.metrics.metric_type_enum import MetricTypes
from ts.metrics.records import body, emit, is_name


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
    """A series of a family. Each change is told to the frontend, which adds up the workers'; gauges: the last one."""

    def __init__(self, family: MetricFamily, labels: dict[str, str], buckets: Sequence[float]) -> None:
        self._family, self._value = family, 0.0
        self.labels = {str(name): str(value) for name, value in labels.items()}
        self._buckets = [float(bound) for bound in buckets]

    def increment(self, value: float) -> None:
        kind = self._family.kind
        if kind == MetricFamily.COUNTER and value < 0:
            raise TritonModelException("a counter can't be decremented")
        if kind == MetricFamily.HISTOGRAM:
            raise TritonModelException("a histogram observes values, it isn't incremented")
        self._value += float(value)
        self._tell(float(value) if kind == MetricFamily.COUNTER else self._value)

    def set(self, value: float) -> None:
        if self._family.kind != MetricFamily.GAUGE:
            raise TritonModelException("only a gauge can be set")
        self._value = float(value)
        self._tell(self._value)

    def observe(self, value: float) -> None:
        if self._family.kind != MetricFamily.HISTOGRAM:
            raise TritonModelException("only a histogram observes values")
        self._value += float(value)
        self._tell(float(value))

    def value(self) -> float:
        """The value in this worker; of a histogram the sum."""
        return self._value

    def _tell(self, value: float) -> None:
        family = self._family
        labels = [Dimension(name, text) for name, text in self.labels.items()]
        kind, help = MetricTypes[family.kind], family.description
        emit(body(family.name, "Count", value, labels, metric_type=kind, help=help, buckets=self._buckets))


class MetricFamily:
    """Metrics of one name, all with the same labels."""

    COUNTER, GAUGE, HISTOGRAM = "COUNTER", "GAUGE", "HISTOGRAM"

    def __init__(self, name: str, description: str, kind: str) -> None:
        if kind not in (self.COUNTER, self.GAUGE, self.HISTOGRAM):
            raise TritonModelException(f"the kind of metric {name!r} must be COUNTER, GAUGE or HISTOGRAM, not {kind!r}")
        if not is_name(str(name)):
            raise TritonModelException(f"a metric's name has letters, digits and underscores: {name!r}")
        self.name, self.description, self.kind = str(name), str(description), kind

    def Metric(self, labels: dict[str, str] | None = None, buckets: Sequence[float] | None = None) -> Metric:
        return Metric(self, labels or {}, buckets or ())


class PreferredMemory:
    """A model's preferred memory for another model's answer; here all answers are on the CPU."""

    def __init__(self, preferred_memory_type: Any, preferred_device_id: int = 0) -> None:
        self.type, self.device_id = preferred_memory_type, preferred_device_id
