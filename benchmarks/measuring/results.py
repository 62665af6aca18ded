"""The measured figures, their ratios, and the tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Row:
    """One server under one load in one round. Times in the unit of the name; CPU is that of the server's whole tree."""

    round: int
    clients: int
    target: str
    requests: int
    requests_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_us_per_request: float
    cores_used: float
    generator_cores_used: float


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


class Ratio(NamedTuple):
    """One figure of a target divided by that of another, round by round."""

    clients: int
    above: str
    below: str
    spread: Spread
    figure: str = "requests/s"


FIGURES: Mapping[str, Callable[[Row], float]] = {
    "requests/s": lambda row: row.requests_per_s,
    "CPU/request": lambda row: row.cpu_us_per_request,
}


def ratios(rows: Sequence[Row], above: str = "ours", figure: str = "requests/s") -> list[Ratio]:
    """The ratios of `above` to every other target, for each number of clients. Only rounds with both count."""
    found = []
    rates = {(row.clients, row.target, row.round): FIGURES[figure](row) for row in rows}
    for clients in _distinct(row.clients for row in rows):
        for target in _distinct(row.target for row in rows):
            quotients = [
                rates[clients, above, number] / rate
                for (count, name, number), rate in rates.items()
                if (count, name) == (clients, target) != (clients, above) and (clients, above, number) in rates
            ]
            if quotients:
                found.append(Ratio(clients, above, target, Spread.of(quotients), figure))
    return found


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


_COLUMNS: Sequence[tuple[str, Callable[[Row], float]]] = (
    ("requests/s", lambda row: row.requests_per_s),
    ("p50 ms", lambda row: row.p50_ms),
    ("p99 ms", lambda row: row.p99_ms),
    ("CPU µs/request", lambda row: row.cpu_us_per_request),
    ("cores", lambda row: row.cores_used),
)


def table(rows: Sequence[Row]) -> str:
    """A line for each number of clients and target: least – median – most of every figure."""
    lines = [["clients", "server", *(title for title, _ in _COLUMNS)]]
    for clients in _distinct(row.clients for row in rows):
        for target in _distinct(row.target for row in rows):
            these = [row for row in rows if (row.clients, row.target) == (clients, target)]
            if these:
                figures = [Spread.of([figure(row) for row in these]).text() for _, figure in _COLUMNS]
                lines.append([str(clients), target, *figures])
    return aligned(lines)


def ratio_table(found: Sequence[Ratio]) -> str:
    """A line for each ratio of one figure."""
    lines = [["clients", f"{found[0].figure if found else 'ratio'} of", "min – median – max"]]
    lines += [[str(one.clients), f"{one.above} / {one.below}", one.spread.text()] for one in found]
    return aligned(lines)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """The cells in aligned columns; columns of numbers are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index == 1 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def as_json(rows: Sequence[Row], found: Sequence[Ratio]) -> dict[str, Any]:
    return {
        "rows": [asdict(row) for row in rows],
        "ratios": [{**one._asdict(), "spread": one.spread._asdict()} for one in found],
    }
