"""Types of metrics."""

from __future__ import annotations

from enum import Enum


class MetricTypes(Enum):
    """A metric's type is part of its identity: a counter and a gauge of one name are two metrics."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
