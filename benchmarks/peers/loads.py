"""Measurements of servers that run already: one server, one load, one round."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from measuring import h2load
from measuring.h2load import LoadFailed
from measuring.machine import energy_j
from measuring.processes import cpu_s
from measuring.servers import TEXTS, Running

from peers import open_loop
from peers.questions import Question, body
from peers.rows import Row
from peers.scenarios import CPU, IN_PROCESS, JOULES, P50, P99, P999, RATE, Kind, Load, Scenario
from peers.systems import BATCH, FILES, SYSTEMS

CAPACITY_S_MIN = 0.5
OVERLOAD_SHARE_OF_S = 3


@dataclass(frozen=True, slots=True)
class Target:
    """A running server and its requests."""

    name: str
    running: Running
    question: Question
    port: int

    @classmethod
    def of(cls, name: str, running: Running, load: Load, http: bool) -> Target:
        system = SYSTEMS[name]
        return cls(name, running, system.question(load.call, http), system.port(running, http))

    def load(self, clients: int, seconds: float) -> h2load.Load:
        """Runs a closed loop, without a check. Raises LoadFailed if the load generator fails."""
        url = f"http://127.0.0.1:{self.port}{self.question.path}"
        http1 = self.question.headers if self.question.content_type else None
        return h2load.run(url, self.question.load_body, clients, seconds, http1=http1)

    def loaded(self, clients: int, seconds: float) -> tuple[h2load.Load, float]:
        """Runs a closed loop and checks its answers; returns also the server's CPU seconds during it. Raises
        LoadFailed, NoAnswer, WrongAnswer."""
        answer = self.answer()
        before_s = cpu_s(self.running.process)
        found = self.load(clients, seconds)
        used_s = cpu_s(self.running.process) - before_s
        found.check(self.question.answer_bytes(answer), clients)
        self.answer()
        return found, used_s

    def answer(self) -> list[bytes]:
        """A right answer. After a load it also shows that the requests which the load generator left are finished: a
        Triton that is paused before that dies with SIGSEGV when it continues and answers a stream without a reader.
        Raises NoAnswer, WrongAnswer."""
        return self.question.checked(self.port, self.name)


def measure(scenario: Scenario, load: Load, name: str, running: Running, number: int, seconds: float) -> list[Row]:
    """The rows of one round. Raises LoadFailed, NoAnswer, WrongAnswer."""

    def row(title: str, figures: dict[str, float]) -> Row:
        return Row(scenario.name, title, name, number, figures)

    if scenario.kind is Kind.MIXED:
        return [row(title, figures) for title, figures in mixed(scenario, name, running, seconds).items()]
    target = Target.of(name, running, load, scenario.http)
    if scenario.kind is Kind.OPEN:
        return [row(load.title, at_a_share(target, load, seconds, number))]
    if scenario.kind is Kind.OVERLOAD:
        return [row(load.title, overloaded(target, load, seconds, number))]
    if scenario.kind is Kind.SEQUENCES:
        return [row(load.title, sequences(target, load.clients, seconds))]
    return [row(load.title, closed(target, load.clients, max(seconds, load.seconds_min)))]


def closed(target: Target, clients: int, seconds: float) -> dict[str, float]:
    before_j = energy_j()
    found, used_s = target.loaded(clients, seconds)
    used_j = (energy_j() or 0.0) - (before_j or 0.0)
    energy = {JOULES: used_j / found.requests * 1e3} if used_j > 0 else {}  # the counters begin anew at times
    return {**_rates(found), CPU: used_s / found.requests * 1e6, **energy}


def _rates(found: h2load.Load) -> dict[str, float]:
    p50_s, p99_s = (h2load.percentile(found.latencies_s, share) for share in (0.5, 0.99))
    return {RATE: found.rate, P50: p50_s * 1e3, P99: p99_s * 1e3}


def mixed(scenario: Scenario, name: str, running: Running, seconds: float) -> dict[str, dict[str, float]]:
    """The figures of each load, all at the same time."""
    before_s = cpu_s(running.process)
    targets = [Target.of(name, running, load, scenario.http) for load in scenario.loads]
    with ThreadPoolExecutor(len(targets)) as pool:
        jobs = [
            pool.submit(target.loaded, load.clients, seconds)
            for target, load in zip(targets, scenario.loads, strict=True)
        ]
        found = [job.result()[0] for job in jobs]
    used_s = cpu_s(running.process) - before_s
    cpu_us = used_s / sum(one.requests for one in found) * 1e6
    return {load.title: {**_rates(one), CPU: cpu_us} for load, one in zip(scenario.loads, found, strict=True)}


def at_a_share(target: Target, load: Load, seconds: float, seed: int) -> dict[str, float]:
    """An open loop of so many seconds at a share of the capacity, which is measured first."""
    target.answer()
    most = open_loop.saturate(target.port, target.question, load.clients, max(CAPACITY_S_MIN, seconds / 2)).rate
    before_s = cpu_s(target.running.process)
    found = open_loop.offer(target.port, target.question, most * load.number, seconds, seed)
    used_s = cpu_s(target.running.process) - before_s
    return {**of_an_open_loop(found), CPU: used_s / found.offered * 1e6}


def sequences(target: Target, clients: int, seconds: float) -> dict[str, float]:
    """A closed loop whose clients send one sequence after the other. Raises LoadFailed if a step isn't answered."""
    target.answer()
    before_s = cpu_s(target.running.process)
    found = open_loop.saturate(target.port, target.question, clients, seconds)
    used_s = cpu_s(target.running.process) - before_s
    if len(found.latencies_s) < found.offered:
        raise LoadFailed(f"{found.offered - len(found.latencies_s)} of {found.offered} steps weren't answered with 200")
    return {
        RATE: found.rate,
        P50: found.percentile_ms(0.5),
        P99: found.percentile_ms(0.99),
        CPU: used_s / found.offered * 1e6,
    }


def overloaded(target: Target, load: Load, seconds: float, seed: int) -> dict[str, float]:
    """An open loop beyond the capacity, long enough that queues fill."""
    target.answer()
    most = open_loop.saturate(target.port, target.question, load.clients, max(CAPACITY_S_MIN, seconds / 2)).rate
    found = open_loop.offer(target.port, target.question, most * load.number, OVERLOAD_SHARE_OF_S * seconds, seed)
    return of_an_open_loop(found)


def of_an_open_loop(found: open_loop.Offered) -> dict[str, float]:
    """The figures of right answers, and the number of requests without one. Raises LoadFailed if none was answered."""
    if not found.latencies_s:
        raise LoadFailed(f"none of {found.offered} requests was answered")
    return {
        "offered/s": found.offered / found.seconds,
        RATE: found.rate,
        P50: found.percentile_ms(0.5),
        P99: found.percentile_ms(0.99),
        P999: found.percentile_ms(0.999),
        "refused %": found.part(found.refused),
        "no answer %": found.part(found.unanswered),
    }


def in_process(scenario: Scenario, load: Load, number: int, seconds: float) -> list[Row]:
    """The network without a server, in a process of its own. Raises LoadFailed."""
    name, seconds = load.call.model, max(seconds, load.seconds_min)
    words = [sys.executable, str(FILES / "bare_net.py"), name, str(BATCH), str(seconds)]
    ended = subprocess.run(words, input=body(load.call), capture_output=True, env={**os.environ, **TEXTS})
    if ended.returncode:
        raise LoadFailed(f"{name} fails: {ended.stderr.decode(errors='replace').strip()[-300:]}")
    count, took_s, used_s = (float(word) for word in ended.stdout.split())
    return [Row(scenario.name, load.title, IN_PROCESS, number, {RATE: count / took_s, CPU: used_s / count * 1e6})]


def turned(names: Sequence[str], number: int) -> list[str]:
    """The servers in the order of a round: each comes first in turn."""
    at = number % len(names) if names else 0
    return [*names[at:], *names[:at]]
