"""Metrics as text, as TorchServe's Java libraries write them."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal

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
    r"(?P<name>[\w\s]+)\.(?P<unit>[\w\s]+):(?P<value>[^|]+)\|#(?P<labels>[^|]*)(?:\|#type:(?P<kind>\w+))?"
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
