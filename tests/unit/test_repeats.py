"""Requests of idempotent models that run once more: after a worker's death, and after a batch failed as a whole."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import pytest

from stage import Skipping, Stage, pool_of, waiting
from support import turns, until_async
from ts.protocol.frames import Chunk, Input, Predict
from ts_frontend.errors import Code, DeadlineExceeded, Quarantined, WorkerDied
from ts_frontend.job import FedJob, Job, Ledger
from ts_frontend.scheduling.batcher import Group, RepeatLane, Repeats, halves, one_by_one
from ts_frontend.scheduling.stream import chunks
from ts_frontend.workers.pool import Pool


def a_job(ledger: Ledger | None = None, **more: Any) -> Job:
    return Job(ledger or Ledger(), [Input("data", "", b"x")], request_id="r", **more)


# --- the pure part


@pytest.mark.parametrize("count", [2, 3, 7, 8, 100])
def test_halving_finds_a_culprit_in_log2_plus_1_runs(count: int) -> None:
    for culprit in (0, count // 2, count - 1):
        jobs = [a_job() for _ in range(count)]
        runs = dict.fromkeys(jobs, 0)
        groups = [Group(jobs)]
        while groups:
            group = groups.pop()
            for job in group.jobs:
                runs[job] += 1
            if jobs[culprit] in group.jobs and len(group.jobs) > 1:
                groups += halves(group.jobs)
        assert max(runs.values()) <= math.ceil(math.log2(count)) + 1


def test_a_lane_keeps_order_and_gives_what_goes_alone_to_idle_workers_only() -> None:
    lane, jobs = RepeatLane(), [a_job() for _ in range(4)]
    assert not lane and lane.take(idle=True) is None
    lane.add([*one_by_one(jobs[:1]), Group(jobs[1:3]), Group([])])
    lane.add(one_by_one(jobs[3:]))
    assert (len(lane), lane.waiting(), lane.has_alone) == (4, jobs, True)
    group = lane.take(idle=False)
    assert group is not None and group.jobs == jobs[1:3] and not group.alone
    assert lane.take(idle=False) is None
    assert lane.remove(jobs[0]) and not lane.remove(jobs[0])
    group = lane.take(idle=True)
    assert group is not None and group.jobs == jobs[3:] and group.alone
    assert not lane and not lane.has_alone


# --- with a pool


async def served(stage: Stage, workers: int = 1) -> Pool:
    pool = pool_of(stage, Skipping(), repeats=Repeats())
    await pool.scale(workers)
    return pool


def finished(jobs: list[Job], ledger: Ledger) -> None:
    assert all(job.done for job in jobs) and not ledger.live
    assert ledger.queued == ledger.sent == 0


def counts(pool: Pool) -> tuple[int, int, int]:
    repeats = pool.plan.repeats
    assert repeats is not None
    return repeats.after_deaths, repeats.after_failures, repeats.quarantined


async def test_what_runs_again_after_a_death_has_its_worker_to_itself() -> None:
    """Of a handler that runs requests side by side: a new request must not die with the suspect."""
    stage, ledger = Stage(), Ledger()
    stage.handler_kind = "async"
    pool = await served(stage)
    jobs = [waiting(pool, ledger) for _ in range(3)]
    for _ in jobs:
        await stage.actors[0].batch()
    stage.actors[0].end(-9)
    await until_async(lambda: len(stage.actors) == 2)
    late = waiting(pool, ledger)
    actor = stage.actors[1]
    for job in jobs:
        batch = await actor.batch()
        assert [item.job_id for item in batch.items] == [job.id]
        await turns(5)
        assert actor.heard(Predict) is None, "nothing beside it"
        actor.answer(batch)
        assert await job.result() == b"ok"
    actor.answer(await actor.batch())
    assert await late.result() == b"ok"
    side_by_side = [waiting(pool, ledger) for _ in range(2)]
    batches = [await actor.batch() for _ in range(2)]
    for batch in batches:
        actor.answer(batch)
    for job in side_by_side:
        await job.result()
    finished([*jobs, late, *side_by_side], ledger)
    await pool.close(0)


async def test_a_busy_worker_is_kept_free_for_what_goes_alone() -> None:
    """The dead worker never comes back; the other one always has something to do."""
    stage, ledger = Stage("ready", "ready", *["hangs"] * 9), Ledger()
    stage.handler_kind = "async"
    pool = await served(stage, workers=2)
    first, busy = waiting(pool, ledger), waiting(pool, ledger)
    await stage.actors[0].batch()
    batch = await stage.actors[1].batch()
    stage.actors[0].end(-9)
    await until_async(lambda: pool.queue.waiting() == [first])
    later = waiting(pool, ledger)
    await turns(5)
    assert stage.actors[1].heard(Predict) is None, "it takes nothing new"
    stage.actors[1].answer(batch)
    assert await busy.result() == b"ok"
    for job in (first, later):
        batch = await stage.actors[1].batch()
        assert [item.job_id for item in batch.items] == [job.id]
        stage.actors[1].answer(batch)
        assert await job.result() == b"ok"
    finished([first, busy, later], ledger)
    await pool.close(0)


async def test_a_request_that_was_not_begun_twice_is_no_suspect() -> None:
    """Its second worker dies before the handler is called: it goes to a third one, alone again, and is answered."""
    stage, ledger = Stage(), Ledger()
    pool = await served(stage)
    job = waiting(pool, ledger)
    await stage.actors[0].batch()
    stage.actors[0].end(-9)
    await until_async(lambda: len(stage.actors) == 2)
    await stage.actors[1].batch(begins=False)
    stage.actors[1].end(-9)
    await until_async(lambda: len(stage.actors) == 3)
    await stage.actors[2].batch()
    assert counts(pool) == (1, 0, 0)
    stage.actors[2].end(-9)
    with pytest.raises(Quarantined):
        await job.result()
    finished([job], ledger)
    await pool.close(0)


async def test_a_stopped_worker_gives_a_suspect_back_as_a_suspect() -> None:
    stage, ledger = Stage(), Ledger()
    pool = await served(stage)
    job = waiting(pool, ledger)
    await stage.actors[0].batch()
    stage.actors[0].end(-9)
    await until_async(lambda: len(stage.actors) == 2)
    await stage.actors[1].batch()
    pool.slots[0].try_now()
    scaling = asyncio.create_task(pool.scale(2))
    await until_async(lambda: len(stage.actors) == 3)
    await scaling
    assert pool.slots[0].worker is not None
    await pool.slots[0].worker.stop(0)
    batch = await stage.actors[2].batch()
    late = waiting(pool, ledger)
    stage.actors[2].end(-9)
    with pytest.raises(Quarantined):
        await job.result()
    assert [item.job_id for item in batch.items] == [job.id] and not late.done
    await pool.close(0)


async def test_begun_streams_and_fed_streams_and_hung_requests_are_not_repeated() -> None:
    stage, ledger = Stage(), Ledger()
    stage.handler_kind = "async"
    pool = await served(stage)
    begun, quiet = waiting(pool, ledger, stream=True), waiting(pool, ledger, stream=True)
    fed = FedJob(ledger, [Input("data", "", b"x")], request_id="fed", stream=True, alone=True)
    pool.queue.put(fed)
    fed.allow(1000)
    await fed.feed([Input("data", "", b"more")])
    actor = stage.actors[0]
    for _ in range(3):
        await actor.batch()
    fed.allow(1000)
    actor.say(Chunk(begun.id, b"piece", last=False))
    await until_async(lambda: begun.received_bytes)
    actor.end(-9)
    for job in (begun, fed):
        with pytest.raises(WorkerDied):
            async for _ in chunks(job):
                pass
    await until_async(lambda: len(stage.actors) == 2)
    stage.actors[1].answer(await stage.actors[1].batch())
    assert [bytes(piece) async for pieces in chunks(quiet) for piece in pieces] == [b"ok"]
    finished([begun, quiet, fed], ledger)

    hung, neighbour = waiting(pool, ledger), waiting(pool, ledger)
    batches = [await stage.actors[1].batch() for _ in range(2)]
    worker = pool.slots[0].worker
    assert worker is not None and [item.job_id for item in batches[0].items] == [hung.id]
    now_s = time.monotonic()
    worker._running.batches[batches[0].batch_id].active_s = now_s - 1e6
    worker.tick(now_s)
    worker.tick(now_s + worker._plan.neighbour_grace_s + 1)
    with pytest.raises(WorkerDied, match="responseTimeout") as died:
        await hung.result()
    assert died.value.code is Code.INTERNAL
    await until_async(lambda: len(stage.actors) == 3)
    stage.actors[2].answer(await stage.actors[2].batch())
    assert await neighbour.result() == b"ok"
    await pool.close(0)


@pytest.mark.parametrize("how", ["cancelled", "expired"])
async def test_what_waits_to_run_again_can_be_cancelled_and_expires(how: str) -> None:
    stage, ledger = Stage("ready", "hangs"), Ledger()
    pool = await served(stage)
    job = waiting(pool, ledger, deadline_s=time.monotonic() + 1000)
    await stage.actors[0].batch()
    stage.actors[0].end(-9)
    await until_async(lambda: len(pool.queue) == 1)
    if how == "cancelled":
        job.cancel()
    else:
        pool.tick(job.deadline_s + 1)
        with pytest.raises(DeadlineExceeded, match="waited for another worker"):
            await job.result()
    finished([job], ledger)
    assert len(pool.queue) == 0 and not pool.queue.waiting()
    await pool.close(0)
