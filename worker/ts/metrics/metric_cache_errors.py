"""Errors in the definition of a metric: Python's kinds of errors, too, for handlers that catch a KeyError."""

from __future__ import annotations


class MetricsCacheError(Exception):
    """Any of the below."""


class GeneralMetricsCacheError(MetricsCacheError):
    """The metrics file holds something else than metrics."""


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
    """A value that no metric can have."""


class MetricUnitError(MetricsCacheValueError):
    """A unit that isn't one of time or size, given to `add_time` or `add_size`."""
