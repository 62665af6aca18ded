"""Shows where the CPU time of the frontend and of the worker goes under load, function by function.

Usage: python benchmarks/hot_spots.py [--clients 64] [--seconds 10] [--streams] [--target ours-http] [--folded FOLDER]

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import psutil
from measuring import h2load, rounds
from measuring.accounts import tree
from measuring.open_inference import INFER
from measuring.processes import ServerFailed, processes
from measuring.results import aligned
from measuring.servers import Served
from measuring.targets import INFER_STARTS, STARTS, start
from measuring.workloads import NOOP, PIECES_STREAM, Workload, WrongAnswer

RATE_HZ = 500
SHOWN = 30
MISSING = "py-spy is missing. Install it: pip install py-spy."


def shares(folded: str) -> tuple[Counter[str], Counter[str], int]:
    """The samples of folded stacks (`outer;inner COUNT`): by innermost function, by any function, and in all."""
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


def report(folded: str, cpu_us: float) -> str:
    """The functions with the most own time, as shares and as CPU time per request (of `cpu_us` for the thread)."""
    own, within, total = shares(folded)
    lines = [["own %", "function", "own µs", "with callees µs"]]
    for name, count in own.most_common(SHOWN):
        figures = (count / total * cpu_us, within[name] / total * cpu_us)
        lines.append([f"{count / total:.1%}", name, *(f"{figure:.1f}" for figure in figures)])
    return aligned(lines)


class Thread(NamedTuple):
    """CPU time of one thread per request, in microseconds: in the program, and in the kernel on its behalf."""

    name: str
    user_us: float
    kernel_us: float


def thread_report(title: str, threads: Sequence[Thread]) -> str:
    total_us = sum(thread.user_us + thread.kernel_us for thread in threads)
    lines = [["user µs", "thread", "kernel µs"]]
    lines += [[f"{thread.user_us:.1f}", thread.name, f"{thread.kernel_us:.1f}"] for thread in threads]
    return f"{title}: {total_us:.1f} µs of CPU per request\n{aligned(lines)}"


def parts(root: psutil.Process) -> dict[str, psutil.Process]:
    """The processes of the frontend and of the worker; the latter is the process without children in the tree."""
    below = [process for process in tree(root) if process != root and not process.children()]
    return {"frontend": root, **({"worker": below[-1]} if below else {})}


def record(process: psutil.Process, seconds: float, file: Path) -> None:
    """Folded stacks of the thread that runs Python code at each moment; waiting and time in the kernel don't count."""
    words = ["py-spy", "record", "--pid", str(process.pid), "--duration", f"{seconds:.0f}", "--rate", str(RATE_HZ)]
    words += ["--gil", "--function", "--format", "raw", "--output", str(file)]
    subprocess.run(words, check=True, capture_output=True)


def profile(name: str, served: Served, workload: Workload, options: argparse.Namespace) -> str:
    """The report of one process under load. The other process isn't sampled meanwhile."""
    process = parts(served.process)[name]
    file = options.folded / f"{name}.folded"
    with ThreadPoolExecutor(1) as pool:
        recorded = pool.submit(record, process, options.seconds, file)
        rounds.load(served, workload, options.clients, options.seconds + 1)
        recorded.result()
    threads = cost(process, served, workload, options)
    folded = file.read_text()
    return (
        f"{thread_report(name, threads)}\n\n{report(folded, threads[0].user_us)}" if folded else f"{name}: no samples"
    )


def cost(process: psutil.Process, served: Served, workload: Workload, options: argparse.Namespace) -> list[Thread]:
    """CPU time per request of each thread, the main thread first, without the sampler, which slows everything down."""
    before = {thread.id: thread for thread in process.threads()}
    done = rounds.load(served, workload, options.clients, options.seconds / 2)
    threads = []
    for thread in sorted(process.threads(), key=lambda thread: thread.id != process.pid):
        start = before.get(thread.id)
        user_s = thread.user_time - (start.user_time if start else 0)
        kernel_s = thread.system_time - (start.system_time if start else 0)
        if user_s or kernel_s or thread.id == process.pid:
            name = "main" if thread.id == process.pid else thread_name(process.pid, thread.id)
            threads.append(Thread(name, user_s / done.requests * 1e6, kernel_s / done.requests * 1e6))
    return threads


def thread_name(pid: int, thread_id: int) -> str:
    try:
        return Path(f"/proc/{pid}/task/{thread_id}/comm").read_text().strip()
    except OSError:
        return str(thread_id)


def run(options: argparse.Namespace) -> None:
    workload = INFER if options.target in INFER_STARTS else PIECES_STREAM if options.streams else NOOP
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, processes() as started:
        options.folded = options.folded or Path(folder)
        options.folded.mkdir(parents=True, exist_ok=True)
        served = start(options.target, Path(folder), workload, started)
        for name in parts(served.process):
            print(f"{profile(name, served, workload, options)}\n", flush=True)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Show where CPU time goes under load, function by function.")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument(
        "--target", default="ours", choices=[name for name in (*STARTS, *INFER_STARTS) if name.startswith("ours")]
    )
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
