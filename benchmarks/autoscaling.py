"""Measures autoscaling with a step of the load: 1, then ten times as much, then 1 again.

Usage: python benchmarks/autoscaling.py [--rate N] [--seconds N] [--down-after N] [--max-workers N]

The handler sleeps for 50 ms, so that a worker answers 20 requests a second and the machine's processors hardly matter.
Requests come at random and don't wait for answers. The output has the changes of the number of workers, p99 of each
second, and the seconds after the step until p99 stays below `--recovered` ms.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from measuring import machine
from measuring.processes import ServerFailed, failures_as_messages, processes
from measuring.servers import Folder, Running, run_ours
from measuring.workloads import build_archive
from peers.open_loop import CONNECTIONS_MAX, Client, Offered, arrivals, due, request_bytes
from peers.questions import Question

READY_S_MAX = 120.0
LOOK_S = 0.2
HANDLER = """
import time


def handle(data, context):
    if data is None:
        return None
    time.sleep(0.05)
    return ["ok"] * len(data)
"""
QUESTION = Question("/predictions/sleeps", b"x", "application/octet-stream", lambda messages: messages == [b"ok"])


@dataclass
class Course:
    """The observations. `seconds`: the answers of each second; `workers`: the times at which their number changed, and
    the new numbers."""

    seconds: list[Offered] = field(default_factory=list)
    workers: list[tuple[float, int]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def p99_ms(self, at: int) -> float:
        return self.seconds[at].percentile_ms(0.99)

    def recovered_s(self, step: int, until: int, limit_ms: float) -> int:
        """Seconds after `step` from which on p99 stays within the limit until `until`."""
        late = [at for at in range(step, until) if self.p99_ms(at) > limit_ms]
        return late[-1] + 1 - step if late else 0


def started(folder: Folder, options: argparse.Namespace) -> Running:
    folder.make()
    handler = folder.folder / "sleeps.py"
    handler.write_text(HANDLER)
    rule = {"downAfter": options.down_after}
    config = {"minWorkers": 1, "maxWorkers": options.max_workers, "autoscale": rule}
    build_archive("sleeps", handler, folder.store, config)
    words = ["--model-store", str(folder.store), "--models", "sleeps=sleeps.mar"]
    settings = {"preload_torch": "false", "number_of_gpu": 0, "job_queue_size": 10_000}
    running = run_ours(folder, words, settings)
    end_s = time.monotonic() + READY_S_MAX
    while not answers(running):
        folder.processes.check()
        if time.monotonic() > end_s:
            raise ServerFailed(f"it isn't ready after {READY_S_MAX:g} s")
        time.sleep(LOOK_S)
    return running


def answers(running: Running) -> bool:
    try:
        return httpx.post(f"http://127.0.0.1:{running.http_port}{QUESTION.path}", content=b"x").status_code == 200
    except httpx.TransportError:
        return False


def watch(running: Running, course: Course, begun_s: float, over: threading.Event) -> None:
    """Notes each change of the number of workers, until it is over."""
    with httpx.Client(base_url=f"http://127.0.0.1:{running.management_http_port}", timeout=30) as client:
        while not over.wait(LOOK_S):
            told = client.get("/models/sleeps").json()[0]
            ready = sum(one["status"] == "READY" for one in told["workers"])
            reason = told["autoscale"].get("lastDecision", {}).get("reason", "")
            if not course.workers or course.workers[-1][1] != ready:
                course.workers.append((time.monotonic() - begun_s, ready))
            if reason and reason not in course.reasons[-1:]:
                course.reasons.append(reason)


async def offered(port: int, rates: Sequence[float], course: Course) -> None:
    """One client for the whole course, with a new result for each second. `rates`: requests/s of each second."""
    client = Client(port, request_bytes(QUESTION), Offered(1.0), CONNECTIONS_MAX, closed_loop=False)
    begun_s = time.monotonic()
    for second, rate in enumerate(rates):
        client.result = Offered(1.0)
        course.seconds.append(client.result)
        for at_s, count in arrivals(rate, 1.0, second):
            planned_s = begun_s + second + at_s
            await asyncio.sleep(max(0.0, planned_s - time.monotonic()))
            for _ in range(count):
                client.ask(due(planned_s, time.monotonic()))
            client.check()
        await asyncio.sleep(max(0.0, begun_s + second + 1 - time.monotonic()))
    await client.end()


def measure(running: Running, options: argparse.Namespace) -> Course:
    quiet, busy = int(options.seconds), int(2 * options.seconds)
    rest = int(options.down_after + options.seconds)
    rates = [options.rate] * quiet + [10 * options.rate] * busy + [options.rate] * (2 * rest)
    course, over = Course(), threading.Event()
    watcher = threading.Thread(target=watch, args=(running, course, time.monotonic(), over))
    watcher.start()
    try:
        asyncio.run(offered(running.http_port, rates, course))
    finally:
        over.set()
        watcher.join()
    report(course, quiet, quiet + busy, options)
    return course


def report(course: Course, up: int, down: int, options: argparse.Namespace) -> None:
    total, refused = sum(one.offered for one in course.seconds), sum(one.refused for one in course.seconds)
    print(f"{options.rate:g} requests/s, {10 * options.rate:g} from second {up} on, {options.rate:g} from {down} on:")
    print(f"  {total} requests, {refused} refused")
    print("  workers: " + ", ".join(f"{count} at {at_s:.1f} s" for at_s, count in course.workers))
    counts = [count for _, count in course.workers]
    steps = [after - before for before, after in zip(counts, counts[1:], strict=False)]
    turns = sum(before * after < 0 for before, after in zip(steps, steps[1:], strict=False))
    print(f"  changes of direction: {turns} (1: up, then down)")
    print(f"  p99 within {options.recovered:g} ms: {course.recovered_s(up, down, options.recovered)} s after the step")
    print(
        "  p99 in ms of each second from the step on: "
        + ", ".join(f"{course.p99_ms(at):.0f}" for at in range(up, down))
    )
    print(f"  p99 before the step: {max(course.p99_ms(at) for at in range(up)):.0f} ms at most")
    for reason in course.reasons:
        print(f"  {reason}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure autoscaling with a step of the load.")
    parser.add_argument("--rate", type=float, default=8.0, help="requests/s before and after the step (default: 8)")
    parser.add_argument("--seconds", type=float, default=10.0, help="before the step; it takes twice as long (10)")
    parser.add_argument("--down-after", type=float, default=15.0, help="downAfter of the model (default: 15)")
    parser.add_argument("--max-workers", type=int, default=12)
    parser.add_argument("--recovered", type=float, default=250.0, help="ms that p99 comes back to (default: 250)")
    options = parser.parse_args()
    print(machine.busy(), flush=True)
    with failures_as_messages(), tempfile.TemporaryDirectory(prefix="bench-") as folder, processes() as all_started:
        measure(started(Folder(Path(folder) / "ours", all_started), options), options)


if __name__ == "__main__":
    main()
