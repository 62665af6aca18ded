"""Errors in the definition of a metric."""

from __future__ import annotations


class MetricsCacheError(Exception):
    """Any of the below."""


class MetricsCacheKeyError(MetricsCacheError):
    """No metric of that name and type, or no `model_metrics` section."""


class MetricsCacheTypeError(MetricsCacheError):
    """A name, unit, dimension list or metric type of the wrong type."""


class MetricsCachePyYamlError(MetricsCacheError):
    """The metrics file can't be read as YAML."""


class MetricUnitError(MetricsCacheError, ValueError):
    """A unit that isn't one of time or size, given to `add_time` or `add_size`."""
