"""Metrics as text, as TorchServe's Java libraries write them."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from decimal import Decimal

from ts_frontend.telemetry.metrics_definitions import Definition
from ts_frontend.telemetry.metrics_samples import Family

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_OUTSIDE_NAMES = re.compile(r"[^a-zA-Z0-9_:]")
_LABEL_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})


def java_double(value: float) -> str:
    """`value` as Java's Double.toString has it: 4.0, 1.0E7, 5.0E-4; infinities and NaN as Prometheus wants them."""
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
    """A metric's name with what Prometheus doesn't allow in names replaced by `_`."""
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
    text = "".join(f'{prometheus_name(key)}="{value.translate(_LABEL_ESCAPES)}",' for key, value in pairs)
    return f"{{{text}}}" if text else ""


def log_text(
    definition: Definition, value: float, labels: Mapping[str, str], host: str, seconds: float, request_ids: str = ""
) -> str:
    """A metric as the metrics logs have it. `labels` without the host; `seconds`: since 1970."""
    dimensions = ",".join(f"{name}:{text}" for name, text in labels.items())
    ids = f"requestID:{request_ids}," if request_ids else ""
    head = f"{definition.name}.{definition.unit}:{java_double(value)}|#{dimensions}"
    return f"{head}|#hostname:{host},{ids}timestamp:{int(seconds)}"
