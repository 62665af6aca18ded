"""The metrics of several frontends as one page: counters and histograms are summed, and so are gauges that count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ts_frontend.telemetry.metrics.families import Counter, Definition, Family, Gauge, Histogram, MetricKind, Sample

#: Gauges that aren't sums: how the values of the frontends become one.
_GAUGES: Mapping[str, Callable[[float, float], float]] = {
    "ts_server_ready": min,
    "ts_server_draining": max,
    "ts_queue_capacity": max,
    "ts_model_failing": max,
    "process_start_time_seconds": min,
}


def _sum(one: float, other: float) -> float:
    return one + other


def plain(families: Iterable[Family]) -> list[Any]:
    """Families as plain values."""
    return [
        [
            [one.definition.name, one.definition.kind.value, one.definition.unit, list(one.definition.dimensions)],
            one.help,
            [[list(labels), _values(sample)] for labels, sample in one.samples.items()],
        ]
        for one in families
    ]


def _values(sample: Sample) -> list[Any]:
    if isinstance(sample, Histogram):
        return [list(sample.bounds), list(sample.counts), sample.sum]
    return [sample.value] if isinstance(sample, (Counter, Gauge)) else []


def summed(own: Iterable[Family], others: Sequence[Any]) -> Iterator[Family]:
    """The families of this frontend with those of others, which are `plain`."""
    found: dict[str, Family] = {}
    for family in [*plain(own), *(one for some in others for one in some)]:
        (name, kind, unit, dimensions), help, samples = family
        whole = found.setdefault(name, Family(Definition(name, MetricKind(kind), unit, tuple(dimensions)), help))
        for labels, values in samples:
            _add(whole, tuple(labels), values)
    yield from found.values()


def _add(family: Family, labels: tuple[str, ...], values: Sequence[Any]) -> None:
    before = family.samples.get(labels)
    if len(values) == 3:
        bounds, counts, total = values
        if not isinstance(before, Histogram):
            before = family.samples[labels] = Histogram(bounds)
        if list(before.bounds) == bounds:
            before.counts = [one + more for one, more in zip(before.counts, counts, strict=True)]
            before.sum += total
    elif values and family.definition.kind is MetricKind.COUNTER:
        family.samples[labels] = Counter(values[0] + (before.value if isinstance(before, Counter) else 0.0))
    elif values:
        join = _GAUGES.get(family.definition.name, _sum)
        family.samples[labels] = Gauge(join(before.value, values[0]) if isinstance(before, Gauge) else values[0])
