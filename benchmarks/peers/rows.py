"""The measured figures, and the ratios within a round."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from peers.systems import reference


class Spread(NamedTuple):
    """The spread of one figure over the rounds."""

    least: float
    median: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(min(values), statistics.median(values), max(values))

    def text(self) -> str:
        return " – ".join(significant(value) for value in self)


def significant(value: float) -> str:
    """A value with three significant digits."""
    if value >= 1000:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one server under one load in one round, by their names with units."""

    scenario: str
    load: str
    system: str
    round: int
    figures: Mapping[str, float]


@dataclass(slots=True)
class Results:
    """The rows by scenario. `skipped`: the reasons why a server isn't in a scenario ("" as scenario: in none)."""

    rows: list[Row] = field(default_factory=list)
    skipped: dict[tuple[str, str], str] = field(default_factory=dict)

    def of(self, scenario: str) -> list[Row]:
        return [row for row in self.rows if row.scenario == scenario]

    def as_json(self) -> dict[str, Any]:
        skipped = [[*key, reason] for key, reason in self.skipped.items()]
        return {"rows": [asdict(row) for row in self.rows], "skipped": skipped}

    @classmethod
    def of_json(cls, told: Mapping[str, Any]) -> Results:
        rows = [Row(**row) for row in told["rows"]]
        return cls(rows, {(scenario, system): reason for scenario, system, reason in told["skipped"]})


def distinct(values: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(values))


def spreads(rows: Sequence[Row], load: str, system: str) -> dict[str, Spread]:
    """The spread of each figure over the rounds, in the order of the rows' figures."""
    these = [row for row in rows if (row.load, row.system) == (load, system)]
    names = distinct([name for row in these for name in row.figures])
    return {name: Spread.of([row.figures[name] for row in these if name in row.figures]) for name in names}


def ratio(rows: Sequence[Row], load: str, system: str, figure: str) -> Spread | None:
    """Our figure divided by that of `system`, round by round; None for ours itself, and if no round has both."""
    ours = reference(system, distinct([row.system for row in rows]))
    figures = {
        (row.system, row.round): row.figures[figure] for row in rows if row.load == load and figure in row.figures
    }
    pairs = [
        (figures[ours, number], value)
        for (name, number), value in figures.items()
        if name == system != ours and (ours, number) in figures
    ]
    quotients = [above / below for above, below in pairs if below]
    return Spread.of(quotients) if quotients else None
