"""The base of a metric that a handler declares, for classes of one's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ts.metrics.metric_type_enum import MetricTypes
from ts.metrics.unit import Units, long_name

MetricUnit = Units()


class MetricAbstract(ABC):
    """A metric's name, unit, dimension names and type."""

    def __init__(
        self,
        metric_name: str,
        unit: str | None,
        dimension_names: Sequence[str] | None = None,
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> None:
        self.metric_name = metric_name
        self.unit = long_name(unit)
        self.dimension_names = list(dimension_names or ())
        self.metric_type = metric_type

    @abstractmethod
    def add_or_update(self, value: float, dimension_values: Sequence[str] = (), request_id: str = "") -> None:
        """Record a value with one value for each dimension name."""
