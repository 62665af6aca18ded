"""Autoscaling: the decisions under simulated loads, and a pool that is scaled by them."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from typing import NamedTuple

import pytest

from stage import Skipping, Stage, pool_of, waiting
from support import until_async
from ts_frontend.models.settings import Source, _autoscale
from ts_frontend.workers.scaling import LoadSample, PoolScaler, Scaling, ScalingRule, percentile

SAMPLE_S = 0.1


class Wait(NamedTuple):
    arrived_s: float
    waited_s: float


class Simulation:
    """Requests that come by chance to as many workers as the decisions want. `service_s`: of each request; `start_s`:
    until a new worker is ready."""

    def __init__(self, rule: ScalingRule, most: int, service_s: float, start_s: float, seed: int) -> None:
        self.scaling, self.most = Scaling(rule), most
        self.service_s, self.start_s = service_s, start_s
        self.chance = random.Random(seed)
        self.now_s = 0.0
        self.workers = self.ready = 1
        self.queue: deque[float] = deque()
        self.ends: list[float] = []  # of what runs
        self.starts: list[float] = []  # when workers will be ready
        self.waits: list[Wait] = []
        self.changes: list[tuple[float, int, int]] = []

    def _pass(self, until_s: float) -> None:
        """Lets requests end and workers become ready until then, and gives the waiting requests to workers."""
        while True:
            next_s = min(self.ends[0] if self.ends else math.inf, self.starts[0] if self.starts else math.inf)
            at_s = min(next_s, until_s)
            while self.queue and len(self.ends) < self.ready:
                arrived_s = self.queue.popleft()
                self.waits.append(Wait(arrived_s, self.now_s - arrived_s))
                heapq.heappush(self.ends, self.now_s + self.service_s)
                next_s = min(next_s, self.ends[0])
                at_s = min(next_s, until_s)
            self.now_s = at_s
            if next_s > until_s:
                return
            if self.ends and self.ends[0] <= at_s:
                heapq.heappop(self.ends)
            elif self.starts:
                heapq.heappop(self.starts)
                self.ready += 1

    def run(self, rate: float, seconds: float) -> None:
        """`rate`: requests a second."""
        end_s, arrival_s = self.now_s + seconds, self.now_s + self.chance.expovariate(rate)
        sample_s = self.now_s + SAMPLE_S
        while self.now_s < end_s:
            self._pass(min(arrival_s, sample_s))
            if arrival_s <= self.now_s:
                self.queue.append(self.now_s)
                arrival_s += self.chance.expovariate(rate)
            if sample_s <= self.now_s:
                self._sample()
                sample_s += SAMPLE_S

    def _sample(self) -> None:
        ages = [self.now_s - arrived_s for arrived_s in self.queue]
        sample = LoadSample(len(self.queue), len(self.ends), percentile(ages, 0.9), self.workers, self.ready)
        found = self.scaling.decide(self.now_s, sample, 1, self.most)
        if found is None:
            return
        wanted, reason = found
        assert reason and 1 <= wanted <= self.most and wanted != self.workers
        self.changes.append((self.now_s, self.workers, wanted))
        for _ in range(wanted - self.workers):
            heapq.heappush(self.starts, self.now_s + self.start_s)
        self.ready = min(self.ready, wanted)
        self.workers = wanted

    def p99_s(self, since_s: float) -> float:
        return percentile([one.waited_s for one in self.waits if one.arrived_s >= since_s], 0.99)

    def directions(self, since_s: float) -> str:
        return "".join("+" if after > before else "-" for at_s, before, after in self.changes if at_s >= since_s)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("service_s", "start_s"), [(0.05, 0.1), (0.05, 2.0), (0.2, 0.5)])
def test_a_step_to_ten_times_the_load_and_back_settles_without_oscillation(
    service_s: float, start_s: float, seed: int
) -> None:
    """One worker is half busy, then five would be fully busy, then one is half busy again."""
    rule = ScalingRule(target_queue=1, up_after_s=0.5, down_after_s=20)
    rate = 0.5 / service_s
    one = Simulation(rule, 16, service_s, start_s, seed)
    one.run(rate, 40)
    begun_s, before = one.now_s, one.workers
    one.run(10 * rate, 90)
    found = one.directions(begun_s)
    assert found.startswith("+") and "-+" not in found, one.changes
    assert 5 <= one.workers <= 16
    assert one.p99_s(begun_s + 10 + 3 * start_s) <= 4 * service_s, "the waits of what came 10 s later are short again"
    over_s = one.now_s
    one.run(rate, 60)
    after = one.directions(over_s)
    assert "+-" not in after and "-+" not in after, one.changes
    assert one.workers <= max(before, 4), "those that have nothing to do are gone"
    first_s = next(at_s for at_s, *_ in one.changes if at_s >= over_s)
    assert first_s - over_s <= rule.down_after_s + 5, "and soon after downAfter"


@pytest.mark.parametrize("seed", range(3))
def test_a_load_that_stays_gets_one_number_of_workers(seed: int) -> None:
    one = Simulation(ScalingRule(up_after_s=0.5, down_after_s=15), 16, 0.05, 0.2, seed)
    one.run(60, 240)
    settled = [change for change in one.changes if change[0] > 60]
    assert len(settled) <= 2, one.changes


def samples(scaling: Scaling, sample: LoadSample, begin_s: float, seconds: float) -> tuple[float, int] | None:
    """The first decision of the same sample again and again: (after so many seconds, workers)."""
    for step in range(int(seconds / SAMPLE_S) + 1):
        found = scaling.decide(begin_s + step * SAMPLE_S, sample, 1, 8)
        if found is not None:
            return round(step * SAMPLE_S, 3), found[0]
    return None


def test_a_queue_must_last_before_workers_are_added_and_quiet_before_they_end() -> None:
    rule = ScalingRule(target_queue=2, up_after_s=1, down_after_s=5)
    assert samples(Scaling(rule), LoadSample(2, 1, 0.1, 1, 1), 0, 60) is None, "two may wait"
    assert samples(Scaling(rule), LoadSample(3, 1, 0.1, 1, 1), 0, 60) == (1.0, 2)
    assert samples(Scaling(rule), LoadSample(90, 4, 0.1, 4, 4), 0, 60) == (1.0, 8), "no more than twice as many at once"
    assert samples(Scaling(rule), LoadSample(90, 8, 0.1, 8, 8), 0, 60) is None, "not over the most"
    assert samples(Scaling(rule), LoadSample(90, 1, 0.1, 4, 3), 0, 60) is None, "one still starts"
    assert samples(Scaling(rule), LoadSample(0, 3, 0.0, 6, 6), 0, 60) == (5.0, 3)
    assert samples(Scaling(rule), LoadSample(0, 0, 0.0, 6, 6), 0, 60) == (5.0, 1)
    assert samples(Scaling(rule), LoadSample(0, 8, 0.0, 6, 6, at_once=4), 0, 60) == (5.0, 2), "batches count"


def test_waits_that_are_too_long_count_like_a_queue() -> None:
    rule = ScalingRule(target_queue=10, target_wait_s=0.5, up_after_s=1)
    assert samples(Scaling(rule), LoadSample(1, 1, 0.4, 1, 1), 0, 10) is None
    assert samples(Scaling(rule), LoadSample(1, 1, 0.6, 1, 1), 0, 10) == (1.0, 2)


def test_one_busy_moment_keeps_the_workers_for_the_whole_time() -> None:
    scaling = Scaling(ScalingRule(down_after_s=5))
    assert samples(scaling, LoadSample(0, 1, 0.0, 4, 4), 0, 4) is None
    assert scaling.decide(4.1, LoadSample(0, 4, 0.0, 4, 4), 1, 8) is None
    found = samples(scaling, LoadSample(0, 1, 0.0, 4, 4), 4.2, 20)
    assert found is not None and found[0] == pytest.approx(5, abs=0.3) and found[1] == 1


def test_numbers_of_workers_outside_the_limits_are_corrected_at_once() -> None:
    scaling = Scaling(ScalingRule())
    found = scaling.decide(0.0, LoadSample(0, 0, 0.0, 9, 9), 1, 8)
    assert found is not None and found[0] == 8


async def test_a_pool_gets_workers_while_requests_wait_and_loses_them_later() -> None:
    stage = Stage()
    pool = pool_of(stage, Skipping())
    scaler = PoolScaler(pool, ScalingRule(up_after_s=1, down_after_s=10), batch_size=1)
    await pool.scale(scaler.between(1, 4))
    jobs = [waiting(pool) for _ in range(8)]
    await stage.actors[0].batch()
    begun_s = jobs[0].queued_at_s
    scaler.tick(begun_s + 1)
    assert scaler.last is None, "not before upAfter"
    scaler.tick(begun_s + 2.5)
    await until_async(lambda: pool.ready_count == 2)
    assert scaler.last is not None and (scaler.last.before, scaler.last.workers) == (1, 2)
    assert "requests wait" in scaler.last.reason
    for job in jobs:
        job.cancel()
    await until_async(lambda: not scaler.sample(begun_s).running)
    for seconds in (20, 31):
        await until_async(lambda: scaler._changing is not None and scaler._changing.done())
        scaler.tick(begun_s + seconds)
    await until_async(lambda: len(pool.slots) == 1)
    assert (scaler.ups, scaler.downs) == (1, 1)
    await scaler.close()
    await pool.close(0)


async def test_requests_that_wait_in_an_engine_count_as_waiting() -> None:
    """Its memory is full before its places are. What it computes then is its capacity until it has nothing to do."""
    stage = Stage()
    stage.handler_kind = "async"
    pool = pool_of(stage, Skipping())
    scaler = PoolScaler(pool, ScalingRule(up_after_s=1, down_after_s=10), batch_size=1)
    await pool.scale(scaler.between(1, 2))
    jobs = [waiting(pool) for _ in range(8)]
    begun_s = jobs[0].queued_at_s
    await until_async(lambda: scaler.sample(begun_s).running == 8)
    (engine,) = stage.actors
    assert (scaler.sample(begun_s).queued, scaler.sample(begun_s).at_once) == (0, 64)
    engine.hold(6)
    assert scaler.sample(begun_s)[:2] == (6, 2)
    scaler.tick(begun_s)
    scaler.tick(begun_s + 1.5)
    await until_async(lambda: pool.ready_count == 2)
    engine.hold(0)
    assert scaler.sample(begun_s).needed == 4, "two on each worker"
    engine.hold(100)
    assert scaler.sample(begun_s)[:2] == (8, 0), "no more than it has"
    engine.hold(0)
    for job in jobs:
        job.cancel()
    await until_async(lambda: not scaler.sample(begun_s).running)
    assert scaler.sample(begun_s).at_once == 64
    await scaler.close()
    await pool.close(0)


async def test_a_number_that_was_asked_for_is_no_subject_of_autoscaling() -> None:
    pool = pool_of(Stage(), Skipping())
    scaler = PoolScaler(pool, ScalingRule(up_after_s=0), batch_size=1)
    assert [scaler.between(*pair) for pair in ((2, 2), (0, 4), (2, 4))] == [2, 0, 2]
    await pool.scale(3)
    assert scaler.between(1, 4) == 3, "a present number that is allowed stays"
    assert scaler.between(3, 3) == 3 and not scaler.active
    await pool.close(0)


@pytest.mark.parametrize(
    ("given", "rule", "warnings"),
    [
        (None, None, 0),
        (False, None, 0),
        (True, ScalingRule(), 0),
        ({}, ScalingRule(), 0),
        ({"targetQueue": 0.5, "targetWait": 200, "upAfter": 2, "downAfter": 30}, ScalingRule(0.5, 0.2, 2, 30), 0),
        ({"targetQueue": -1, "down_after": 3}, ScalingRule(), 2),
        ("yes", None, 1),
    ],
)
def test_the_rule_in_a_configuration(given: object, rule: ScalingRule | None, warnings: int) -> None:
    source = Source({"autoscale": given}, "model-config.yaml", [])
    assert _autoscale(source) == rule
    assert len(source.warnings) == warnings, source.warnings
