"""One request, one final status: every way through the table, and the caller's view of it."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable

import pytest

from support import JobOwner
from ts.protocol.frames import Chunk, Failed, Input
from ts_frontend.errors import (
    Code,
    DeadlineExceeded,
    MessageTooLarge,
    NoWorker,
    ServeError,
    WorkerDied,
)
from ts_frontend.job import (
    FedJob,
    IllegalTransition,
    Job,
    JobState,
    Ledger,
    Owner,
)
from ts_frontend.scheduling.stream import chunks


def sent(ledger: Ledger | None = None, **more: object) -> tuple[Job, JobOwner]:
    """A job that is on a worker."""
    job = Job(ledger or Ledger(), [Input("data", "", b"12345")], request_id="r", **more)  # type: ignore[arg-type]
    owner = JobOwner()
    job.owner = owner
    job.move(JobState.QUEUED)
    job.move(JobState.SENT)
    job.owner = owner
    return job, owner


def owner_of(job: Job) -> Owner:
    assert job.owner is not None
    return job.owner


#: What the methods of the usual way do, as moves by the table.
WAYS: dict[str, tuple[JobState, Callable[[Job], None]]] = {
    "enqueue": (JobState.QUEUED, lambda job: job.enqueue(owner_of(job))),
    "send": (JobState.SENT, lambda job: job.send(owner_of(job), 2.0)),
    "answer": (JobState.ANSWERED, lambda job: job.answer(3.0)),
}


@pytest.mark.parametrize("kind", [Job, FedJob])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("old", JobState)
def test_a_method_of_the_usual_way_does_what_the_table_does(old, way, kind):
    new, act = WAYS[way]

    def seen(act: Callable[[Job], None]) -> object:
        ledger = Ledger()
        told: list[object] = []
        job = kind(ledger, [], request_id="r", recorder=lambda *times: told.append((*times[:2], times[2] > times[1])))
        job.state, job.owner, job.queued_at_s, job.sent_at_s = old, JobOwner(), 1.0, 2.0
        if old is not JobState.NEW:
            ledger.counts[old] = 1
            ledger.live[job.id] = job
            ledger.when_empty(lambda: told.append("empty"))
        try:
            act(job)
        except IllegalTransition:
            return "no such way", job.state, dict(ledger.counts), list(ledger.live.values()) == [job], told
        left = ledger.answered, ledger.failed, ledger.queued_s
        return job.state, job.owner is None, dict(ledger.counts), [*ledger.live.values()] == [job], told, left

    assert seen(act) == seen(lambda job: job.move(new))


async def test_an_answer_that_failed_after_its_first_piece_is_a_failure_as_long_as_nobody_has_read_it():
    job, _ = sent(stream=True)
    job.deliver(Chunk(job.id, b"1", last=False))
    job.fail(NoWorker("gone"))
    with pytest.raises(NoWorker):
        await job.whole()
    left, owner = sent(stream=True)
    waiting = asyncio.ensure_future(left.whole())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert left.state is JobState.CANCELLED and owner.released == [left]


async def test_an_answer_over_the_limit_fails_with_both_sizes_and_stops_the_handler():
    job, owner = sent(response_bytes_max=10)
    job.deliver(Chunk(job.id, b"x" * 5, last=False))
    job.deliver(Chunk(job.id, b"x" * 6, last=False))
    assert owner.released == [job]
    passed_on = []
    with pytest.raises(MessageTooLarge):
        async for ready in chunks(job):
            passed_on += ready
    assert passed_on == []
    with pytest.raises(MessageTooLarge, match="11 bytes is over max_response_size of 10"):
        await job.result()


class Body(bytearray):
    """Bytes that a weak reference can be made to."""


async def joined(job: Job) -> object:
    return await job.result()


async def in_pieces(job: Job) -> object:
    return await job.pieces()


async def streamed(job: Job) -> object:
    return [pieces async for pieces in chunks(job)]


def fail_after_a_piece(job: Job) -> None:
    job.deliver(Chunk(job.id, b"x", last=False))
    job.fail(NoWorker("gone"))


ENDINGS: dict[str, Callable[[Job], object]] = {
    "handler": lambda job: job.failed_by_worker(Failed(job.id, 413, "too long")),
    "after a piece": fail_after_a_piece,
    "expired": lambda job: job.expire(DeadlineExceeded("late")),
    "cancelled": lambda job: job.cancel(),
    "too large": lambda job: job.deliver(Chunk(job.id, b"x" * 101)),
    "worker": lambda job: job.fail(WorkerDied("killed")),
}


@pytest.mark.parametrize("kind", [Job, FedJob])
@pytest.mark.parametrize("read", [joined, in_pieces, streamed])
@pytest.mark.parametrize("early", [True, False], ids=["ended before", "awaited"])
@pytest.mark.parametrize("end", ENDINGS.values(), ids=ENDINGS)
async def test_a_failed_job_is_freed_as_soon_as_its_caller_has_its_error(no_collector, end, early, read, kind):
    async def call(job: Job) -> tuple[str, Code]:
        """Handles an error as the services do: they take the needed parts and release it."""
        try:
            await read(job)
        except ServeError as error:
            return error.message, error.code
        return "", Code.OK

    body = Body(b"12345")
    job = kind(Ledger(), [Input("data", "", body)], request_id="r", response_bytes_max=100)
    job.owner = JobOwner()
    job.move(JobState.QUEUED)
    job.move(JobState.SENT)
    alive = weakref.ref(body)
    del body
    if early:
        end(job)
    answer = asyncio.ensure_future(call(job))
    await asyncio.sleep(0)
    if not early:
        end(job)
    message, code = await answer
    assert (message and code) or end is ENDINGS["too large"]
    del job, answer
    assert alive() is None, gc.get_referrers(alive())
