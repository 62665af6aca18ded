"""A metric that is declared once and recorded many times."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ts.metrics import records
from ts.metrics.dimension import Dimension
from ts.metrics.metric_abstract import MetricAbstract
from ts.metrics.metric_cache_errors import MetricsCacheTypeError
from ts.metrics.metric_type_enum import MetricTypes
from ts.metrics.unit import long_name

logger = logging.getLogger(__name__)


def _check(metric_name: str, unit: str | None, dimension_names: Sequence[str], metric_type: MetricTypes) -> None:
    if not isinstance(metric_name, str) or not records.is_name(metric_name):
        raise MetricsCacheTypeError(f"metric name must be word characters and blanks, not {metric_name!r}")
    if not isinstance(unit, str | None) or not records.is_name(long_name(unit)):
        raise MetricsCacheTypeError(f"unit of {metric_name} must be word characters and blanks, not {unit!r}")
    if not isinstance(dimension_names, list | tuple) or not all(isinstance(name, str) for name in dimension_names):
        raise MetricsCacheTypeError(f"dimension names of {metric_name} must be a list of str, not {dimension_names!r}")
    if not isinstance(metric_type, MetricTypes):
        raise MetricsCacheTypeError(f"type of {metric_name} must be a MetricTypes, not {metric_type!r}")


class CachingMetric(MetricAbstract):
    """A metric's name, unit, dimension names and type. Every recorded value is one record at once.

    Raises MetricsCacheTypeError for a definition of wrong types.
    """

    def __init__(
        self,
        metric_name: str,
        unit: str | None,
        dimension_names: Sequence[str] = (),
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> None:
        _check(metric_name, unit, dimension_names, metric_type)
        super().__init__(metric_name, unit, dimension_names, metric_type)

    def add_or_update(self, value: float, dimension_values: Sequence[str] = (), request_id: str = "") -> None:
        """Record `value` (a counter's increment) with one value for each dimension name, in their order.

        A wrong value or number of dimension values is an error in the log and no record: metrics never fail a request.
        """
        try:
            if len(dimension_values) != len(self.dimension_names):
                raise ValueError(f"dimension values {list(dimension_values)} for the dimensions {self.dimension_names}")
            number = value if type(value) in (int, float) else float(value)  # also of tensors and numpy scalars
            if self.metric_type is MetricTypes.COUNTER and number < 0:
                raise ValueError(f"a counter can't go down by {number}")
        except (TypeError, ValueError) as error:
            logger.error("Metric %s not recorded: %s", self.metric_name, error)
            return
        labels = map(Dimension, self.dimension_names, dimension_values)
        records.emit(records.body(self.metric_name, self.unit, number, labels, request_id, self.metric_type))

    def emit_metrics(self, request_id: str, value: float, dimension_string: str) -> None:
        """Record `value` with dimensions as a record has them: `NAME:VALUE,NAME:VALUE`."""
        given = dict(part.partition(":")[::2] for part in dimension_string.split(",") if part)
        self.update(value, request_id, [Dimension(*pair) for pair in given.items()])

    def update(self, value: float, request_id: str = "", dimensions: Sequence[Dimension] = ()) -> None:
        """Record `value` with `dimensions`, in the order of the declared names if the names are the same."""
        labels = {str(dimension.name): str(dimension.value) for dimension in dimensions}
        if labels.keys() == set(self.dimension_names):
            self.add_or_update(value, [labels[name] for name in self.dimension_names], request_id)
        else:
            self.add_or_update(value, [str(dimension.value) for dimension in dimensions], request_id)

    def __str__(self) -> str:
        names = ",".join(self.dimension_names)
        return f"name:{self.metric_name}, unit: {self.unit}, dimensions: {names}, type: {self.metric_type.value}"
