"""Compares the server with TorchServe and with its own bare network layer, in interleaved rounds.

Usage: python benchmarks/run.py [--help] [--quick] [--streams] [--rounds N] [--seconds S] [--clients 1,64] ...

benchmarks/README.md explains the figures.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from measuring import machine, rounds
from measuring.processes import failures_as_messages, processes
from measuring.results import FIGURES, as_json, ratio_table, ratios, table
from measuring.servers import NOTES, STARTS, start
from measuring.workloads import NOOP, PIECES_STREAM

USUAL_TARGETS = ("ours", "bare", "torchserve")
QUICK_TARGETS = ("ours", "bare")


def say(text: str) -> None:
    print(text, flush=True)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = sorted(set(names) - set(STARTS))
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(STARTS)}")
    return names


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(word) for word in text.split(","))
    if min(counts) < 1:
        raise argparse.ArgumentTypeError("at least one client")
    return counts


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, with the settings of --quick and --streams filled in."""
    parser = argparse.ArgumentParser(
        description="Compare the server with TorchServe and with its own bare network layer.",
        epilog="servers:\n" + "\n".join(f"  {name:<19} {text}" for name, text in NOTES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--targets", type=_names, help="comma list of servers (default: ours,bare,torchserve)")
    parser.add_argument("--clients", type=_counts, help="comma list (default: 1,16,64; streams: 1,16)")
    parser.add_argument("--rounds", type=int, help="how often everything is measured (default: 5)")
    parser.add_argument("--seconds", type=float, help="of load in each measurement (default: 5)")
    parser.add_argument(
        "--warm-up", type=float, default=35.0, metavar="S", help="most seconds of load before the rounds (default: 35)"
    )
    parser.add_argument("--streams", action="store_true", help="streams of 200 small pieces instead of no-op calls")
    parser.add_argument("--quick", action="store_true", help="a minute's look: without TorchServe, 2 rounds of 3 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything that was measured")
    options = parser.parse_args(words)
    options.workload = PIECES_STREAM if options.streams else NOOP
    options.targets = options.targets or (QUICK_TARGETS if options.quick else USUAL_TARGETS)
    options.clients = options.clients or options.workload.clients
    options.rounds = options.rounds or (2 if options.quick else 5)
    options.seconds = options.seconds or (3.0 if options.quick else 5.0)
    return options


def introduce(options: argparse.Namespace, about: dict[str, object], versions: dict[str, str]) -> None:
    """Prints the servers, the machine and the versions of the measurement."""
    say(f"{options.workload.title}: {options.rounds} rounds of {options.seconds:g} s")
    for name in options.targets:
        say(f"  {name}: {NOTES[name]}")
    say("machine: " + ", ".join(f"{key} {_short(value)}" for key, value in about.items()))
    say("versions: " + ", ".join(f"{key} {value}" for key, value in versions.items()))
    if machine.busy():
        say(machine.busy())


def _short(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def measure(options: argparse.Namespace) -> None:
    about, versions = machine.describe(), machine.versions(options.targets)
    introduce(options, about, versions)
    plan = rounds.Plan(options.workload, options.clients, options.rounds, options.seconds, options.warm_up)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, processes() as started:
        running = []
        for target in options.targets:
            begun_s = time.monotonic()
            running.append(start(target, Path(folder), plan.workload, started))
            say(f"{target} answers, {time.monotonic() - begun_s:.1f} s after its start")
        rounds.warm_up(running, plan, say)
        rows = rounds.run(running, plan, say)
    found = {figure: ratios(rows, options.targets[0], figure) for figure in FIGURES}
    say(f"\n{options.workload.title}; min – median – max of {options.rounds} rounds\n\n{table(rows)}\n")
    say("\n\n".join(ratio_table(one) for one in found.values()))
    if options.json:
        told = {"workload": options.workload.name, "machine": about, "versions": versions, "seconds": options.seconds}
        options.json.write_text(
            json.dumps({**told, **as_json(rows, [one for these in found.values() for one in these])}, indent=2) + "\n"
        )


def main() -> None:
    options = parse()
    with failures_as_messages():
        measure(options)


if __name__ == "__main__":
    main()
