"""The line by which a worker, or the system metrics command, reports one metric."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ts_frontend.telemetry.metrics_definitions import HOST_DIMENSION, Definition, Kind
from ts_frontend.telemetry.metrics_text import log_text

METRICS_PREFIX = "[METRICS]"

#: `NAME.UNIT:VALUE|#DIM:VALUE,…[|#type:COUNTER]|#hostname:HOST,EPOCH_S[,REQUEST_ID,…]`
_RECORD = re.compile(
    r"(?P<name>[\w\s]+)\.(?P<unit>[\w\s]+):(?P<value>[^|]+)\|#(?P<labels>[^|]*)(?:\|#type:(?P<kind>\w+))?"
    r"\|#hostname:(?P<host>[^,|]*),(?:timestamp:)?(?P<seconds>\d+)(?:,(?P<ids>.*))?"
)
_KINDS = {kind.name: kind for kind in Kind}


@dataclass(frozen=True, slots=True)
class Record:
    """One value of one metric. `labels` in the order of the line; `request_ids`: joined by commas."""

    name: str
    unit: str
    value: float
    labels: dict[str, str]
    kind: Kind
    host: str
    seconds: int
    request_ids: str

    def definition(self) -> Definition:
        """What the record itself says of its metric."""
        return Definition(self.name, self.kind, self.unit, (*self.labels, HOST_DIMENSION))

    def values(self, definition: Definition) -> tuple[str, ...] | None:
        """Its label values in the definition's order: by name, or else by position; None when they don't fit."""
        names = definition.dimensions[:-1]
        if len(names) != len(self.labels):
            return None
        if self.labels.keys() == set(names):
            return (*(self.labels[name] for name in names), self.host)
        return (*self.labels.values(), self.host)

    def text(self, definition: Definition, values: tuple[str, ...]) -> str:
        """As the metrics log has it, under that definition and with what `values` gave for it."""
        labels = dict(zip(definition.dimensions[:-1], values, strict=False))
        return log_text(definition, self.value, labels, self.host, self.seconds, self.request_ids)


def parse_record(line: str) -> Record | None:
    """The record in a line, with or without METRICS_PREFIX; None when it isn't one."""
    match = _RECORD.fullmatch(line.removeprefix(METRICS_PREFIX))
    if match is None:
        return None
    try:
        value = float(match["value"])
    except ValueError:
        return None
    kind = _KINDS.get((match["kind"] or "GAUGE").upper())
    if kind is None or (kind is Kind.COUNTER and (value < 0 or math.isnan(value))):
        return None
    labels = dict(part.partition(":")[::2] for part in match["labels"].split(",") if part)
    seconds = int(match["seconds"])
    return Record(match["name"], match["unit"], value, labels, kind, match["host"], seconds, match["ids"] or "")
