"""Measures the start of more workers: a model that imports torch, from 1 to 4 workers, forked, exec'd, by TorchServe.

Usage: python benchmarks/starts.py [--targets fork,exec,torchserve] [--rounds N] [--json FILE]

Rounds are interleaved: each server is scaled up (timed, until all four are ready) and down again in turn.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc
from measuring import machine, servers
from measuring.processes import Processes, ServerFailed, failures_as_messages, processes
from measuring.results import Spread, aligned
from measuring.servers import Place, Served, start_ours, start_torchserve
from measuring.workloads import WITH_TORCH

from ts_frontend.protos.management_pb2 import ScaleWorkerRequest
from ts_frontend.protos.management_pb2_grpc import ManagementAPIsServiceStub

FEW, MANY = 1, 4
SCALE_S_MAX = 300
TARGETS = ("fork", "exec", "torchserve")


def start(target: str, folder: Path, started: Processes) -> Served:
    """The server with one worker, once it has answered."""
    place = Place(folder / target, started, WITH_TORCH)
    place.prepare()
    served = start_torchserve(place) if target == "torchserve" else start_ours(place, more=_start_by(target))
    servers.wait_until_ready(served, WITH_TORCH, started)
    return served


def _start_by(way: str) -> list[str]:
    return ["--set", f"worker_start={way}"]


def scale(served: Served, count: int) -> float:
    """Seconds until the model has `count` workers, all ready. Raises ServerFailed."""
    request = ScaleWorkerRequest(
        model_name=WITH_TORCH.name, min_worker=count, max_worker=count, synchronous=True, timeout=30
    )
    with grpc.insecure_channel(f"127.0.0.1:{served.management_port}") as channel:
        begun_s = time.monotonic()
        try:
            ManagementAPIsServiceStub(channel).ScaleWorker(request, timeout=SCALE_S_MAX, wait_for_ready=True)
        except grpc.RpcError as error:
            raise ServerFailed(f"{served.name}: scaling to {count} workers failed: {error}") from error
        return time.monotonic() - begun_s


def measure(running: Mapping[str, Served], rounds: int) -> dict[str, list[float]]:
    """Seconds from FEW to MANY workers by target, one for each round."""
    seconds: dict[str, list[float]] = {target: [] for target in running}
    for number in range(rounds):
        for target, served in running.items():
            seconds[target].append(scale(served, MANY))
            print(f"round {number + 1}/{rounds}  {target:<10} {seconds[target][-1]:.3g} s", flush=True)
            scale(served, FEW)
    return seconds


def report(seconds: Mapping[str, Sequence[float]]) -> str:
    """Both tables: the seconds, and the ratio of each target to the first."""
    first, *others = seconds
    lines = [["workers", "started by", "s: min – median – max"]]
    lines += [[f"{FEW} to {MANY}", target, Spread.of(values).text()] for target, values in seconds.items()]
    for target in others:
        quotients = [slow / quick for slow, quick in zip(seconds[target], seconds[first], strict=True)]
        lines.append(["", f"{target} / {first}", Spread.of(quotients).text()])
    return aligned(lines)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measure how long it takes to scale a torch model from 1 to 4 workers."
    )
    parser.add_argument(
        "--targets", default="fork,exec", help="comma list of fork, exec, torchserve (default: fork,exec)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure")
    options = parser.parse_args(words)
    options.targets = tuple(options.targets.split(","))
    if not set(options.targets) <= set(TARGETS):
        parser.error(f"targets are {', '.join(TARGETS)}")
    return options


def run(options: argparse.Namespace) -> None:
    print(f"A model that imports torch, from {FEW} to {MANY} workers. {machine.busy()}", flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, processes() as started:
        running = {target: start(target, Path(folder), started) for target in options.targets}
        seconds = measure(running, options.rounds)
    print(f"\n{report(seconds)}")
    if options.json:
        told = {"machine": machine.describe(), "versions": machine.versions(options.targets), "seconds": seconds}
        options.json.write_text(json.dumps(told, indent=2) + "\n")


def main() -> None:
    options = parse()
    with failures_as_messages():
        run(options)


if __name__ == "__main__":
    main()
