"""Metrics and their values: definitions, read from `metrics.yaml`, and the families of series that have them. A request
pays one `add` for each value.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final, Protocol

import yaml

from ts_frontend.config.files import read_text
from ts_frontend.config.kinds import ConfigError

#: The dimension that the server adds to every model metric.
HOST_DIMENSION: Final = "Hostname"


class MetricKind(Enum):
    """The type of a metric: a sum, a last value, or buckets."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Definition:
    """One metric. `dimensions`: label names in their order; the values a recorder gives belong to them by position."""

    name: str
    kind: MetricKind
    unit: str
    dimensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Definitions:
    """The metrics of the server and those of handlers, by name."""

    server: Mapping[str, Definition]
    model: Mapping[str, Definition]


def read_definitions(path: Path) -> Definitions:
    """The definitions in a metrics.yaml; a section that isn't there has none. Raises ConfigError."""
    try:
        content = yaml.safe_load(read_text(path))  # libyaml crashes on deep nesting
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"metrics_config {path} can't be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"metrics_config {path} holds no mapping")
    try:
        server = {one.name: one for one in _section(content.get("ts_metrics"), ())}
        model = {one.name: one for one in _section(content.get("model_metrics"), (HOST_DIMENSION,))}
    except ValueError as error:
        raise ConfigError(f"metrics_config {path}: {error}") from error
    return Definitions(server, {name: one for name, one in model.items() if name not in server})


def _section(section: Any, more: tuple[str, ...]) -> Iterator[Definition]:
    if not isinstance(section or {}, dict):
        raise ValueError(f"a section maps types to lists of metrics, it isn't {section!r}")
    for word, entries in (section or {}).items():
        kinds = {kind.value: kind for kind in MetricKind}
        if word not in kinds:
            raise ValueError(f"no metric type {word!r}, only {', '.join(kinds)}")
        for entry in entries or []:
            yield _definition(kinds[word], entry, more)


def _definition(kind: MetricKind, entry: Any, more: tuple[str, ...]) -> Definition:
    try:
        name, unit, dimensions = str(entry["name"]), str(entry["unit"]), entry["dimensions"]
    except (KeyError, TypeError):
        raise ValueError(f"{entry!r} needs name, unit and dimensions") from None
    if not isinstance(dimensions, list):
        raise ValueError(f"dimensions of {name} must be a list, not {dimensions!r}")
    return Definition(name, kind, unit, (*map(str, dimensions), *more))


#: The limit of series of a metric: a handler may put request ids into a label.
SERIES_MAX: Final = 10_000
#: The most values of a series that are kept before they are summed.
TIMES_MAX: Final = 512
#: The usual ones of Prometheus's Java client; the last bucket, +Inf, is implied.
BUCKETS: Final[Sequence[float]] = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)


class Sample(Protocol):
    """One series."""

    def add(self, value: float) -> None:
        """A counter's increment, a gauge's new value, a histogram's observation."""

    def add_all(self, values: Sequence[float]) -> None:
        """`add` of each."""

    def read(self) -> list[tuple[str, str, float]]:
        """Its samples: (suffix of the name, value of the label `le` or "", value)."""


class Counter:
    __slots__ = ("value",)

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def add(self, value: float) -> None:
        self.value += value

    def add_all(self, values: Sequence[float]) -> None:
        self.value += sum(values)

    def read(self) -> list[tuple[str, str, float]]:
        return [("", "", self.value)]


class Gauge:
    __slots__ = ("value",)

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def add(self, value: float) -> None:
        self.value = value

    def add_all(self, values: Sequence[float]) -> None:
        if values:
            self.value = values[-1]

    def read(self) -> list[tuple[str, str, float]]:
        return [("", "", self.value)]


class Histogram:
    """Cumulative counts of values up to each of `bounds`, their total number, and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float] = BUCKETS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def add_all(self, values: Sequence[float]) -> None:
        ordered, counts, below = sorted(values), self.counts, 0
        for index, bound in enumerate(self.bounds):
            upto = bisect_right(ordered, bound, below)
            counts[index] += upto - below
            below = upto
        counts[-1] += len(ordered) - below
        self.sum += sum(values)

    def read(self) -> list[tuple[str, str, float]]:
        shown, below = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            below += count
            shown.append(("_bucket", "+Inf" if bound == float("inf") else repr(float(bound)), float(below)))
        return [*shown, ("_count", "", float(below)), ("_sum", "", self.sum)]


class NullSample:
    """A series whose values are discarded."""

    __slots__ = ()

    def add(self, value: float) -> None:
        pass

    def add_all(self, values: Sequence[float]) -> None:
        pass

    def read(self) -> list[tuple[str, str, float]]:
        return []


NOTHING: Final = NullSample()
NEW: Final[dict[MetricKind, Callable[[], Sample]]] = {
    MetricKind.COUNTER: Counter,
    MetricKind.GAUGE: Gauge,
    MetricKind.HISTOGRAM: Histogram,
}


class Family:
    """A metric and its series by label values. `help`: "" for the sentence that TorchServe has."""

    __slots__ = ("_new", "definition", "help", "samples")

    def __init__(self, definition: Definition, help: str = "", new: Callable[[], Sample] | None = None) -> None:
        self.definition = definition
        self.help = help or f"Torchserve prometheus {definition.kind.value} metric with unit: {definition.unit}"
        self.samples: dict[tuple[str, ...], Sample] = {}
        self._new = new or NEW[definition.kind]

    def sample(self, labels: tuple[str, ...]) -> Sample:
        """The series with these label values, made when new; NOTHING for a wrong number, or above SERIES_MAX."""
        found = self.samples.get(labels)
        if found is not None:
            return found
        if len(labels) != len(self.definition.dimensions) or len(self.samples) >= SERIES_MAX:
            return NOTHING
        return self.samples.setdefault(labels, self._new())
