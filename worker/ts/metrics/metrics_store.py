"""Metrics that are kept until they are emitted: TorchServe's older interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ts.metrics import records
from ts.metrics.dimension import ERROR_LABELS, Dimension, completed, model_labels
from ts.metrics.metric import Metric
from ts.metrics.metric_cache_errors import MetricUnitError
from ts.metrics.unit import SIZE_UNITS, TIME_UNITS


class MetricsStore:
    """Values in `store`, one Metric for each combination of name, unit, request and labels; `emit` writes them out."""

    def __init__(self, request_ids: Mapping[int, str] | None, model_name: str) -> None:
        self.store: list[Metric] = []
        self.request_ids = request_ids
        self.model_name = model_name
        self.cache: dict[str, Metric] = {}

    def add_counter(
        self, name: str, value: float, idx: int | None = None, dimensions: Sequence[Dimension] = ()
    ) -> None:
        """Count `value` more."""
        self._add(name, value, "count", idx, dimensions, "counter")

    def add_time(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "ms",
        dimensions: Sequence[Dimension] = (),
    ) -> None:
        """Record a time in ms or s. Raises MetricUnitError."""
        if unit not in TIME_UNITS:
            raise MetricUnitError(f"unit of the time {name} must be one of {', '.join(TIME_UNITS)}, not {unit!r}")
        self._add(name, value, unit, idx, dimensions)

    def add_size(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "MB",
        dimensions: Sequence[Dimension] = (),
    ) -> None:
        """Record a size in MB, kB, GB or B. Raises MetricUnitError."""
        if unit not in SIZE_UNITS:
            raise MetricUnitError(f"unit of the size {name} must be one of {', '.join(SIZE_UNITS)}, not {unit!r}")
        self._add(name, value, unit, idx, dimensions)

    def add_percent(
        self, name: str, value: float, idx: int | None = None, dimensions: Sequence[Dimension] = ()
    ) -> None:
        """Record a share in percent."""
        self._add(name, value, "percent", idx, dimensions)

    def add_error(self, name: str, value: float, dimensions: Sequence[Dimension] = ()) -> None:
        """Record an error with the dimension Level:Error added."""
        self._keep(name, value, "", None, completed(dimensions, ERROR_LABELS))

    def add_metric(
        self,
        name: str,
        value: float,
        unit: str | None = None,
        idx: int | None = None,
        dimensions: Sequence[Dimension] = (),
    ) -> None:
        """Record a value of any unit."""
        self._add(name, value, unit, idx, dimensions)

    def emit(self) -> None:
        """Write every value as a record and forget them."""
        for metric in self.store:
            records.emit(str(metric))
        self.store.clear()
        self.cache.clear()

    def _add(
        self,
        name: str,
        value: float,
        unit: str | None,
        idx: int | None,
        dimensions: Sequence[Dimension],
        method: str | None = None,
    ) -> None:
        self._keep(name, value, unit, idx, completed(dimensions, model_labels(self.model_name)), method)

    def _keep(
        self,
        name: str,
        value: float,
        unit: str | None,
        idx: int | None,
        labels: list[Dimension],
        method: str | None = None,
    ) -> None:
        request_id = self._request_id(idx)
        key = "-".join((name, str(unit), request_id, *map(str, labels)))
        if key in self.cache:
            self.cache[key].update(value)
            return
        self.cache[key] = Metric(name, value, unit, labels, request_id, method)
        self.store.append(self.cache[key])

    def _request_id(self, idx: int | None) -> str:
        ids = self.request_ids or {}
        if not isinstance(ids, Mapping):  # contexts made for tests have one id here
            return str(ids)
        return ",".join(ids.values()) if idx is None else ids.get(idx, "")
