"""Shows where the CPU time of the frontend and of the worker goes under load, function by function.

Usage: python benchmarks/hot_spots.py [--clients 64] [--seconds 10] [--streams] [--folded FOLDER]

Needs py-spy (pip install py-spy), which samples a running process from outside, and the right to trace one's own
processes (root, or kernel.yama.ptrace_scope=0).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

import psutil
from measuring import h2load, servers
from measuring.accounts import tree
from measuring.processes import ServerFailed, processes
from measuring.results import aligned
from measuring.servers import Served
from measuring.workloads import NOOP, PIECES_STREAM, Workload, WrongAnswer

RATE_HZ = 500
SHOWN = 30
MISSING = "py-spy is missing. Install it: pip install py-spy."


def shares(folded: str) -> tuple[Counter[str], Counter[str], int]:
    """From folded stacks (`outer;inner COUNT`): samples by innermost function, by function anywhere, and all."""
    own: Counter[str] = Counter()
    within: Counter[str] = Counter()
    total = 0
    for line in folded.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        own[frames[-1]] += int(count)
        within.update(dict.fromkeys(frames, int(count)))
        total += int(count)
    return own, within, total


def report(title: str, folded: str, cpu_us: float) -> str:
    """The functions with the most own time, as share and as CPU time per request (of `cpu_us` for the process)."""
    own, within, total = shares(folded)
    lines = [["own %", "function", "own µs", "with callees µs"]]
    for name, count in own.most_common(SHOWN):
        figures = (count / total * cpu_us, within[name] / total * cpu_us)
        lines.append([f"{count / total:.1%}", name, *(f"{figure:.1f}" for figure in figures)])
    return f"{title}: {cpu_us:.1f} µs of CPU per request, {total} samples\n{aligned(lines)}"


def parts(root: psutil.Process) -> dict[str, psutil.Process]:
    """The frontend, and the worker: the process without children at the end of the tree."""
    below = [process for process in tree(root) if process != root and not process.children()]
    return {"frontend": root, **({"worker": below[-1]} if below else {})}


def record(process: psutil.Process, seconds: float, file: Path) -> None:
    """Folded stacks of the process while it uses the CPU, native frames not included."""
    words = ["py-spy", "record", "--pid", str(process.pid), "--duration", f"{seconds:.0f}", "--rate", str(RATE_HZ)]
    subprocess.run([*words, "--format", "raw", "--output", str(file), "--function"], check=True, capture_output=True)


def profile(name: str, served: Served, workload: Workload, options: argparse.Namespace) -> str:
    """One process under load; its report. The other process isn't disturbed meanwhile."""
    process = parts(served.process)[name]
    file = options.folded / f"{name}.folded"
    recorder = Thread(target=record, args=(process, options.seconds, file))
    recorder.start()
    url = f"http://127.0.0.1:{served.port}{workload.path}"
    h2load.run(url, workload.request, options.clients, options.seconds + 1)
    recorder.join()
    return report(name, file.read_text(), cost_us(process, url, workload, options))


def cost_us(process: psutil.Process, url: str, workload: Workload, options: argparse.Namespace) -> float:
    """CPU time of that process per request, without the sampler, which slows it down."""
    before = process.cpu_times()
    load = h2load.run(url, workload.request, options.clients, options.seconds / 2)
    after = process.cpu_times()
    return float(after.user + after.system - before.user - before.system) / load.requests * 1e6


def run(options: argparse.Namespace) -> None:
    workload = PIECES_STREAM if options.streams else NOOP
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, processes() as started:
        options.folded = options.folded or Path(folder)
        options.folded.mkdir(parents=True, exist_ok=True)
        served = servers.start("ours", Path(folder), workload, started)
        for name in parts(served.process):
            print(f"{profile(name, served, workload, options)}\n", flush=True)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Show where CPU time goes under load, function by function.")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0, help="of sampling each process")
    parser.add_argument("--streams", action="store_true", help="streams of 200 small pieces instead of no-op calls")
    parser.add_argument("--folded", type=Path, metavar="FOLDER", help="keep the folded stacks (for flame graphs) there")
    return parser.parse_args(words)


def main() -> None:
    options = parse()
    if shutil.which("py-spy") is None:
        sys.exit(MISSING)
    try:
        run(options)
    except (h2load.LoadFailed, ServerFailed, WrongAnswer, subprocess.CalledProcessError) as error:
        sys.exit(f"\n{error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
