"""Models on demand with a launcher and a clock of the test's: their first requests, memory, and ends."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator, Sequence

import pytest

from stage import Actor, Skipping, Stage, pool_of
from support import until_async
from ts.protocol.frames import Input, Predict
from ts_frontend.errors import ModelNotLoaded, NoWorker
from ts_frontend.job import Job, Ledger
from ts_frontend.workers.memory import (
    Demand,
    DemandRule,
    Memory,
    Resident,
    ResidentState,
    UnloadCause,
    proportional_bytes,
)
from ts_frontend.workers.pool import Pool

SIZE = 100


@pytest.fixture(params=["host", "gpus"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of memory that the models share."""
    monkeypatch.setattr(House, "on_gpus", request.param == "gpus")
    return str(request.param)


@pytest.fixture(autouse=True)
def yielding_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy model gives way at once."""
    monkeypatch.setattr("ts_frontend.workers.memory.STAY_S", 0.01)


def measured(pools: Sequence[Pool]) -> list[Memory]:
    """A model on GPUs has all that it has there."""

    def of(pool: Pool) -> Memory:
        size = sum(slot.memory_bytes for slot in pool.slots)
        return Memory(1, size) if pool.on_gpus else Memory(size)

    return [of(pool) for pool in pools]


class House:
    """Models on demand, each with a stage of its own, that share a limit of memory, of the host or of GPUs."""

    on_gpus = False

    def __init__(self, count: int, limit: int = 0, rule: DemandRule | None = None, size: int = SIZE) -> None:
        self.clock = Skipping()
        self.demand = Demand(Memory(gpus=limit) if self.on_gpus else Memory(limit), measured, self.clock)
        self.stages = [Stage() for _ in range(count)]
        self.models: list[Resident] = []
        self.asked: dict[Resident, Stage] = {}
        self.most_bytes = 0
        for stage in self.stages:
            stage.memory = size
            pool = pool_of(stage, Skipping())
            pool.on_gpus = self.on_gpus
            self.models.append(self.demand.enter(pool, Ledger(), rule or DemandRule(), lambda: 1))

    def ask(self, index: int) -> Job:
        """A request, as a model accepts it."""
        one = self.models[index]
        self.asked[one] = self.stages[index]
        one.asked()
        if one.pool.load_failure is not None:
            raise one.pool.not_loaded()
        job = Job(one.ledger, [Input("data", "", b"x")], request_id="r")
        one.pool.queue.put(job)
        return job

    def actors(self) -> Iterator[Actor]:
        """Those that live."""
        for one, stage in list(self.asked.items()):
            living = [actor for actor in stage.actors[-2:] if not actor.exited.done()]
            if one.state is ResidentState.KNOWN and not living:
                del self.asked[one]
            yield from living

    def play(self) -> None:
        """Answers the batches of all workers, and notes the memory of the living ones."""
        self.most_bytes = max(self.most_bytes, sum(actor.memory for actor in self.actors()))
        for actor in self.actors():
            while (batch := actor.heard(Predict)) is not None:
                actor.answer(batch)

    async def answered(self, *jobs: Job) -> None:
        def all_done() -> bool:
            self.play()
            return all(job.done for job in jobs)

        await until_async(all_done)
        for job in jobs:
            assert bytes(await job.result()) == b"ok"

    async def warm(self, index: int) -> None:
        await until_async(lambda: self.models[index].state is ResidentState.WARM)

    async def close(self) -> None:
        for one in self.models:
            await self.demand.leave(one, one.pool.close(0))


async def test_a_model_that_nobody_asks_for_ends_after_its_time_and_a_pinned_one_stays() -> None:
    for pinned in (False, True):
        house = House(1, rule=DemandRule(keep_alive_s=60, pinned=pinned))
        one = house.models[0]
        await house.answered(house.ask(0))
        await house.warm(0)
        await house.demand.look()
        assert one.status == "warm"
        house.clock._skipped_s += 61
        await house.demand.look()
        if pinned:
            assert one.status == "warm"
        else:
            assert one.task is not None
            await asyncio.wait({one.task})
            assert one.status == "known"
            assert "no request came for 60 s" in one.unloaded_because
            assert not list(house.actors())
            await house.answered(house.ask(0))
            assert one.loads == 2 or one.state is ResidentState.LOADING
        await house.close()


async def test_a_model_that_works_is_not_idle() -> None:
    house = House(1, rule=DemandRule(keep_alive_s=60))
    one = house.models[0]
    job = house.ask(0)
    await until_async(lambda: one.state is ResidentState.WARM)
    house.clock._skipped_s += 100
    await house.demand.look()
    assert one.status == "warm"
    await house.answered(job)
    await house.close()


async def test_the_one_that_was_not_used_for_the_longest_time_gives_its_memory() -> None:
    house = House(4, 2 * SIZE)
    for index in (0, 1, 0, 2):
        await house.answered(house.ask(index))
        await house.warm(index)
        house.clock._skipped_s += 1
    assert [one.status for one in house.models] == ["warm", "known", "warm", "known"]
    assert "needed its memory" in house.models[1].unloaded_because
    assert house.most_bytes <= 2 * SIZE
    await house.close()


async def test_a_busy_model_finishes_its_requests_before_it_gives_way() -> None:
    """Also those that wait in its queue are answered, after it is loaded again."""
    house = House(2, SIZE)
    first = [house.ask(0) for _ in range(6)]
    await until_async(lambda: house.models[0].state is ResidentState.WARM)
    other = house.ask(1)
    late = house.ask(0)
    await house.answered(*first, other, late)
    assert house.most_bytes <= SIZE
    await house.close()


async def test_100_known_models_of_which_20_fit() -> None:
    house = House(100, 20 * SIZE)
    chance = random.Random(7)
    jobs: list[Job] = []
    for _ in range(30):
        jobs = [house.ask(chance.randrange(100)) for _ in range(10)]
        await house.answered(*jobs)
    assert house.most_bytes <= 20 * SIZE, "the bound was passed"
    assert sum(one.loads for one in house.models) > 100, "most of these were cold"
    assert house.most_bytes >= 19 * SIZE, "and used"
    await house.close()


async def test_a_load_that_fails_is_told_at_once_and_tried_again() -> None:
    house = House(1)
    house.stages[0].scenes = ["fails", "fails", "ready"]
    one = house.models[0]
    job = house.ask(0)
    with pytest.raises(ModelNotLoaded, match="SyntaxError"):
        await job.result()
    await until_async(lambda: one.pool.ready_count == 1)
    await until_async(lambda: one.status == "warm")
    await house.answered(house.ask(0))
    assert house.stages[0].launched == 3
    await house.close()


async def test_a_load_that_ends_with_a_fault_of_the_server_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(1)
    (one,) = house.models
    scale, faults = one.pool.scale, [RuntimeError("no room")]

    async def failing(count: int, drain_s: float | None = None) -> None:
        if faults:
            raise faults.pop()
        await scale(count)

    monkeypatch.setattr(one.pool, "scale", failing)
    job = house.ask(0)
    await until_async(lambda: job.done)
    with pytest.raises(NoWorker, match="no room"):
        await job.result()
    assert one.state is ResidentState.KNOWN
    await house.answered(house.ask(0))
    await house.close()


@pytest.mark.parametrize("left", [False, True], ids=["without workers", "with its workers"])
async def test_an_unload_that_ends_with_a_fault_of_the_server_keeps_nobody_waiting(
    left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(1)
    (one,) = house.models
    await house.answered(house.ask(0))
    await house.warm(0)
    scale, faults = one.pool.scale, [RuntimeError("no room")]

    async def failing(count: int, drain_s: float | None = None) -> None:
        if not faults or not left:
            await scale(count)
        if faults:
            raise faults.pop()

    monkeypatch.setattr(one.pool, "scale", failing)
    await house.demand.unload(one, UnloadCause.IDLE, "its time is over")
    assert one.state is (ResidentState.WARM if left else ResidentState.KNOWN) and not faults
    await house.answered(house.ask(0))
    await house.demand.unload(one, UnloadCause.IDLE, "its time is over")
    await house.answered(house.ask(0))
    await house.close()


async def test_a_model_whose_workers_were_given_up_is_loaded_anew() -> None:
    house = House(1)
    one, stage = house.models[0], house.stages[0]
    stage.scenes = ["fails"] * 40
    with pytest.raises(ModelNotLoaded):
        await house.ask(0).result()
    await until_async(lambda: one.pool.unavailable and one.state is ResidentState.WARM)
    with pytest.raises(NoWorker, match="could be kept running"):
        house.ask(0)
    await house.demand.look()
    await until_async(lambda: one.status == "known")
    stage.scenes = []
    await house.answered(house.ask(0))
    await house.close()


async def test_a_model_that_grows_over_the_limit_makes_others_leave() -> None:
    house = House(2, 2 * SIZE)
    for index in range(2):
        await house.answered(house.ask(index))
        await house.warm(index)
        house.clock._skipped_s += 1
    house.stages[1].actors[0].memory = 2 * SIZE
    await house.demand.look()
    assert [one.status for one in house.models] == ["known", "warm"]
    assert "grew over" in house.models[0].unloaded_because
    house.stages[1].actors[0].memory = 3 * SIZE
    await house.demand.look()
    with pytest.raises(NoWorker, match="model_(gpu_)?memory_max"):
        house.ask(1)
    await house.close()


async def test_a_request_that_leaves_while_it_waits_for_memory_loads_nothing() -> None:
    house = House(2, SIZE)
    first = house.ask(0)
    await until_async(lambda: house.models[0].state is ResidentState.WARM)
    other = house.ask(1)
    other.cancel()
    await house.answered(first)
    await until_async(lambda: house.models[1].status == "known")
    assert not house.stages[1].launched
    await house.close()


def test_the_memory_of_a_process_is_read() -> None:
    assert 1 << 20 < proportional_bytes(os.getpid()) < 1 << 40
    assert proportional_bytes((1 << 22) + 5) == 0
