"""What several frontends cost and give: CPU time per request with one and with more, of a request that is handed over,
and what that makes of 16 cores, in a simulation.

Usage: python benchmarks/cores.py [--rounds N] [--seconds S] [--frontends N]

The CPU time is that of the frontends alone, without workers: it counts where the rate depends on what else runs.
"""

from __future__ import annotations

import argparse
import heapq
import random
import tempfile
import urllib.request
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import psutil
from measuring.processes import Processes, failures_as_messages, processes, tree
from measuring.servers import HANDLERS, Folder, build_archive, run_ours
from peers.loads import Target
from peers.questions import Call, by_path
from peers.shared_servers import Servers

CORES, CLIENTS, SIMULATED_S = 16, 64, 0.5
NOOP = Call("noop")


@dataclass
class Case:
    """A server, and what all rounds together took: CPU seconds of its frontends and of the others, requests, those that
    were handed over."""

    name: str
    target: Target
    metrics: str
    frontends_s: float = 0.0
    others_s: float = 0.0
    requests: int = 0
    handed: float = 0.0

    @property
    def cost_us(self) -> float:
        return self.frontends_s / self.requests * 1e6

    @property
    def share(self) -> float:
        return self.handed / self.requests


def start(servers: Servers, frontends: int, workers: int) -> Case:
    name = f"{frontends} frontend{'s' * (frontends > 1)}, {workers} worker{'s' * (workers > 1)}"
    folder = Folder(servers.folder / name.replace(" ", "_"), servers.processes)
    folder.make()
    build_archive(NOOP.model, HANDLERS / "noop.py", folder.store)
    words = ["--model-store", str(folder.store), "--models", "noop=noop.mar"]
    running = run_ours(folder, words, {"frontends": frontends}, workers=workers)
    servers.wait("ours", running, NOOP)
    target = Target(name, running, by_path(NOOP, "/predictions/noop"), running.http_port)
    line = running.process.cmdline()
    return Case(name, target, next(word.partition("=")[2] for word in line if word.startswith("metrics_address=")))


def cpu_s(case: Case) -> tuple[float, float]:
    """CPU seconds of the frontends, and of the other processes."""
    found = [0.0, 0.0]
    command = case.target.running.process.cmdline()
    for one in tree(case.target.running.process):
        try:
            times, is_other = one.cpu_times(), one.cmdline() != command
        except psutil.NoSuchProcess:
            continue
        found[is_other] += times.user + times.system
    return found[0], found[1]


def handed(case: Case) -> float:
    """The requests that its frontends have handed over."""
    if "frontends=1" in case.target.running.process.cmdline():
        return 0.0
    with urllib.request.urlopen(f"{case.metrics}/metrics?name[]=ts_handed_over_requests_total") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#"))


def measure(case: Case, seconds: float, started: Processes) -> None:
    started.check()
    before, handed_before = cpu_s(case), handed(case)
    case.requests += case.target.load(CLIENTS, seconds).requests
    own, others = cpu_s(case)
    case.frontends_s += own - before[0]
    case.others_s += others - before[1]
    case.handed += handed(case) - handed_before


def simulated(frontends: int, ask_us: float, work_us: float, hand_us: float) -> float:
    """Requests a second on CORES cores: each frontend has a worker, a core runs one of their steps at a time, and a
    request goes to another frontend's worker if that is idle and three wait for its own. Clients ask again at once."""
    chance = random.Random(1)
    waiting = [deque[tuple[int, int]]() for _ in range(2 * frontends)]  # a station's (client's frontend, step)
    ready: deque[int] = deque()
    running: list[tuple[float, int, int, int]] = []
    busy: set[int] = set()
    now_us, done = 0.0, 0

    def put(station: int, home: int, step: int) -> None:
        waiting[station].append((home, step))
        if len(waiting[station]) == 1 and station not in busy:
            ready.append(station)

    for _ in range(CLIENTS * frontends):
        home = chance.randrange(frontends)
        put(home, home, 0)
    costs = {0: ask_us * 0.6, 1: work_us, 2: ask_us * 0.4, 3: work_us, 4: ask_us * 0.4 + hand_us}
    while now_us < SIMULATED_S * 1e6:
        while ready and len(running) < CORES:
            station = ready.popleft()
            busy.add(station)
            home, step = waiting[station].popleft()
            heapq.heappush(running, (now_us + costs[step], station, home, step))
        now_us, station, home, step = heapq.heappop(running)
        busy.discard(station)
        if waiting[station]:
            ready.append(station)
        if step == 0:
            own, handing = frontends + home, False
            if len(waiting[own]) > 2:
                idle = [one for one in range(frontends, 2 * frontends) if not waiting[one] and one not in busy]
                own, handing = (idle[0], True) if idle else (own, False)
            put(own, home, 3 if handing else 1)
        elif step in (1, 3):
            put(home, home, step + 1)
        else:
            done += 1
            put(home, home, 0)
    return done / SIMULATED_S


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--frontends", type=int, default=2)
    options = parser.parse_args()
    with failures_as_messages(), tempfile.TemporaryDirectory(prefix="cores-") as folder, processes() as started:
        many = options.frontends
        sizes = ((1, many), (many, many), (many, 1))
        servers = Servers(Path(folder), started, print)
        cases = [start(servers, fronts, workers) for fronts, workers in sizes]
        for case in cases:
            case.target.load(CLIENTS, 2.0)
        for number in range(options.rounds):
            for case in cases[number % 3 :] + cases[: number % 3]:
                measure(case, options.seconds, started)
        for case in cases:
            work = case.others_s / case.requests * 1e6
            print(
                f"{case.name}: {case.cost_us:.1f} µs of CPU a request in the frontends and {work:.1f} µs in others; "
                f"{case.share:.0%} of {case.requests} requests handed over"
            )
        one, own, lent = cases
        cost = max(0.0, (lent.cost_us - own.cost_us) / max(lent.share - own.share, 0.01))
        print(f"requests for the same CPU time, {many} frontends to 1: {one.cost_us / own.cost_us:.2f}")
        print(f"a request that is handed over costs {cost:.0f} µs more")
        work = one.others_s / one.requests * 1e6
        alone = simulated(1, one.cost_us, work, cost)
        print(f"a simulation of {CORES} cores with these costs, not a measurement:")
        for count in (1, 2, 4, 8, 12):
            rate = simulated(count, one.cost_us if count == 1 else own.cost_us, work, cost)
            print(f"  {count:>2} frontends: {rate:,.0f} requests a second, {rate / alone:.1f} times one's")


if __name__ == "__main__":
    main()
