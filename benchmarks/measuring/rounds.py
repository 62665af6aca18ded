"""Interleaved rounds: every server under every load once a round, in changing order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from measuring import h2load
from measuring.processes import cpu_s
from measuring.results import Row, significant
from measuring.servers import Served
from measuring.workloads import Workload, check

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """The duration and number of measurements."""

    workload: Workload
    clients: Sequence[int]
    rounds: int
    seconds: float
    warm_up_s_max: float


def warm_up(servers: Sequence[Served], plan: Plan, say: Say) -> None:
    """Runs load that isn't measured, for the time that each server needs to reach its best speed."""
    for served in servers:
        seconds = min(served.warm_up_s, plan.warm_up_s_max)
        if seconds > 0:
            say(f"Warming up {served.name} for {seconds:g} s ...")
            load(served, plan.workload, max(plan.clients), seconds)


def run(servers: Sequence[Served], plan: Plan, say: Say) -> list[Row]:
    """The measured rounds. Raises LoadFailed, WrongAnswer."""
    rows = []
    for number in range(plan.rounds):
        turned = [*servers[number % len(servers) :], *servers[: number % len(servers)]]
        for clients in plan.clients:
            for served in turned:
                row = measure(served, plan, number, clients)
                rows.append(row)
                say(
                    f"round {number + 1}/{plan.rounds}  {clients:>3} clients  {served.name:<12} "
                    f"{significant(row.requests_per_s):>7} requests/s"
                )
    return sorted(rows, key=lambda row: (row.round, row.clients, _position(servers, row.target)))


def _position(servers: Sequence[Served], name: str) -> int:
    return [served.name for served in servers].index(name)


def load(served: Served, workload: Workload, clients: int, seconds: float) -> h2load.Load:
    """Runs a load; the answers aren't checked yet."""
    client = served.client
    http1 = {"content-type": workload.http_type} if client.http1 else None
    return h2load.run(client.url(served.port, workload), client.body(workload), clients, seconds, http1=http1)


def measure(served: Served, plan: Plan, number: int, clients: int) -> Row:
    """Measures one load on one server. The answers are checked before and after, and by their bytes during the load."""
    workload = plan.workload
    check(served.name, served.client, served.port, workload, served.answer)
    before_s = cpu_s(served.process)
    found = load(served, workload, clients, plan.seconds)
    used_s = cpu_s(served.process) - before_s
    try:
        found.check(served.client.answer_bytes(served.answer), clients)
    except h2load.LoadFailed as error:
        raise h2load.LoadFailed(f"{served.name}, {clients} clients: {error}") from None
    check(served.name, served.client, served.port, workload, served.answer)
    return Row(
        round=number,
        clients=clients,
        target=served.name,
        requests=found.requests,
        requests_per_s=found.rate,
        p50_ms=h2load.percentile(found.latencies_s, 0.5) * 1000,
        p99_ms=h2load.percentile(found.latencies_s, 0.99) * 1000,
        cpu_us_per_request=used_s / found.requests * 1e6,
        cores_used=used_s / found.duration_s,
        generator_cores_used=found.generator_cpu_s / found.duration_s,
    )
