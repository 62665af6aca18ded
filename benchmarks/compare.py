"""Compares the server with TorchServe, mosec, LitServe, Triton, MLServer and KServe, and writes docs/benchmarks.md.

Usage: python benchmarks/compare.py [--help] [--list] [--only SCENARIO,...] [--systems NAME,...] [--rounds N]
       [--seconds S] [--long] [--write FILE] [--json FILE] [--render FILE]

The other servers are installed on first use, each into an environment of its own. One that can't be installed is named
and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from measuring import h2load, machine
from measuring.environments import NotInstalled
from measuring.processes import processes
from peers import lifecycles, loads, page, scenarios
from peers.rows import Results, Row, significant
from peers.scenarios import IN_PROCESS, Kind, Load, NotKnown, Scenario
from peers.shared_servers import Failure, Servers
from peers.systems import SYSTEMS

RESULTS = Path(__file__).resolve().parent / "results" / "compare.json"
AGAIN_S_MAX = 0.5
"""The most seconds of load before a scenario, on a warmed-up server."""


def say(text: str) -> None:
    print(text, flush=True)


def _names(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, with `scenarios`, the selected ones, among them."""
    parser = argparse.ArgumentParser(description="Compare the server with other model servers, in interleaved rounds.")
    parser.add_argument("--list", action="store_true", help="print scenarios and servers, measure nothing")
    parser.add_argument("--only", type=_names, default=(), metavar="SCENARIO,...", help="these scenarios alone")
    parser.add_argument("--systems", type=_names, default=(), metavar="NAME,...", help="these servers alone")
    parser.add_argument("--rounds", type=int, help="how often everything is measured (default: 3; --long: 5)")
    parser.add_argument("--seconds", type=float, help="of load in each measurement (default: 1; --long: 3)")
    parser.add_argument("--warm-up", type=float, default=20.0, metavar="S", help="most seconds before (default: 20)")
    parser.add_argument("--long", action="store_true", help="all scenarios with all sizes and numbers of clients")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page, for docs/benchmarks.md")
    parser.add_argument("--json", type=Path, metavar="FILE", default=RESULTS, help=f"every figure (default: {RESULTS})")
    parser.add_argument(
        "--render", type=Path, metavar="FILE", help="make the page of an earlier --json, measure nothing"
    )
    options = parser.parse_args(words)
    options.rounds = options.rounds or (5 if options.long else 3)
    options.seconds = options.seconds or (3.0 if options.long else 1.0)
    if options.rounds < 1 or options.seconds <= 0:
        parser.error("at least one round, and more than 0 seconds")
    try:
        options.scenarios = scenarios.selected(options.only, options.systems, long=options.long)
    except NotKnown as error:
        parser.error(str(error))
    return options


def listing(options: argparse.Namespace) -> str:
    lines = []
    for one in options.scenarios:
        lines.append(f"{one.name:<13} {one.title}")
        lines.append(f"{'':<13} {', '.join(load.title for load in one.loads)}: {', '.join(one.systems)}")
        if one.missing:
            missing = "; ".join(f"{name} ({reason})" for name, reason in one.missing.items())
            lines.append(f"{'':<13} not: {missing}")
    lines += ["", *(f"{one.name:<13} {one.title} {one.version}".rstrip() for one in SYSTEMS.values())]
    minutes = scenarios.seconds_of(options.scenarios, options.rounds, options.seconds) / 60
    return "\n".join([*lines, "", f"about {minutes:.0f} minutes with {_measure_text(options)}"])


def _measure_text(options: argparse.Namespace) -> str:
    return f"{options.rounds} rounds of {options.seconds:g} s"


class Comparison:
    """A run: its results so far, and the servers that are left out."""

    def __init__(self, options: argparse.Namespace, servers: Servers) -> None:
        self.results = Results()
        self._options = options
        self._servers = servers
        self._warm: set[tuple[str, bool]] = set()

    def install(self) -> None:
        """Installs the other servers' environments; a server that can't be installed is left out."""
        for name in scenarios.taking_part(self._options.scenarios):
            try:
                SYSTEMS[name].install()
            except NotInstalled as error:
                self._leave_out("", name, error)

    def _leave_out(self, scenario: str, name: str, error: Exception) -> None:
        say(f"{name} is left out{f' of {scenario}' if scenario else ''}: {error}")
        self.results.skipped[scenario, name] = str(error)

    def _takes_part(self, scenario: Scenario, name: str) -> bool:
        return not {("", name), (scenario.name, name)} & self.results.skipped.keys()

    def run(self, scenario: Scenario) -> None:
        """Runs all rounds of a scenario. A server that fails is left out of further rounds; its rows stay."""
        say(f"\n== {scenario.name}: {scenario.title}")
        if scenario.kind.starts_servers:
            self._servers.end()
            self._run_lifecycles(scenario)
            return
        for name in scenario.systems:
            self._attempt(scenario, name, lambda name=name: self._prepare(scenario, name))
        mixed = scenario.kind is Kind.MIXED
        for number in range(self._options.rounds):
            for load in scenario.loads[:1] if mixed else scenario.loads:
                for name in loads.turned(scenario.systems, number):
                    self._attempt(scenario, name, lambda *known: self._measure(*known), scenario, load, name, number)

    def _attempt(self, scenario: Scenario, name: str, action: Callable[..., Sequence[Row]], *known: Any) -> None:
        """Adds the rows of `action`, unless the server is left out; a server that fails is left out."""
        if not self._takes_part(scenario, name):
            return
        try:
            rows = action(*known)
        except Failure as error:
            self._leave_out("" if isinstance(error, NotInstalled) else scenario.name, name, error)
            return
        self.results.rows.extend(rows)
        for row in rows:
            figures = "  ".join(f"{significant(value)} {figure}" for figure, value in row.figures.items())
            say(
                f"{scenario.name:<12} {row.load:<15} round {row.round + 1}/{self._options.rounds}  {name:<13} {figures}"
            )

    def _prepare(self, scenario: Scenario, name: str) -> Sequence[Row]:
        """Starts the server if necessary, and warms it up."""
        if name == IN_PROCESS:
            return ()
        running = self._servers.get(name, [load.call for load in scenario.loads])
        known = (name, scenario.http) in self._warm
        most_s = min(self._options.warm_up, AGAIN_S_MAX if known else SYSTEMS[name].warm_up_s)
        # First by many clients, which warm a server up sooner.
        many = max(scenario.loads, key=lambda load: load.clients)
        for load in scenario.loads if known else [many]:
            if most_s > 0:
                seconds = most_s / len(scenario.loads) if known else most_s
                with self._servers.only(name):
                    target = loads.Target.of(name, running, load, scenario.http)
                    target.load(load.clients, seconds)
                    target.answer()
        self._warm.add((name, scenario.http))
        return ()

    def _measure(self, scenario: Scenario, load: Load, name: str, number: int) -> list[Row]:
        seconds = self._options.seconds
        if name == IN_PROCESS:
            with self._servers.only(name):
                return loads.in_process(scenario, load, number, seconds)
        running = self._servers.get(name, [one.call for one in scenario.loads])
        with self._servers.only(name):
            return loads.measure(scenario, load, name, running, number, seconds)

    def _run_lifecycles(self, scenario: Scenario) -> None:
        rounds, seconds = scenarios.rounds_of(scenario.kind, self._options.rounds), self._options.seconds
        if scenario.kind is Kind.MODELS:
            for name in scenario.systems:
                parts = (self._servers, scenario, scenario.loads, name, rounds, seconds)
                self._attempt(scenario, name, lifecycles.models, *parts)
            return
        for number in range(rounds):
            for name in loads.turned(scenario.systems, number):
                if scenario.kind is Kind.MEMORY:
                    parts_of_memory = (self._servers, scenario, scenario.loads, name, number)
                    self._attempt(scenario, name, lifecycles.memory, *parts_of_memory)
                    continue
                if scenario.kind is Kind.TAILS:
                    parts_of_tails = (self._servers, scenario, scenario.loads[0], name, number, seconds)
                    self._attempt(scenario, name, lifecycles.tails, *parts_of_tails)
                    continue
                action = lifecycles.start if scenario.kind is Kind.START else lifecycles.scaling
                for load in scenario.loads:
                    self._attempt(scenario, name, action, self._servers, scenario, load, name, number)


def about_the_machine(options: argparse.Namespace) -> dict[str, str]:
    """The machine, versions and size of a run, without its date."""
    found = machine.describe()
    versions = machine.versions()
    memory_gib = int(str(found["memory_bytes"])) / (1 << 30)
    return {
        "system": f"{found['system']}, {found['processor'] or 'processor unknown'}",
        "cores, memory": f"{found['cores']}, {memory_gib:.0f} GiB",
        "load average before": f"{float(str(found['load_average_before'])):.2f}",
        "Python of all servers": versions.pop("python"),
        "versions": ", ".join(f"{name} {value}" for name, value in versions.items()),
        "measured": _measure_text(options) + (", all scenarios" if options.long else ""),
    }


def command(options: argparse.Namespace) -> str:
    """The command that repeats the run."""
    words = [f"--only {','.join(options.only)}"] if options.only else []
    words += [f"--systems {','.join(options.systems)}"] if options.systems else []
    words += [f"--rounds {options.rounds} --seconds {options.seconds:g}", "--write docs/benchmarks.md"]
    return f'make bench {"LONG=1 " if options.long else ""}ARGS="{" ".join(words)}"'


def save(options: argparse.Namespace, results: Results, about: Mapping[str, str]) -> None:
    """Saves every figure as JSON, and the page if requested."""
    options.json.parent.mkdir(parents=True, exist_ok=True)
    told = {"machine": about, "command": command(options), **results.as_json()}
    options.json.write_text(json.dumps(told, indent=1) + "\n")
    if options.write:
        options.write.write_text(page.page(results, about, command(options)))


def compare(options: argparse.Namespace) -> Results:
    """The whole run; the results so far are saved after each scenario."""
    about = about_the_machine(options)
    seconds = scenarios.seconds_of(options.scenarios, options.rounds, options.seconds)
    say(f"{len(options.scenarios)} scenarios, {_measure_text(options)}: about {seconds / 60:.0f} minutes")
    for name, value in about.items():
        say(f"{name}: {value}")
    if machine.busy():
        say(machine.busy())
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, processes() as started:
        servers = Servers(Path(folder), started, say)
        servers.plan(options.scenarios)
        comparison = Comparison(options, servers)
        comparison.install()
        begun_s = time.monotonic()
        for number, scenario in enumerate(options.scenarios, 1):
            comparison.run(scenario)
            save(options, comparison.results, about)
            left = scenarios.seconds_of(options.scenarios[number:], options.rounds, options.seconds)
            took_min = (time.monotonic() - begun_s) / 60
            say(f"-- {number} of {len(options.scenarios)} done in {took_min:.1f} minutes, about {left / 60:.0f} to go")
    return comparison.results


def summary(options: argparse.Namespace, results: Results) -> str:
    return "\n\n".join(page.section(one, results) for one in options.scenarios if results.of(one.name))


def render(options: argparse.Namespace) -> None:
    """The page for figures of an earlier run."""
    told = json.loads(options.render.read_text())
    results = Results.of_json(told)
    if options.write:
        options.write.write_text(page.page(results, told["machine"], told["command"]))
    else:
        say(summary(options, results))


def main() -> None:
    options = parse()
    if options.list:
        say(listing(options))
        return
    if options.render:
        render(options)
        return
    try:
        h2load.version()
        results = compare(options)
    except h2load.LoadFailed as error:
        sys.exit(f"\n{error}")
    except KeyboardInterrupt:
        sys.exit(130)
    say(f"\n{summary(options, results)}")
    say(f"\nevery figure: {os.path.relpath(options.json)}" + (f"; the page: {options.write}" if options.write else ""))
    ours = [key for key in results.skipped if key[1].startswith("ours")]
    if ours:
        sys.exit(f"\nthis server failed: {', '.join(' '.join(key).strip() for key in ours)}")


if __name__ == "__main__":
    main()
