"""The tables and the page of a comparison, in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from measuring.results import Spread, significant

from peers.rows import Results, Row, distinct, ratio, spreads
from peers.scenarios import SCENARIOS, Scenario
from peers.systems import SYSTEMS

INTRODUCTION = """\
# Benchmarks

With this page you can compare this server with other model servers on one machine. `make bench-peers` measures and
writes it; [performance.md](performance.md#fairness) describes the method.

```
{command}
```

Each figure is the median of the rounds, with the minimum and the maximum in brackets. A ratio is *ours / the other*,
taken within each round, in which the servers are loaded in turn; servers with the same model files are compared with
each other (`ours-triton` with `triton`). Higher rates are better, as are lower times, CPU times and memory. CPU time is
that of the server's whole process tree. Each server has one worker for each model, and all others are stopped while it
is loaded. The load generator runs on the same cores, so ratios say more than absolute figures.
"""


def spread_text(spread: Spread) -> str:
    """Median (least – most); without the brackets for a single value."""
    least, median, most = (significant(value) for value in spread)
    return median if spread.least == spread.most else f"{median} ({least} – {most})"


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; the first line is the head."""
    head, *others = lines
    rule = ["---"] * len(head)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *others))


def scenario_table(scenario: Scenario, rows: Sequence[Row]) -> str:
    """A line for each load and server that has rows: the figures, then the ratios."""
    figures = distinct([name for row in rows for name in row.figures])
    ratios = [name for name in scenario.ratios if name in figures]
    lines = [["load", "server", *figures, *(f"ours / it: {name}" for name in ratios)]]
    for load in distinct([row.load for row in rows]):
        for system in distinct([row.system for row in rows if row.load == load]):
            found = spreads(rows, load, system)
            cells = [spread_text(found[name]) if name in found else "" for name in figures]
            quotients = [ratio(rows, load, system, name) for name in ratios]
            bold = [f"**{spread_text(one)}**" if one else "" for one in quotients]
            lines.append([load, f"`{system}`", *cells, *bold])
    return markdown(lines)


def section(scenario: Scenario, results: Results) -> str:
    parts = [f"## {scenario.title}", f"`--only {scenario.name}`"]
    rows = results.of(scenario.name)
    if rows:
        parts.append(scenario_table(scenario, rows))
    if scenario.note:
        parts.append(scenario.note)
    left_out = {**scenario.missing, **_skipped(results, scenario.name)}
    if left_out:
        parts.append("Left out: " + "; ".join(f"`{name}` ({reason})" for name, reason in left_out.items()) + ".")
    return "\n\n".join(parts)


def _skipped(results: Results, scenario: str) -> dict[str, str]:
    return {name: one_line(reason) for (place, name), reason in results.skipped.items() if place == scenario}


def one_line(text: str, characters_max: int = 200) -> str:
    words = " ".join(text.split()).replace("|", "/")
    return words if len(words) <= characters_max else f"{words[:characters_max]}…"


def servers(results: Results) -> str:
    """The table of servers with versions, and the ones that were left out."""
    absent = _skipped(results, "")
    present = {row.system for row in results.rows}
    lines = [["name", "server", "version"]]
    for system in SYSTEMS.values():
        if system.name in present and system.name not in absent:
            lines.append([f"`{system.name}`", system.title, system.version.replace("==", " ")])
    text = markdown(lines)
    if absent:
        text += "\n\nNot measured: " + "; ".join(f"`{name}` ({reason})" for name, reason in absent.items()) + "."
    return text


def page(results: Results, about: Mapping[str, str], command: str) -> str:
    """The whole page; scenarios without a figure are left out."""

    def parts() -> Iterator[str]:
        yield INTRODUCTION.format(command=command)
        yield markdown([["machine", ""], *([name, one_line(value)] for name, value in about.items())])
        yield f"## Servers\n\n{servers(results)}"
        for scenario in SCENARIOS.values():
            if results.of(scenario.name):
                yield section(scenario, results)

    return "\n\n".join(part.strip() for part in parts()) + "\n"
