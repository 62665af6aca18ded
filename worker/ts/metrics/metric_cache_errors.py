"""Errors in the definition of a metric. They are subclasses of Python's errors, for handlers that catch KeyError."""

from __future__ import annotations


class MetricsCacheError(Exception):
    """The base class of these errors."""


class GeneralMetricsCacheError(MetricsCacheError):
    """The metrics file has invalid content."""


class MetricsCacheKeyError(MetricsCacheError, KeyError):
    """No metric of that name and type, or no `model_metrics` section."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # a KeyError's own is in quotes


class MetricsCacheTypeError(MetricsCacheError, TypeError):
    """A name, unit, dimension list or metric type of the wrong type."""


class MetricsCacheIOError(MetricsCacheError, OSError):
    """The metrics file can't be read."""


class MetricsCachePyYamlError(MetricsCacheError):
    """The metrics file isn't YAML."""


class MetricsCacheValueError(MetricsCacheError, ValueError):
    """An invalid value of a metric."""


class MetricUnitError(MetricsCacheValueError):
    """A unit that isn't one of time or size, given to `add_time` or `add_size`."""
