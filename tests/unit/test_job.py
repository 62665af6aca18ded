"""One request, one final status: every way through the table, and the caller's view of it."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from ts.protocol.frames import Chunk, Failed, Feed, Input
from ts_frontend.config.kinds import ConfigError
from ts_frontend.config.load import Option, load_config
from ts_frontend.errors import (
    Cancelled,
    Code,
    DeadlineExceeded,
    HandlerFailed,
    MessageTooLarge,
    NoWorker,
    ServeError,
    WorkerDied,
)
from ts_frontend.job import (
    CREDIT_GRANT_BYTES,
    FINAL,
    NEXT,
    FedJob,
    IllegalTransition,
    Job,
    JobState,
    Ledger,
    Owner,
    Whereabouts,
)
from ts_frontend.scheduling.stream import chunks


class Recording:
    """An owner that records its calls."""

    def __init__(self) -> None:
        self.released: list[Job] = []
        self.granted: list[int] = []

    def release(self, job: Job) -> None:
        self.released.append(job)

    def grant(self, job: Job, size_bytes: int) -> None:
        self.granted.append(size_bytes)

    def feed(self, job: Job, feed: Feed) -> None:
        raise AssertionError("no job of these tests is fed by its owner")

    def measure(self, job: Job) -> Whereabouts:
        return Whereabouts(9000, 1, 0.0, None)


def sent(ledger: Ledger | None = None, **more: object) -> tuple[Job, Recording]:
    """A job that is on a worker."""
    job = Job(ledger or Ledger(), [Input("data", "", b"12345")], request_id="r", **more)  # type: ignore[arg-type]
    owner = Recording()
    job.owner = owner
    job.move(JobState.QUEUED)
    job.move(JobState.SENT)
    job.owner = owner
    return job, owner


@pytest.mark.parametrize(("old", "new"), list(itertools.product(JobState, JobState)))
def test_the_table_decides_which_moves_there_are(old, new):
    job = Job(Ledger(), [], request_id="r")
    job.state = old
    if new in NEXT[old]:
        job.move(new)
        assert job.state is new
    else:
        with pytest.raises(IllegalTransition):
            job.move(new)
        assert job.state is old


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
        job.state, job.owner, job.queued_at_s, job.sent_at_s = old, Recording(), 1.0, 2.0
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


def test_gauges_fall_however_a_job_ends():
    ledger = Ledger()
    ways = [
        lambda job: job.deliver(Chunk(job.id, b"x")),
        lambda job: job.fail(NoWorker("gone")),
        lambda job: job.cancel(),
        lambda job: job.expire(NoWorker("late")),
    ]
    for end in ways:
        job, _ = sent(ledger)
        assert (ledger.sent, list(ledger.live)) == (1, [job.id])
        end(job)
        assert (ledger.queued, ledger.sent, ledger.live) == (0, 0, {})
    assert [
        ledger.counts[state] for state in (JobState.ANSWERED, JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED)
    ] == [1] * 4


async def test_pieces_are_joined_for_a_unary_caller_and_credit_comes_back_at_once():
    job, owner = sent()
    result = asyncio.ensure_future(job.result())
    await asyncio.sleep(0)
    job.deliver(Chunk(job.id, b"one ", last=False, status=201, headers=[("a", "b")]))
    job.deliver(Chunk(job.id, b"two", last=True, status=500))
    assert bytes(await result) == b"one two"
    assert (job.status, list(job.headers)) == (201, [("a", "b")])
    assert owner.granted == [4 + 64]


async def test_a_stream_gives_what_is_ready_together_and_ends_with_the_last_piece():
    job, _ = sent(stream=True)
    job.deliver(Chunk(job.id, b"1", last=False))
    job.deliver(Chunk(job.id, b"2", last=False))
    seen = []
    async for pieces in chunks(job):
        seen.append([bytes(piece) for piece in pieces])
        if len(seen) == 1:
            job.deliver(Chunk(job.id, b"3", last=True))
    assert seen == [[b"1", b"2"], [b"3"]]


async def test_an_answer_is_whole_when_it_ends_with_its_first_piece():
    job, _ = sent(stream=True)
    whole = asyncio.ensure_future(job.whole())
    await asyncio.sleep(0)
    job.deliver(Chunk(job.id, b"all"))
    assert await whole == [b"all"]
    empty, _ = sent(stream=True)
    empty.deliver(Chunk(empty.id, b""))
    assert await empty.whole() == []
    more, _ = sent(stream=True)
    more.deliver(Chunk(more.id, b"1", last=False))
    assert await more.whole() is None
    coming = chunks(more)
    assert await anext(coming) == [b"1"]
    more.deliver(Chunk(more.id, b"2"))
    assert [ready async for ready in coming] == [[b"2"]]


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


async def test_a_reader_that_takes_gives_credit_and_one_that_does_not_gives_none():
    job, owner = sent(stream=True)
    job.deliver(Chunk(job.id, b"x" * 70_000, last=False))
    coming = chunks(job)
    await anext(coming)
    assert owner.granted == []
    job.deliver(Chunk(job.id, b"y", last=False))
    await anext(coming)
    assert owner.granted == [70_064]
    await coming.aclose()
    assert job.state is JobState.CANCELLED and owner.released == [job]


def test_a_reader_is_waited_for_from_the_piece_it_takes_until_it_asks_for_more():
    async def scenario() -> None:
        job, _ = sent(stream=True)
        coming = chunks(job)
        first = asyncio.ensure_future(anext(coming))
        await asyncio.sleep(0)
        assert job.unread_since(time.monotonic()) == -math.inf
        job.deliver(Chunk(job.id, b"x", last=False))
        await first
        assert 0 <= job.unread_since(time.monotonic()) < math.inf
        second = asyncio.ensure_future(anext(coming))
        await asyncio.sleep(0)
        assert job.unread_since(time.monotonic()) == -math.inf
        job.deliver(Chunk(job.id, b"y"))
        await second

    asyncio.run(scenario())


def test_a_stream_may_not_have_less_credit_than_is_given_back_at_once():
    option = Option("stream_credit_bytes", str(CREDIT_GRANT_BYTES - 1), "--set")
    with pytest.raises(ConfigError, match="stream_credit_bytes"):
        load_config([option], environ={})


async def test_an_error_in_a_stream_comes_after_the_pieces_before_it():
    job, _ = sent(stream=True)
    job.deliver(Chunk(job.id, b"1", last=False))
    job.failed_by_worker(Failed(job.id, 503, "Prediction failed"))
    seen = []
    with pytest.raises(HandlerFailed) as failure:
        async for pieces in chunks(job):
            seen += pieces
    assert seen == [b"1"] and failure.value.code is Code.UNAVAILABLE


async def test_a_caller_that_leaves_cancels_wherever_the_job_is():
    job, owner = sent()
    waiting = asyncio.ensure_future(job.result())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert job.state is JobState.CANCELLED and owner.released == [job]
    job.deliver(Chunk(job.id, b"late"))
    with pytest.raises(Cancelled):
        await job.result()


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


def test_the_ledger_tells_when_nothing_is_left():
    ledger, calls = Ledger(), []
    job, _ = sent(ledger)
    ledger.when_empty(lambda: calls.append(1))
    assert calls == []
    job.cancel()
    assert calls == [1]
    ledger.when_empty(lambda: calls.append(2))
    assert calls == [1, 2]


def test_the_end_of_a_job_is_final():
    assert {JobState.ANSWERED, JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED} == FINAL


class Body(bytearray):
    """Bytes that a weak reference can be made to."""


@pytest.fixture(scope="module")
def frozen() -> Iterator[None]:
    """The collector ignores the objects that already exist, so that a collection takes no time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def no_collector(frozen: None) -> Iterator[None]:
    """An object that goes away meanwhile was in no cycle."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


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
    job.owner = Recording()
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


async def test_every_raise_has_an_exception_of_its_own_that_says_the_same():
    job, _ = sent()
    given = HandlerFailed(413, "too long")
    job.fail(given)
    raised = []
    for read in (joined, in_pieces, streamed):
        try:
            await read(job)
        except HandlerFailed as error:
            raised.append(error)
    assert len({id(error) for error in (given, *raised)}) == 4 and given.__traceback__ is None
    assert {(error.message, error.code, error.http_status) for error in raised} == {
        ("too long", given.code, given.http_status)
    }
