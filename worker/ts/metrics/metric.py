"""One value of a metric, as the system metrics and `MetricsStore` keep it."""

from __future__ import annotations

from collections.abc import Sequence

from ts.metrics import records
from ts.metrics.dimension import Dimension
from ts.metrics.unit import Units, long_name

MetricUnit = Units()


class Metric:
    """A value with its name, unit and labels; `str()` is its record, with the time of the call.

    `metric_method="counter"` makes `update` add, otherwise it replaces.
    """

    def __init__(
        self,
        name: str,
        value: float,
        unit: str | None,
        dimensions: Sequence[Dimension],
        request_id: str | None = None,
        metric_method: str | None = None,
    ) -> None:
        self.name = name
        self.unit = long_name(unit)
        self.value = value
        self.dimensions = list(dimensions)
        self.request_id = request_id
        self.metric_method = metric_method

    def update(self, value: float) -> None:
        """Add to a counter, replace anything else."""
        self.value = self.value + value if self.metric_method == "counter" else value

    def reset(self) -> None:
        self.value = 0

    def __str__(self) -> str:
        return records.body(self.name, self.unit, self.value, self.dimensions, self.request_id or "")

    def to_dict(self) -> dict[str, object]:
        return {
            "MetricName": self.name,
            "Value": self.value,
            "Unit": self.unit,
            "Dimensions": [dimension.to_dict() for dimension in self.dimensions],
            "HostName": records.hostname(),
            "RequestId": self.request_id,
        }
