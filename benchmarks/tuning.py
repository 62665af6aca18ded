"""Compares `torchserve tune` with an exhaustive grid, on examples: the quality of its configuration, and its cost.

Usage: python benchmarks/tuning.py [--example digits] [--batch-max 8] [--workers-max 2] [--in-flight-max 32]
       [--seconds 0.4] [--rounds 9] [--write FILE]

For each example a server is started, `torchserve tune` runs, and then every configuration that it could have tried is
measured with its own means. The greatest of many measurements exceeds the true value, and is often not the best
configuration's: so the best few of the grid are measured again in turns, for longer, and the best of these is compared
with the result of `tune` in further rounds, of which each measures both. Each worker computes with one thread and needs
a CPU for itself, as do the server and this process: with two CPUs more than workers for each, `taskset` lets several
examples be compared at once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from ts_frontend.cli.client import Client, Target
from ts_frontend.cli.tune import Copy, space
from ts_frontend.cli.tune_requests import read, sender
from ts_frontend.tuning.load import Length
from ts_frontend.tuning.search import Measurement, Trial

ROOT = Path(__file__).resolve().parent.parent
SERVE = "import sys; from ts_frontend.cli.main import main; sys.exit(main())"
DIGITS = sorted((ROOT / "examples" / "digits" / "samples").glob("*.png"))
#: The examples: each one's archive in model_store, or "" for one that is made; and its requests.
EXAMPLES: Mapping[str, tuple[str, str]] = {
    "digits": ("digits.mar", ""),
    "text_stream": ("text_stream.mar", '{"prompt": "Tyger", "max_tokens": 20}'),
    "densenet161": ("", ""),
}
SECONDS_AGAIN = 1.0
#: The best of the grid that are measured again, and in how many rounds.
FINALISTS, FINAL_ROUNDS = 5, 3


def archive_of(example: str, folder: Path) -> Path:
    name = EXAMPLES[example][0]
    if name:
        return ROOT / "model_store" / name
    build = ROOT / "examples" / example / "build.py"
    subprocess.run([sys.executable, build, "--stand-in", "--export-path", folder], check=True, stdout=sys.stderr)
    return folder / f"{example}.mar"


def inputs_of(example: str, folder: Path) -> list[Path]:
    text = EXAMPLES[example][1]
    if not text:
        return DIGITS
    (folder / "request.json").write_text(text)
    return [folder / "request.json"]


@contextmanager
def serving(archive: Path, folder: Path) -> Iterator[Target]:
    settings = {
        **{f"{api}_address": "http://127.0.0.1:0" for api in ("inference", "management", "metrics")},
        "grpc_inference_port": 0,
        "grpc_management_port": 0,
        "number_of_gpu": 0,
        "default_workers_per_model": 1,
        "temp_dir": folder,
        "log_location": folder / "logs",
    }
    (folder / "config.properties").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    words = ["--start", "--foreground", "--ncs", "--ts-config", str(folder / "config.properties")]
    words += ["--model-store", str(archive.parent), "--models", archive.name]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    with open(folder / "printed", "w") as printed:
        process = subprocess.Popen([sys.executable, "-c", SERVE, *words], stdout=printed, cwd=folder, env=env)
    try:
        yield Target("127.0.0.1", *ports_of(folder / "printed", process))
    finally:
        process.terminate()
        process.wait()


def ports_of(printed: Path, process: subprocess.Popen[bytes]) -> tuple[int, int]:
    """The gRPC ports for inference and management, read from the server's start message."""
    while process.poll() is None:
        lines = printed.read_text().splitlines()
        found = {
            name: int(line.rpartition(":")[2].split()[0])
            for line in lines
            for name in ("grpc_inference", "grpc_management")
            if f" {name} listens on " in line
        }
        if len(found) == 2 and any("Model server started." in line for line in lines):
            return found["grpc_inference"], found["grpc_management"]
        time.sleep(0.1)
    raise SystemExit(f"the server did not start:\n{printed.read_text()}")


def tuned(example: str, target: Target, inputs: list[Path], options: argparse.Namespace) -> tuple[Trial, int, float]:
    """The command's result, and the number of its measurements and seconds."""
    words = ["tune", example, "--json", "--seconds", str(options.seconds)]
    words += ["--inference-port", str(target.inference_port), "--management-port", str(target.management_port)]
    for name in ("batch_max", "workers_max", "in_flight_max"):
        words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    words += [word for file in inputs for word in ("--input", str(file))]
    begun_s = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", SERVE, *words], stdout=subprocess.PIPE, check=True)
    answer = json.loads(ended.stdout)
    best = answer["best"]
    trial = Trial(best["batchSize"], best["maxBatchDelay"], best["minWorkers"], best["inFlight"])
    return trial, len(answer["trials"]), time.monotonic() - begun_s


def compare(example: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    inputs = inputs_of(example, folder)
    with serving(archive_of(example, folder), folder) as target, Client(target) as client:
        while not any(one["status"] == "READY" for one in client.describe(example)[0]["workers"]):
            time.sleep(0.1)
        found, measurements, tune_s = tuned(example, target, inputs, options)
        requests = partial(sender, "grpc", target, 0, requests=read(inputs, "grpc"))
        url = client.describe(example)[0]["modelUrl"]
        length = Length(options.seconds, min(100, round(30 * options.seconds)))
        copy = Copy(client, f"{example}-grid", url, requests, length)
        again = Copy(client, f"{example}-again", url, requests, Length(SECONDS_AGAIN, 1))
        begun_s = time.monotonic()
        try:
            grid = grid_of(copy, options)
            grid_s = time.monotonic() - begun_s
            copy.remove()
            finalists = sorted(grid, key=lambda trial: grid[trial].answers_per_s)[-FINALISTS:]
            final = rates(again, finalists, FINAL_ROUNDS)
            best = max(finalists, key=lambda trial: statistics.median(final[trial]))
            both = rates(again, [found, best], options.rounds)
            shares = [one / other for one, other in zip(both[found], both[best], strict=True)]
        finally:
            copy.remove()
            again.remove()
    return {
        "example": example,
        "tune": asdict(found) | {"measurements": measurements, "seconds": round(tune_s, 1)},
        "tune_in_grid": round(grid[found].answers_per_s, 1),
        "grid": asdict(best) | {"measurements": len(grid), "seconds": round(grid_s, 1)},
        "grid_best": round(grid[best].answers_per_s, 1),
        "share_of_best": round(statistics.median(shares), 3),
        "shares": [round(share, 3) for share in shares],
        "share_of_time": round(tune_s / grid_s, 3),
    }


def rates(copy: Copy, trials: Sequence[Trial], rounds: int) -> dict[Trial, list[float]]:
    """The answers a second of each trial in each round; the rounds alternate between both directions."""
    found: dict[Trial, list[float]] = {trial: [] for trial in trials}
    for number in range(rounds):
        for trial in reversed(found) if number % 2 else found:
            found[trial].append(copy.try_out(trial).answers_per_s)
    return found


def grid_of(copy: Copy, options: argparse.Namespace) -> dict[Trial, Measurement]:
    found = {}
    trials = list(space(options.batch_max, options.workers_max, options.in_flight_max).trials())
    for number, trial in enumerate(trials, 1):
        found[trial] = copy.try_out(trial)
        if number % 50 == 0:
            print(f"{copy.name}: {number} of {len(trials)}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="`torchserve tune` beside an exhaustive grid.")
    parser.add_argument("--example", action="append", choices=EXAMPLES)
    parser.add_argument("--batch-max", type=int, default=8)
    parser.add_argument("--workers-max", type=int, default=2)
    parser.add_argument("--in-flight-max", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=0.4, help="of one measurement of both")
    parser.add_argument("--rounds", type=int, default=9, help="in which the two best are measured again")
    parser.add_argument("--write", type=Path, help="a file for the figures, as JSON")
    options = parser.parse_args()
    rows = []
    for example in options.example or EXAMPLES:
        with tempfile.TemporaryDirectory(prefix="tuning-") as folder:
            rows.append(compare(example, Path(folder), options))
        print(json.dumps(rows[-1]), flush=True)
    if options.write:
        options.write.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
