"""Measures a start of the server: from the command to the first right answer of a model, with torch and without.

Usage: python benchmarks/first_answer.py [--targets ours,torchserve] [--models with_torch,noop] [--rounds N]

The target `other` is another installation of this server, whose `torchserve` command --other names. Rounds are
interleaved: in each, every server is started, asked over HTTP until it answers, and ended.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from measuring import accounts, machine
from measuring.processes import ServerFailed, failures_as_messages, processes
from measuring.results import Spread, aligned
from measuring.servers import FIRST_ANSWER_S_MAX, READY_S_MAX, Place, Served, start_ours, start_torchserve
from measuring.workloads import HTTP_ANSWER, NOOP, WITH_TORCH, NoAnswer, Workload, WrongAnswer

TARGETS = ("ours", "other", "torchserve")
MODELS = {one.name: one for one in (WITH_TORCH, NOOP)}
#: The models' answers over HTTP.
ANSWERS = {WITH_TORCH.name: [b"64.0"], NOOP.name: HTTP_ANSWER}
ASK_AGAIN_S = 0.01


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds to the first answer, and CPU seconds of the server's process tree until then."""

    wall_s: float
    cpu_s: float


def start(target: str, place: Place, other: Path | None) -> Served:
    if target == "torchserve":
        return start_torchserve(place, http=True)
    return start_ours(place, http=True, command=other if target == "other" else None)


def measure(target: str, workload: Workload, other: Path | None) -> Start:
    """Measures one start, and ends the server. Raises ServerFailed, WrongAnswer."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, processes() as started:
        place = Place(Path(folder), started, workload)
        place.prepare()
        begun_s = time.monotonic()
        served = start(target, place, other)
        while (answer := ask(served, workload)) is None:
            started.check()
            if time.monotonic() - begun_s > READY_S_MAX:
                raise ServerFailed(f"{target} hasn't answered within {READY_S_MAX:g} s")
            time.sleep(ASK_AGAIN_S)
        took = Start(time.monotonic() - begun_s, accounts.cpu_s(served.process))
        if answer != ANSWERS[workload.name]:
            raise WrongAnswer(f"{target} answers {answer} instead of {ANSWERS[workload.name]}")
        return took


def ask(served: Served, workload: Workload) -> list[bytes] | None:
    """The answer; None while the server gives none."""
    try:
        return served.client.ask(served.port, workload, FIRST_ANSWER_S_MAX)
    except NoAnswer:
        return None


def report(starts: dict[tuple[str, str], list[Start]]) -> str:
    lines = [["model", "server", "s to the first answer", "CPU s"]]
    for (model, target), found in starts.items():
        lines.append(
            [
                model,
                target,
                Spread.of([one.wall_s for one in found]).text(),
                Spread.of([one.cpu_s for one in found]).text(),
            ]
        )
        first = next(starts[key] for key in starts if key[0] == model)
        if found is not first:
            pairs = list(zip(found, first, strict=True))
            wall, cpu = ([getattr(a, name) / getattr(b, name) for a, b in pairs] for name in ("wall_s", "cpu_s"))
            lines.append(["", "… / the first", Spread.of(wall).text(), Spread.of(cpu).text()])
    return aligned(lines)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure how long a server takes from its start to its first answer.")
    parser.add_argument("--targets", default="ours", help=f"comma list of {', '.join(TARGETS)} (default: ours)")
    parser.add_argument("--models", default=",".join(MODELS), help=f"comma list of {', '.join(MODELS)} (default: all)")
    parser.add_argument("--other", type=Path, metavar="FILE", help="the torchserve command of `other`")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(words)
    options.targets, options.models = options.targets.split(","), options.models.split(",")
    if not set(options.targets) <= set(TARGETS) or not set(options.models) <= set(MODELS):
        parser.error(f"targets are {', '.join(TARGETS)}; models are {', '.join(MODELS)}")
    if "other" in options.targets and options.other is None:
        parser.error("--other names the torchserve command of `other`")
    return options


def run(options: argparse.Namespace) -> None:
    print(f"From the command to the first answer. {machine.busy()}", flush=True)
    starts: dict[tuple[str, str], list[Start]] = {}
    for number in range(options.rounds + 1):
        for model in options.models:
            for target in options.targets:
                took = measure(target, MODELS[model], options.other)
                if number:  # the first starts fill the disk's cache and write bytecode
                    starts.setdefault((model, target), []).append(took)
                    print(f"round {number}  {model} {target}  {took.wall_s:.2f} s, CPU {took.cpu_s:.2f} s", flush=True)
    print(f"\n{report(starts)}")


def main() -> None:
    options = parse()
    with failures_as_messages():
        run(options)


if __name__ == "__main__":
    main()
