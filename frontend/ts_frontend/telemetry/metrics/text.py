"""Metrics as text: Prometheus's and OpenMetrics's expositions, and the lines of logs."""

from __future__ import annotations

import math
import re
import time
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

from ts.protocol.frames import Pairs
from ts_frontend.job import Job
from ts_frontend.telemetry.metrics.families import HOST_DIMENSION, Definition, Family, MetricKind

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_OUTSIDE_NAMES = re.compile(r"[^a-zA-Z0-9_:]")
_LABEL_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})


def java_double(value: float) -> str:
    """`value` as Java's Double.toString writes it: 4.0, 1.0E7, 5.0E-4; infinities and NaN as Prometheus writes them."""
    value = float(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        return repr(value)
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    first, rest = digits[0], "".join(map(str, digits[1:])) or "0"
    return f"{'-' * sign}{first}.{rest}E{len(digits) - 1 + int(exponent)}"


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


def log_text(
    definition: Definition, value: float, labels: Mapping[str, str], host: str, seconds: float, request_ids: str = ""
) -> str:
    """A metric as the metrics logs have it. `labels` without the host; `seconds`: since 1970."""
    dimensions = ",".join(f"{name}:{text}" for name, text in labels.items())
    ids = f"requestID:{request_ids}," if request_ids else ""
    head = f"{definition.name}.{definition.unit}:{java_double(value)}|#{dimensions}"
    return f"{head}|#hostname:{host},{ids}timestamp:{int(seconds)}"


METRICS_PREFIX = "[METRICS]"

#: `NAME.UNIT:VALUE|#DIM:VALUE,…[|#type:COUNTER][|#help:TEXT][|#buckets:0.1;1]|#hostname:HOST,EPOCH_S[,REQUEST_ID,…]`
_RECORD = re.compile(
    r"(?P<name>[\w\s:]+)\.(?P<unit>[\w\s]+):(?P<value>[^|]+)\|#(?P<labels>[^|]*)(?:\|#type:(?P<kind>\w+))?"
    r"(?:\|#help:(?P<help>[^|]*))?(?:\|#buckets:(?P<buckets>[^|]*))?"
    r"\|#hostname:(?P<host>[^,|]*),(?:timestamp:)?(?P<seconds>\d{1,18})(?:,(?P<ids>.*))?"
)
#: The most buckets of a histogram that a model declares.
BOUNDS_MAX = 100
_KINDS = {kind.name: kind for kind in MetricKind}


@dataclass(frozen=True, slots=True)
class Record:
    """One value of one metric. `labels` in the order of the line; `request_ids`: joined by commas. `help`: the text of
    a metric that the model declares itself, None for one that metrics.yaml should list; `bounds`: of its histogram."""

    name: str
    unit: str
    value: float
    labels: dict[str, str]
    kind: MetricKind
    host: str
    seconds: int
    request_ids: str
    help: str | None = None
    bounds: tuple[float, ...] = ()

    def definition(self) -> Definition:
        """The metric's definition by the record itself."""
        return Definition(self.name, self.kind, self.unit, (*self.labels, HOST_DIMENSION))

    def values(self, definition: Definition) -> tuple[str, ...] | None:
        """Its label values in the definition's order: by name, or else by position; None if they don't match it."""
        names = definition.dimensions[:-1]
        if len(names) != len(self.labels):
            return None
        if self.labels.keys() == set(names):
            return (*(self.labels[name] for name in names), self.host)
        return (*self.labels.values(), self.host)

    def text(self, definition: Definition, values: tuple[str, ...]) -> str:
        """Its line in the metrics log, with that definition and the label values that `values` returned for it."""
        labels = dict(zip(definition.dimensions[:-1], values, strict=False))
        return log_text(definition, self.value, labels, self.host, self.seconds, self.request_ids)


def parse_record(line: str) -> Record | None:
    """The record in a line, with or without METRICS_PREFIX; None when it isn't one."""
    match = _RECORD.fullmatch(line.removeprefix(METRICS_PREFIX))
    if match is None:
        return None
    try:
        value = float(match["value"])
        texts = (match["buckets"] or "").split(";")[:BOUNDS_MAX]
        bounds = tuple(sorted(bound for bound in map(float, filter(None, texts)) if math.isfinite(bound)))
    except ValueError:
        return None
    kind = _KINDS.get((match["kind"] or "GAUGE").upper())
    if kind is None or (kind is MetricKind.COUNTER and (value < 0 or math.isnan(value))):
        return None
    labels = dict(part.partition(":")[::2] for part in match["labels"].split(",") if part)
    seconds = int(match["seconds"])
    ids = match["ids"] or ""
    return Record(match["name"], match["unit"], value, labels, kind, match["host"], seconds, ids, match["help"], bounds)


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
