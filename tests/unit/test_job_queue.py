"""Batches go to free workers at once; ended requests never go."""

from __future__ import annotations

import asyncio
import time

import pytest

from support import GUARD_S, OneBatchWorker, turns
from ts.protocol.frames import Chunk, Input
from ts_frontend.errors import DeadlineExceeded, QueueFull
from ts_frontend.job import Job, JobState, Ledger
from ts_frontend.scheduling.batcher import Policy
from ts_frontend.scheduling.queues import AHEAD_S, JobQueue


class Taking(OneBatchWorker):
    """A worker that keeps its batches; `busy` limits it to one batch, `ahead` lets it read one ahead."""

    def __init__(self, ahead: int = 0) -> None:
        self.batches: list[list[Job]] = []
        self.ahead = ahead
        self.taken = asyncio.Event()

    def room(self, ahead_s: float = AHEAD_S) -> int:
        if not self.batches:
            return 2
        return 1 if len(self.batches) <= self.ahead else 0

    def dispatch(self, jobs: list[Job], now_s: float) -> None:
        for job in jobs:
            job.owner = None
            job.move(JobState.SENT)
        self.batches.append(jobs)
        self.taken.set()

    def holds(self, job: Job) -> bool:
        return any(job in batch for batch in self.batches)

    def finish(self, queue: JobQueue) -> None:
        for job in self.batches.pop(0):
            job.deliver(Chunk(job.id, b"ok"))
        queue.wake()


def job(ledger: Ledger, **more: object) -> Job:
    return Job(ledger, [Input("data", "", b"x")], request_id="r", **more)  # type: ignore[arg-type]


async def test_idle_workers_take_turns_and_reading_ahead_is_only_for_when_none_is_idle():
    queue, first, second, ledger = JobQueue(Policy()), Taking(ahead=1), Taking(ahead=1), Ledger()
    queue.attach(first)
    queue.attach(second)
    jobs = [job(ledger) for _ in range(5)]
    for each in jobs:
        queue.put(each)
    await turns()
    assert [first.batches[0][0], second.batches[0][0]] == jobs[:2]
    assert [len(first.batches), len(second.batches), len(queue)] == [2, 2, 1]
    first.finish(queue)
    await turns()
    assert first.batches[-1] == [jobs[4]]


async def test_expired_work_is_never_sent():
    queue, worker, ledger = JobQueue(Policy(batch_size=4)), Taking(), Ledger()
    late, good = job(ledger, deadline_s=time.monotonic() - 1), job(ledger)
    queue.put(late)
    queue.put(good)
    queue.attach(worker)
    await turns()
    assert worker.batches == [[good]]
    with pytest.raises(DeadlineExceeded, match="never ran"):
        await late.result()


async def test_a_wished_delay_is_waited_out_and_no_longer():
    queue, worker, ledger = JobQueue(Policy(batch_size=4, delay_s=0.05, lone_waits=True)), Taking(), Ledger()
    queue.attach(worker)
    started_s = time.monotonic()
    queue.put(job(ledger))
    assert worker.batches == []
    queue.put(job(ledger))
    await asyncio.wait_for(worker.taken.wait(), GUARD_S)
    assert time.monotonic() - started_s >= 0.05
    assert len(worker.batches[0]) == 2


async def test_a_full_queue_takes_answers_that_have_arrived_before_it_refuses():
    """Else a turn of the loop with many refused requests gives each worker only a few, and most go on being refused."""

    class Answered(Taking):
        has_answered = True

        def look(self) -> None:
            if self.has_answered:
                self.finish(queue)

    queue, worker, ledger = JobQueue(Policy(jobs_max=2)), Answered(), Ledger()
    queue.attach(worker)
    queue.put(job(ledger))
    await turns()
    jobs = [job(ledger) for _ in range(4)]
    for each in jobs:
        queue.put(each)
    assert [one.state for one in jobs] == [JobState.ANSWERED, JobState.SENT, JobState.QUEUED, JobState.QUEUED]
    worker.has_answered = False
    with pytest.raises(QueueFull):
        queue.put(job(ledger))
