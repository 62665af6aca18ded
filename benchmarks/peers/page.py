"""The tables and the page of a comparison, in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from peers.rows import Results, Row, Spread, distinct, ratio, significant, spreads
from peers.scenarios import IN_PROCESS, SCENARIOS, Scenario
from peers.systems import SYSTEMS

INTRODUCTION = """\
# Benchmarks

![Requests a second of a handler that returns at once](images/comparison.svg)

*Ours / the other's* on one machine, with one worker for each model and the same model files: the median of the rounds.
Higher is better for requests, lower for the other figures. Bare is our network layer alone, or the network in a loop.
"""
RUN = """\
## Run

```
{command}
make bench LONG=1 ARGS="--write docs/benchmarks.md"   # every size and number of clients: about an hour
make bench ARGS="--list"    # scenarios, servers, and the scenarios that each server can't run
make bench ARGS="--only lone,mlp-http --systems ours,mosec --rounds 5 --seconds 2"
```

It needs h2load (`apt-get install nghttp2-client`), and Java 17 for TorchServe. The other servers are installed on first
use, about 1 GB each; `python ts_scripts/compiled_environment.py` makes the compiled form. A run prints each scenario,
and writes all figures as JSON, whose tables `python benchmarks/compare.py --render FILE` prints.
"""
METHOD = """\
## Method

- **One compiled load generator**, h2load, for all servers. Each client has one connection with one request at a time.
  The load of `open` and `overload` comes from a Python client, because h2load waits for answers.
- **Answers are verified** before and after each measurement by a real client, and during it by their size.
- **Interleaved rounds**: each loads all servers in turn, in an order that rotates. Ratios are taken within a round.
  Brackets have the minimum and the maximum of the rounds.
- **Warm-up**: at most 20 s for each protocol of TorchServe, 2 s for the others, and half a second before each scenario.
- **CPU time** is that of the server's whole process tree. The load generator runs on the same cores, so ratios say
  more than absolute figures; those of two runs on a shared machine differ by up to a quarter.
- **Energy** is that of the whole machine, where the system tells it (RAPL).
- The models have the same weights and one thread everywhere. Access and metric logs are off.
"""
COLUMNS: Mapping[str, Sequence[str]] = {
    "TorchServe": ("torchserve",),
    "mosec": ("mosec",),
    "LitServe": ("litserve",),
    "Ray Serve": ("rayserve",),
    "Triton": ("triton",),
    "MLServer": ("mlserver",),
    "KServe": ("kserve",),
    "bare": ("bare", "bare-http", IN_PROCESS),
}
"""The columns of the table of ratios, with their systems."""
DRAWN = "noop-http"
"""The scenario of the picture, whose figures with the most clients are in the page."""


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


def ratios(results: Results) -> list[list[str]]:
    """The table of ratios: a line for each load, with the first figure that its scenario compares."""
    lines = [["scenario", "load", "figure", *COLUMNS]]
    for scenario in SCENARIOS.values():
        rows = results.of(scenario.name)
        name = next((name for name in scenario.ratios if any(name in row.figures for row in rows)), None)
        if name is None:
            continue
        for load in distinct([row.load for row in rows if name in row.figures]):
            found = [[ratio(rows, load, system, name) for system in systems] for systems in COLUMNS.values()]
            cells = [next((significant(one.median) for one in these if one), "") for these in found]
            if any(cells):
                lines.append([f"`{scenario.name}`", load, name, *cells])
    return lines


def drawn(results: Results) -> str:
    """The figures of the picture: those of its scenario's last load."""
    rows = results.of(DRAWN)
    last = rows[-1].load
    shown = scenario_table(SCENARIOS[DRAWN], [row for row in rows if row.load == last])
    return f"## {SCENARIOS[DRAWN].title}\n\n{shown}"


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
        yield INTRODUCTION
        yield markdown(ratios(results))
        failed = [f"`{name}` in `{place}` ({one_line(why)})" for (place, name), why in results.skipped.items() if place]
        if failed:
            yield f"Failed: {'; '.join(failed)}."
        yield RUN.format(command=command)
        yield METHOD
        yield "## Machine"
        yield markdown([["machine", ""], *([name, one_line(value)] for name, value in about.items())])
        if results.of(DRAWN):
            yield drawn(results)
        yield f"## Servers\n\n{servers(results)}"

    return "\n\n".join(part.strip() for part in parts()) + "\n"
