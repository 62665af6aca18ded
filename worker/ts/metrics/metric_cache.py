"""`context.metrics`: the metrics a handler has declared or used, and the calls that record them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Self

from ts.metrics.caching_metric import CachingMetric
from ts.metrics.dimension import ERROR_LABELS, Dimension, completed, model_labels
from ts.metrics.metric_cache_errors import MetricsCacheKeyError, MetricUnitError
from ts.metrics.metric_type_enum import MetricTypes
from ts.metrics.unit import SIZE_UNITS, TIME_UNITS


class Adding:
    """The calls that record a value of a known unit. `idx` is the request it counts for; None: all of the batch.
    `request_ids`: index in the batch to request id, of the batch being handled; or a single request id."""

    request_ids: Mapping[int, str] | str | None = None

    def _request_ids_of(self, idx: int | None) -> str:
        ids = self.request_ids or {}
        if not isinstance(ids, Mapping):
            return str(ids)
        return ",".join(ids.values()) if idx is None else ids.get(idx, "")

    def add_metric(
        self,
        name: str,
        value: float,
        unit: str | None,
        idx: int | None = None,
        dimensions: Sequence[Dimension] = (),
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> None:
        raise NotImplementedError

    def add_counter(
        self, name: str, value: float, idx: int | None = None, dimensions: Sequence[Dimension] = ()
    ) -> None:
        self.add_metric(name, value, "count", idx, dimensions, MetricTypes.COUNTER)

    def add_time(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "ms",
        dimensions: Sequence[Dimension] = (),
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        """Record a time in ms or s. Raises MetricUnitError."""
        if unit not in TIME_UNITS:
            raise MetricUnitError(f"unit of the time {name} must be one of {', '.join(TIME_UNITS)}, not {unit!r}")
        self.add_metric(name, value, unit, idx, dimensions, metric_type)

    def add_size(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "MB",
        dimensions: Sequence[Dimension] = (),
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        """Record a size in MB, kB, GB or B. Raises MetricUnitError."""
        if unit not in SIZE_UNITS:
            raise MetricUnitError(f"unit of the size {name} must be one of {', '.join(SIZE_UNITS)}, not {unit!r}")
        self.add_metric(name, value, unit, idx, dimensions, metric_type)

    def add_percent(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        dimensions: Sequence[Dimension] = (),
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        self.add_metric(name, value, "percent", idx, dimensions, metric_type)


class MetricCache(Adding):
    """Metrics by type and name."""

    def __init__(self, model_name: str | None = None) -> None:
        self.cache: dict[MetricTypes, dict[str, CachingMetric]] = {kind: {} for kind in MetricTypes}
        self.model_name = model_name

    def set_request_ids(self, request_ids: Mapping[int, str] | str | None) -> None:
        """Sets the metrics to another batch, or to a single request id."""
        self.request_ids = request_ids

    def bind(self, request_ids: Mapping[int, str]) -> Self:
        """The same metrics for another batch, for batches that run concurrently."""
        bound = copy.copy(self)
        bound.request_ids = request_ids
        return bound

    def add_metric_to_cache(
        self,
        metric_name: str,
        unit: str | None,
        dimension_names: Sequence[str] = (),
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> CachingMetric:
        """Declare a metric. Another one of that name and type, with another unit or other dimensions, gives way to it;
        the same one is returned.

        Raises MetricsCacheTypeError.
        """
        metric = CachingMetric(metric_name, unit, dimension_names, metric_type)
        known = self.cache[metric_type].get(metric_name)
        if known is not None and (known.unit, known.dimension_names) == (metric.unit, metric.dimension_names):
            return known
        self.cache[metric_type][metric_name] = metric
        return metric

    def get_metric(self, metric_name: str, metric_type: MetricTypes = MetricTypes.COUNTER) -> CachingMetric:
        """A declared metric. Raises MetricsCacheKeyError."""
        try:
            return self.cache[metric_type][metric_name]
        except KeyError:
            message = f"no metric {metric_name!r} of type {getattr(metric_type, 'value', metric_type)}"
            raise MetricsCacheKeyError(f"{message}: declare it with add_metric_to_cache or in metrics.yaml") from None

    def cache_keys(self) -> list[str]:
        """The declared metrics, each as TYPE:NAME."""
        return [f"{kind.value}:{name}" for kind, metrics in self.cache.items() for name in metrics]

    def add_error(self, name: str, value: float, dimensions: Sequence[Dimension] = ()) -> None:
        """Count `value` more errors, with the dimension Level:Error added."""
        labels = completed(dimensions, ERROR_LABELS)
        self._record(name, value, "", None, labels, MetricTypes.COUNTER)

    def add_metric(
        self,
        name: str,
        value: float,
        unit: str | None,
        idx: int | None = None,
        dimensions: Sequence[Dimension] = (),
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> None:
        """Record `value` of a metric of any unit; a new one is declared with the dimensions of this call.

        ModelName and Level:Model are added to `dimensions` unless given. Raises MetricsCacheTypeError.
        """
        labels = completed(dimensions, model_labels(self.model_name))
        self._record(name, value, unit, idx, labels, metric_type)

    def _record(
        self,
        name: str,
        value: float,
        unit: str | None,
        idx: int | None,
        labels: list[Dimension],
        metric_type: MetricTypes,
    ) -> None:
        metric = self.cache[metric_type].get(name) if isinstance(metric_type, MetricTypes) else None
        if metric is None:
            metric = self.add_metric_to_cache(name, unit, [label.name for label in labels], metric_type)
        metric.update(value, self._request_ids_of(idx), labels)
