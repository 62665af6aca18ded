"""Which metrics there are: `metrics.yaml` read into definitions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from ts_frontend.config.kinds import ConfigError

#: What the server adds to the dimensions of every model metric.
HOST_DIMENSION = "Hostname"


class MetricKind(Enum):
    """How a metric's values combine."""

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
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
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
