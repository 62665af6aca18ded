"""The rate limiter between real queues: who runs a batch, and when."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from support import OneBatchWorker, turns
from ts.protocol.frames import Chunk, Input
from ts_frontend.config.kinds import RESOURCES
from ts_frontend.job import Job, Ledger
from ts_frontend.models.formats.triton import needs, parse
from ts_frontend.scheduling.batcher import Policy
from ts_frontend.scheduling.queues import FULL, IDLE, JobQueue
from ts_frontend.workers.resources import Need, Needs, Place, RateLimiter


def limiter(resources: str = "") -> RateLimiter:
    return RateLimiter(RESOURCES.parse(resources))


def of(priority: int = 1, everywhere: bool = False, **counts: int) -> Needs:
    return Needs(tuple(Need(name, count, everywhere) for name, count in counts.items()), priority)


class Served(OneBatchWorker):
    """A model with one worker, which keeps its batch until `finish`."""

    def __init__(self, limits: RateLimiter, wanted: Needs, device: int | None = None) -> None:
        self.queue, self.ledger = JobQueue(Policy(jobs_max=10_000)), Ledger()
        self.place: Place = limits.place(wanted, device, self.queue.wake)
        self.running: list[Job] = []
        self.ran = 0
        self.queue.attach(self)

    def ask(self, count: int = 1) -> None:
        for _ in range(count):
            self.queue.put(Job(self.ledger, [Input("", "", b"")], request_id="r"))

    def finish(self) -> None:
        batch, self.running = self.running, []
        for one in batch:
            one.deliver(Chunk(one.id, b"", True, 200, "", ()))
        self.place.end()
        self.queue.wake()

    def room(self, ahead_s: float = 0.0) -> float:
        return IDLE if not self.running and self.place.may_run() else FULL

    def dispatch(self, jobs: list[Job], now_s: float) -> None:
        for one in jobs:
            one.send(None, now_s)
        self.running, self.ran = jobs, self.ran + 1
        self.place.begin()


async def running(*models: Served) -> list[bool]:
    await turns(5)
    return [bool(one.running) for one in models]


async def test_devices_have_their_own_and_global_resources_are_shared() -> None:
    limits = limiter("R:1,R:2:1")
    models = [Served(limits, of(R=1), device) for device in (0, 0, 1, 1, 1, None)]
    for one in models:
        one.ask()
    assert await running(*models) == [True, False, True, True, False, False], "the CPU is device 0"
    limits = limiter("R:1:5")
    shared = [Served(limits, of(R=1, everywhere=True), device) for device in (0, 1)]
    for one in shared:
        one.ask()
    assert await running(*shared) == [True, False]


@pytest.mark.parametrize("priorities", [(1, 2), (1, 1), (3, 1), (1, 0)])
async def test_turns_are_by_priority(priorities: tuple[int, int]) -> None:
    limits = limiter()
    models = [Served(limits, of(priority, R=1)) for priority in priorities]
    for one in models:
        one.ask(300)
    for _ in range(240):
        await turns(5)
        (busy,) = [one for one in models if one.running]
        busy.finish()
    a, b = (max(1, priority) for priority in priorities)
    assert models[0].ran == pytest.approx(240 * b / (a + b), abs=2)


async def test_one_that_needs_much_is_not_passed_for_ever() -> None:
    limits = limiter()
    large, small = Served(limits, of(R=4)), [Served(limits, of(R=2)) for _ in range(3)]
    for one in small:
        one.ask(100)
    await turns(5)
    large.ask()
    for turn in range(12):
        await turns(5)
        if large.running:
            break
        busy = [one for one in small if one.running]
        busy[turn % len(busy)].finish()
    assert large.running


async def test_a_worker_that_ends_gives_all_back() -> None:
    limits = limiter("S:1")
    a, b = Served(limits, of(R=8, S=1)), Served(limits, of(R=3, S=1))
    a.ask()
    b.ask()
    assert await running(a, b) == [True, False]
    a.queue.detach(a)
    a.place.leave()
    a.place.leave()
    assert await running(b) == [True]
    b.finish()
    c = Served(limits, of(R=3))
    b.ask()
    c.ask()
    assert await running(b, c) == [True, False], "there are 3 now, not 8"


async def test_nothing_is_taken_twice_or_left() -> None:
    chance = random.Random(5)
    limits = limiter("R:7,S:5")
    models = [Served(limits, of(1 + number % 3, R=1 + number % 4, S=1 + number % 5)) for number in range(9)]
    for _ in range(2000):
        chance.choice(models).ask()
        await turns(5)
        busy = [one for one in models if one.running]
        taken: Counter[str] = Counter()
        for one in busy:
            taken.update({key[0]: count for key, count in one.place.needs.items()})
        assert taken["R"] <= 7 and taken["S"] <= 5
        if busy:
            chance.choice(busy).finish()
    while any(len(one.queue) or one.running for one in models):
        await turns(5)
        next(one for one in models if one.running).finish()
    assert not +limits._taken


def test_what_is_missing_is_named() -> None:
    limits = limiter("R:5,R:8:1,G:2:3")
    assert not limits.missing(of(R=5), [0, 1]) and not limits.missing(of(R=8), [1])
    assert limits.missing(of(R=6), [0, 1]) == "it needs 6 of the resource R, and there are 5 on device 0"
    assert limits.missing(of(G=3, everywhere=True), [0]) == "it needs 3 of the resource G, and there are 2"
    assert not limits.missing(of(other=99), [0])


@pytest.mark.parametrize("text", ["R", "R:", "R:x", ":1", "R:1:2:3", "R:-1"])
def test_resources_have_a_name_and_numbers(text: str) -> None:
    with pytest.raises(ValueError, match="write NAME:COUNT"):
        RESOURCES.parse(text)


GROUP = """
instance_group {
  count: 2 rate_limiter { resources { name: "R" count: 4 } resources { name: "G" global: true count: 2 } %s }
}
"""


def test_the_needs_in_a_configuration() -> None:
    (found,) = needs(parse(GROUP % "" + GROUP % "priority: 1", "config"))
    assert found == Needs((Need("R", 4, False), Need("G", 2, True)), 1)
    assert len(needs(parse(GROUP % "" + GROUP % "priority: 2", "config"))) == 2
    assert len(needs(parse(GROUP % "" + "instance_group { passive: true }", "config"))) == 1
    assert not needs(parse("instance_group { rate_limiter { priority: 2 } }", "config"))
