"""Metrics as text: Prometheus's and OpenMetrics's expositions."""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ts.protocol.frames import Pairs
from ts_frontend.job import Job
from ts_frontend.telemetry.metrics.families import Definition, Family, MetricKind
from ts_frontend.telemetry.metrics.requests import java_double

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_OUTSIDE_NAMES = re.compile(r"[^a-zA-Z0-9_:]")
_LABEL_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})


def prometheus_name(name: str) -> str:
    """A metric's name with the characters that Prometheus doesn't allow replaced by `_`."""
    plain = _OUTSIDE_NAMES.sub("_", name)
    return f"_{plain}" if plain[:1].isdigit() else plain


def exposition(families: Iterable[Family], names: Collection[str] = ()) -> str:
    """The text format of Prometheus, version 0.0.4. With `names` only those families or series (`x_count`), and none of
    a family that has no value."""
    return "".join(line for family in families for line in _family(family, names))


def _family(family: Family, names: Collection[str]) -> Iterator[str]:
    name = prometheus_name(family.definition.name)
    lines = list(_samples(name, family, names))
    if lines or not names:
        yield f"# HELP {name} {family.help.translate(_HELP_ESCAPES)}\n"
        yield f"# TYPE {name} {family.definition.kind.value}\n"
        yield from lines


def _samples(name: str, family: Family, names: Collection[str]) -> Iterator[str]:
    for values, sample in list(family.samples.items()):
        for suffix, bound, value in sample.read():
            if not names or name in names or name + suffix in names:
                yield f"{name}{suffix}{_labels(family.definition, values, bound)} {java_double(value)}\n"


def _labels(definition: Definition, values: tuple[str, ...], bound: str) -> str:
    pairs = list(zip(definition.dimensions, values, strict=True))
    if bound:
        pairs.append(("le", bound))
    text = label_text(pairs)
    return f"{{{text},}}" if text else ""


def label_text(pairs: Iterable[tuple[str, str]]) -> str:
    """Labels and their values as both formats have them between braces."""
    return ",".join(f'{prometheus_name(key)}="{value.translate(_LABEL_ESCAPES)}"' for key, value in pairs)


KIND = "application/openmetrics-text"
OPEN_CONTENT_TYPE = f"{KIND}; version=1.0.0; charset=utf-8"
_VERSIONS = ("1.0.0", "0.0.1")
_OPEN_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
#: The labels of an example have 128 characters at most, with their names; a trace's id takes 40 of them.
REQUEST_ID_CHARS_MAX = 64


class Example(NamedTuple):
    """A request. `took_s` and `queued_s`: the values that it is an example of; `at_s`: since 1970."""

    took_s: float
    queued_s: float
    at_s: float
    request_id: str
    headers: Pairs

    def text(self, value_s: float) -> str:
        """The exemplar's text at the end of a bucket's line."""
        labels = [("request_id", self.request_id[:REQUEST_ID_CHARS_MAX])]
        if trace_id := trace_of(self.headers):
            labels.insert(0, ("trace_id", trace_id))
        return f" # {{{label_text(labels)}}} {java_double(value_s)} {self.at_s:.3f}"


class Examples:
    """The latest request of each bucket, by the time to its answer and by its time in the queue."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = bounds_s
        self.took: list[Example | None] = [None] * (len(bounds_s) + 1)
        self.queued: list[Example | None] = [None] * (len(bounds_s) + 1)

    def add(self, job: Job, now_s: float) -> None:
        """A request was answered now (`time.monotonic()` seconds)."""
        took_s, queued_s = now_s - job.queued_at_s, job.sent_at_s - job.queued_at_s
        example = Example(took_s, queued_s, time.time(), job.request_id, job.request_headers)
        self.took[bisect_left(self._bounds_s, took_s)] = example
        self.queued[bisect_left(self._bounds_s, queued_s)] = example


def trace_of(headers: Pairs) -> str:
    """The trace's id in a request's headers, "" without one."""
    parts = next((value for name, value in headers if name.lower() == "traceparent"), "").split("-")
    return parts[1] if len(parts) >= 4 and len(parts[1]) == 32 and parts[1].isalnum() else ""


def preferred(accept: str) -> bool:
    """Whether a client wants OpenMetrics rather than the older text."""
    best: dict[bool, float] = {}
    for part in accept.split(","):
        kind, *parameters = (word.strip() for word in part.split(";"))
        found = {name.strip().lower(): value.strip() for name, _, value in (one.partition("=") for one in parameters)}
        ours = kind.lower() == KIND and found.get("version", _VERSIONS[0]) in _VERSIONS
        if ours or kind in ("text/plain", "text/*", "*/*"):
            try:
                best[ours] = max(best.get(ours, 0.0), float(found.get("q", "1")))
            except ValueError:
                continue
    return best.get(True, 0.0) > 0 and best[True] >= best.get(False, 0.0)


def openmetrics(
    families: Iterable[Family],
    names: Collection[str] = (),
    examples: Mapping[tuple[str, tuple[str, ...]], Sequence[str]] | None = None,
) -> str:
    """The families as OpenMetrics; `names` as for `exposition`. `examples`: for a histogram's series, by the name of
    its family and its label values, the text at the end of each bucket's line."""
    lines = (line for family in families for line in _open_family(family, names, examples or {}))
    return "".join(lines) + "# EOF\n"


def _open_family(
    family: Family, names: Collection[str], examples: Mapping[tuple[str, tuple[str, ...]], Sequence[str]]
) -> Iterator[str]:
    name = prometheus_name(family.definition.name)
    lines = list(_open_samples(name, family, names, examples))
    if not lines and names:
        return
    kind, shown = family.definition.kind.value, name
    if family.definition.kind is MetricKind.COUNTER:
        shown, kind = (name.removesuffix("_total"), kind) if name.endswith("_total") else (name, "unknown")
    yield f"# HELP {shown} {family.help.translate(_OPEN_HELP_ESCAPES)}\n"
    yield f"# TYPE {shown} {kind}\n"
    yield from lines


def _open_samples(
    name: str, family: Family, names: Collection[str], examples: Mapping[tuple[str, tuple[str, ...]], Sequence[str]]
) -> Iterator[str]:
    for values, sample in list(family.samples.items()):
        found = examples.get((name, values), ())
        pairs = list(zip(family.definition.dimensions, values, strict=True))
        for index, (suffix, bound, value) in enumerate(sample.read()):
            if names and name not in names and name + suffix not in names:
                continue
            labels = label_text([*pairs, ("le", bound)] if bound else pairs)
            example = found[index] if bound and index < len(found) else ""
            yield f"{name}{suffix}{f'{{{labels}}}' if labels else ''} {java_double(value)}{example}\n"
