"""Workers that have answered enough requests, or use too much memory, are replaced without losing a request."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from stage import Skipping, Stage, pool_of, waiting
from support import until_async
from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import WorkerDied
from ts_frontend.job import Ledger
from ts_frontend.models.settings import ModelSettings, Requested, resolve
from ts_frontend.workers.pool import REPLACE_AGAIN_S, Pool
from ts_frontend.workers.resources import Excess, WorkerLimits, available_bytes


def settings(**model_config: Any) -> ModelSettings:
    return resolve(Requested(), model_config, {}, ServerConfig())


@pytest.mark.parametrize("value", [0, -1, True, "", "many", "1 i", "1ib", "-1GB", "1 GB!", 1.5, [1], "0", "9" * 50])
def test_sizes_that_cannot_be_meant_are_ignored_with_a_warning(value: object) -> None:
    found = settings(workerMemoryMax=value)
    assert found.worker_memory_bytes_max == 0 and "workerMemoryMax" in found.warnings[0]


def test_models_with_sequences_are_not_recycled() -> None:
    found = settings(sequenceBatching=True, recycleAfterRequests=5, recycleAboveMemory="1GB", workerMemoryMax="2GB")
    assert (found.recycle_after_requests, found.recycle_above_bytes) == (0, 0)
    assert found.worker_memory_bytes_max == 2 * 10**9
    assert [warning.partition(" is ")[0] for warning in found.warnings] == [
        "model-config.yaml: recycleAfterRequests",
        "model-config.yaml: recycleAboveMemory",
    ]


def test_what_is_over() -> None:
    limits = WorkerLimits(requests=10, memory_bytes=100 << 20, memory_bytes_max=200 << 20)
    assert limits.over(9) is None and limits.over_memory((100 << 20) - 1) is None
    assert limits.over(10) == Excess("requests", "it has answered 10 requests (recycleAfterRequests: 10)")
    assert limits.over_memory(150 << 20) == Excess("memory", "it uses 150 MiB of memory (recycleAboveMemory: 100 MiB)")
    assert limits.over_memory((200 << 20) + 1) == Excess(
        "memory_max", "It used 200 MiB of memory (workerMemoryMax: 200 MiB)"
    )
    assert WorkerLimits().over(1 << 40) is None and WorkerLimits().over_memory(1 << 60) is None
    assert available_bytes() > 0


# --- with a pool


async def serve(pool: Pool, stage: Stage, actor: int, ledger: Ledger, count: int) -> None:
    """So many requests, one after another."""
    for _ in range(count):
        job = waiting(pool, ledger)
        stage.actors[actor].answer(await stage.actors[actor].batch())
        assert await job.result() == b"ok"


def settled(pool: Pool, ledger: Ledger) -> None:
    assert not ledger.live and pool._replacing is None and not pool._leaving and not pool._retiring


async def test_a_worker_stays_while_the_next_one_does_not_start(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    stage, ledger, clock = Stage("ready", "fails", "hangs"), Ledger(), Skipping(0)
    pool = pool_of(stage, clock, limits=WorkerLimits(requests=1))
    await pool.scale(1)
    await serve(pool, stage, 0, ledger, 1)
    pool.tick(clock.now_s())
    await until_async(lambda: stage.launched >= 2 and pool._replacing is None)
    assert pool.ready_count == 1 and pool.replaced == {} and pool.load_failure is None
    pool.tick(clock.now_s())
    assert pool._replacing is None, "not at once again"
    await serve(pool, stage, 0, ledger, 1)
    stage.scenes = ["ready"]
    pool.tick(clock.now_s() + REPLACE_AGAIN_S)
    await until_async(lambda: pool.replaced == {"requests": 1})
    await until_async(lambda: pool._replacing is None)
    await pool.close(0)
    settled(pool, ledger)
    assert "Worker 9000 of m_1.0 stays: the one after it did not start" in caplog.text


@pytest.mark.parametrize("scene", ["ready", "hangs"])
@pytest.mark.parametrize("end", ["close", "scale"])
async def test_a_pool_that_ends_during_a_replacement_leaves_nothing(scene: str, end: str) -> None:
    for turns in range(12):
        stage, ledger = Stage("ready", scene), Ledger()
        pool = pool_of(stage, Skipping(), limits=WorkerLimits(requests=1))
        await pool.scale(1)
        await serve(pool, stage, 0, ledger, 1)
        pool.tick(time.monotonic())
        for _ in range(turns):
            await asyncio.sleep(0)
        if end == "scale":
            await pool.scale(0)
            assert pool.slots == []

            def replaced(pool: Pool = pool) -> bool:
                return pool._replacing is None

            await until_async(replaced)
        await pool.close(0)
        settled(pool, ledger)
        assert all(actor.exited.done() and actor.sock.fileno() < 0 for actor in stage.actors), turns


async def test_a_worker_above_its_soft_size_is_replaced_and_one_above_the_hard_one_killed() -> None:
    stage, ledger = Stage(), Ledger()
    stage.memory = 10 << 20
    pool = pool_of(stage, Skipping(), limits=WorkerLimits(memory_bytes=20 << 20, memory_bytes_max=40 << 20))
    await pool.scale(1)
    now_s = time.monotonic()
    stage.actors[0].memory = 30 << 20
    pool.tick(now_s)
    await until_async(lambda: pool.replaced == {"memory": 1} and pool._replacing is None)
    assert stage.launched == 2 and pool.last_replacement is not None
    assert pool.last_replacement.reason == "it uses 30 MiB of memory (recycleAboveMemory: 20 MiB)"
    job = waiting(pool, ledger)
    await stage.actors[1].batch()
    stage.actors[1].memory = 41 << 20
    pool.tick(now_s + 0.5)
    assert not stage.actors[1].exited.done(), "it isn't looked at all the time"
    pool.tick(now_s + 5)
    with pytest.raises(WorkerDied, match="It used 41 MiB of memory .workerMemoryMax: 40 MiB") as died:
        await job.result()
    assert died.value.http_status == 507
    await until_async(lambda: pool.ready_count == 1 and stage.launched == 3)
    assert pool.replaced == {"memory": 1, "memory_max": 1}
    assert pool.last_failure is not None and "workerMemoryMax" in pool.last_failure.reason
    await pool.close(0)


async def test_a_worker_that_loads_too_much_is_ended_while_it_loads() -> None:
    stage = Stage("hangs", *["hangs"] * 5)
    stage.memory = 50 << 20
    pool = pool_of(stage, Skipping(0), limits=WorkerLimits(memory_bytes_max=40 << 20))
    scaling = asyncio.create_task(pool.scale(1))
    await until_async(lambda: stage.actors)
    for _ in range(3):
        await asyncio.sleep(0)
    pool.tick(time.monotonic())
    with pytest.raises(Exception, match="while loading: It used 50 MiB of memory .workerMemoryMax"):
        await scaling
    await pool.close(0)


async def test_a_soft_size_below_what_a_loaded_worker_needs_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    stage = Stage()
    stage.memory = 30 << 20
    pool = pool_of(stage, Skipping(), limits=WorkerLimits(memory_bytes=20 << 20))
    await pool.scale(1)
    pool.tick(time.monotonic())
    assert pool._replacing is None
    await pool.close(0)
    assert "need 30 MiB once they have loaded: recycleAboveMemory of 20 MiB is ignored" in caplog.text
