"""Metrics that are kept until they are emitted: TorchServe's older interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ts.metrics import records
from ts.metrics.dimension import ERROR_LABELS, Dimension, completed, model_labels
from ts.metrics.metric import Metric
from ts.metrics.metric_cache import Adding
from ts.metrics.metric_type_enum import MetricTypes


class MetricsStore(Adding):
    """Values in `store`, one Metric for each combination of name, unit, request and labels; `emit` writes them out."""

    def __init__(self, request_ids: Mapping[int, str] | None, model_name: str) -> None:
        self.store: list[Metric] = []
        self.request_ids = request_ids
        self.model_name = model_name
        self.cache: dict[str, Metric] = {}

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
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        method = "counter" if metric_type is MetricTypes.COUNTER else None
        self._keep(name, value, unit, idx, completed(dimensions, model_labels(self.model_name)), method)

    def emit(self) -> None:
        """Write every value as a record and forget them."""
        for metric in self.store:
            records.emit(str(metric))
        self.store.clear()
        self.cache.clear()

    def _keep(
        self,
        name: str,
        value: float,
        unit: str | None,
        idx: int | None,
        labels: list[Dimension],
        method: str | None = None,
    ) -> None:
        request_id = self._request_ids_of(idx)
        key = "-".join((name, str(unit), request_id, *map(str, labels)))
        if key in self.cache:
            self.cache[key].update(value)
            return
        self.cache[key] = Metric(name, value, unit, labels, request_id, method)
        self.store.append(self.cache[key])
