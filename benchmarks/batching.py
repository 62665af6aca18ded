"""Shows how long requests wait for their batch, by our rule and by TorchServe's, under an open-loop load.

Usage: python benchmarks/batching.py [--rates 10,100,500,2000] [--requests 20000]

Time is virtual: the server's batcher decides, a worker takes a given time, and every run has the same figures.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from measuring.results import aligned

from ts.protocol.frames import Input
from ts_frontend.job import Job, Ledger
from ts_frontend.scheduling.batcher import Batcher, Policy

BATCH_SIZE = 16
DELAY_S = 0.005
#: The time of a batch: as on an accelerator, hardly longer for many requests than for one.
BATCH_S, REQUEST_S = 0.004, 0.0001
SEED = 1


class Served(NamedTuple):
    """The answered requests: their seconds from arrival to answer, and the number in each batch."""

    latencies_s: Sequence[float]
    batches: Sequence[int]

    def row(self, name: str) -> list[str]:
        ordered = sorted(self.latencies_s)
        shares = (ordered[int(len(ordered) * share)] * 1000 for share in (0.5, 0.99))
        return [name, *(f"{value:.1f}" for value in shares), f"{sum(self.batches) / len(self.batches):.1f}"]


#: Gets the arrivals in their order, and the time at which the worker is free. Returns the next batch: the time at which
#: it begins, and its arrivals.
Rule = Callable[[deque[float], float], "tuple[float, list[float]]"]


def served(arrivals: Sequence[float], rule: Rule) -> Served:
    """Serves all requests, one batch after another, on one worker."""
    coming = deque(arrivals)
    free_s = 0.0
    latencies: list[float] = []
    batches: list[int] = []
    while len(latencies) < len(arrivals):
        begun_s, batch = rule(coming, free_s)
        free_s = begun_s + BATCH_S + REQUEST_S * len(batch)
        latencies += [free_s - arrival for arrival in batch]
        batches.append(len(batch))
    return Served(latencies, batches)


def torchserves(coming: deque[float], free_s: float) -> tuple[float, list[float]]:
    """A free worker takes the first request, then waits for the others (WorkerThread, Model.pollBatch)."""
    batch = [coming.popleft()]
    begun_s = max(free_s, batch[0])
    until_s = begun_s + DELAY_S
    while coming and len(batch) < BATCH_SIZE and coming[0] <= until_s:
        batch.append(coming.popleft())
    return (max(begun_s, batch[-1]) if len(batch) == BATCH_SIZE else until_s), batch


class Ours:
    """The server's batcher, which decides at every event."""

    def __init__(self, policy: Policy) -> None:
        self._batcher: Batcher[Job] = Batcher(policy)
        self._ledger = Ledger()

    def __call__(self, coming: deque[float], free_s: float) -> tuple[float, list[float]]:
        batcher, now_s = self._batcher, free_s
        while True:
            while coming and coming[0] <= now_s:
                batcher.add(Job(self._ledger, [Input("", "", b"")], request_id=""), coming.popleft())
            due_s = batcher.due_s(now_s, idle=True)
            if due_s <= 0:
                return now_s, [job.queued_at_s for job in batcher.take()]
            # The sum may be rounded down to the time that it was: then the delay is over.
            now_s = min(max(now_s + due_s, math.nextafter(now_s, math.inf)), coming[0] if coming else math.inf)


def arrivals(rate: float, count: int) -> Iterator[float]:
    """Random times, `rate` of them a second on average."""
    chance, now_s = random.Random(SEED), 0.0
    for _ in range(count):
        now_s += chance.expovariate(rate)
        yield now_s


def table(rates: Sequence[float], count: int) -> str:
    lines = [["requests/s", "rule", "p50 ms", "p99 ms", "in a batch"]]
    policy = Policy(batch_size=BATCH_SIZE, delay_s=DELAY_S, jobs_max=count)
    for rate in rates:
        times = list(arrivals(rate, count))
        for name, rule in (("ours", Ours(policy)), ("TorchServe's", torchserves)):
            lines.append([f"{rate:g}", *served(times, rule).row(name)])
    return aligned(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare two rules of batching under an open-loop load.")
    parser.add_argument("--rates", default="10,100,300,1000,2500", help="requests per second (comma list)")
    parser.add_argument("--requests", type=int, default=20_000, help="for each rate")
    options = parser.parse_args()
    print(table([float(rate) for rate in options.rates.split(",")], options.requests))


if __name__ == "__main__":
    main()
