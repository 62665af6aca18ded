"""The multiplexer of streams: order, bounds, failures, and that nothing is left of a stream that has ended."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any

import pytest

from support import GUARD_S, JobOwner, turns
from ts.protocol.frames import FEED_BYTES, Buffer, Chunk, Failed, Feed, Input
from ts_frontend.errors import Code, HandlerFailed, InvalidArgument, ModelNotFound, ServeError
from ts_frontend.job import WAITING_BYTES_MAX as FED_BYTES_MAX
from ts_frontend.job import FedJob, Job, JobState, Ledger
from ts_frontend.scheduling.stream import (
    READY_BYTES_MAX,
    REQUEST_BYTES_MAX,
    REQUESTS_MAX,
    Multiplexer,
    ReadyAnswers,
    StreamRequest,
)

PIECE = bytes(1000)


class Body(bytearray):
    """Bytes that a weak reference can be made to."""


class Worker(JobOwner):
    """Keeps every job of a stream, and records what they are fed."""

    def __init__(self) -> None:
        super().__init__()
        self.fed: list[Feed] = []

    def feed(self, job: Job, feed: Feed) -> None:
        self.fed.append(feed)


class Talk:
    """A client that says `LANE NAME`, with anything after a second space; lane `-` is none. A name that begins with
    `refused` or `broken` isn't started. `failures_end`: as in MLServer's dialect."""

    def __init__(self, *, in_turn: bool = False, failures_end: bool = False, fed: bool = False) -> None:
        self.in_turn, self.failures_end, self.fed = in_turn, failures_end, fed
        self.jobs: dict[str, Job] = {}
        self.read = 0
        self.worker = Worker()
        self._said: asyncio.Queue[Buffer | type[Exception] | None] = asyncio.Queue()
        self.answers = Multiplexer("Test", self._accept).answers(self._messages())

    def say(self, *messages: str | Buffer | type[Exception] | None) -> None:
        """None: the client has said everything."""
        for one in messages:
            self._said.put_nowait(one.encode() if isinstance(one, str) else one)

    async def _messages(self) -> AsyncIterator[bytes]:
        while (one := await self._said.get()) is not None:
            if isinstance(one, type):
                raise one("it broke")
            self.read += 1
            yield one  # type: ignore[misc]  # a Body in place of bytes

    def _accept(self, data: bytes) -> StreamRequest:
        if data == b"unreadable":
            raise InvalidArgument("unreadable")
        return Said(self, data)

    def answer(self, name: str, text: str | bytes = "ok", last: bool = True) -> None:
        job = self.jobs[name]
        job.deliver(Chunk(job.id, text.encode() if isinstance(text, str) else text, last=last))

    def fail(self, name: str) -> None:
        job = self.jobs[name]
        job.failed_by_worker(Failed(job.id, 413, f"{name} is too long"))

    @property
    def started(self) -> list[str]:
        return list(self.jobs)

    @property
    def over(self) -> bool:
        return all(job.done for job in self.jobs.values())


class Said(StreamRequest):
    def __init__(self, talk: Talk, data: bytes) -> None:
        lane, self.name, *_ = bytes(data[:100]).decode().split(" ")
        self.lane = None if lane == "-" else lane
        self.starts_in_turn = talk.in_turn
        self._talk, self._data = talk, data

    def start(self) -> Job:
        if self.name.startswith("refused"):
            raise ModelNotFound(self.name)
        if self.name.startswith("broken"):
            raise KeyError(self.name)
        kind = FedJob if self._talk.fed else Job
        job = kind(Ledger(), [Input("", "", self._data)], request_id="r", stream=True)
        job.move(JobState.QUEUED)
        job.owner = self._talk.worker
        job.move(JobState.SENT)
        self._talk.jobs[self.name] = job
        return job

    def answers(self, job: Job, pieces: list[Buffer]) -> list[bytes]:
        if self.name.startswith("unwritable"):
            raise ValueError(self.name)
        return [self.name.encode() + b"=" + bytes(piece) for piece in pieces if len(piece)]

    def failure(self, error: ServeError, started: bool) -> bytes | ServeError:
        if self._talk.failures_end:
            return error
        return f"{self.name}{'!' if started else '?'}{error.message}".encode()

    def following(self, data: bytes) -> Sequence[Input]:
        return [Input("", "", data)]


def run_test(scenario: Coroutine[Any, Any, None]) -> None:
    """In a loop of its own, which must hear of no exception that nobody has seen."""
    heard: list[dict[str, Any]] = []

    async def guarded() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context))
        await asyncio.wait_for(scenario, GUARD_S)
        gc.collect()

    asyncio.run(guarded())
    assert not heard


class Reader:
    """Takes answers as they come, until the stream ends; `stalled`: only when it's told to."""

    def __init__(self, talk: Talk, stalled: bool = False) -> None:
        self.got: list[str] = []
        self._may_read = asyncio.Event()
        self.task = asyncio.ensure_future(self._read(talk))
        if not stalled:
            self._may_read.set()

    async def _read(self, talk: Talk) -> None:
        async with contextlib.aclosing(talk.answers) as answers:
            async for group in answers:
                self.got += [one.decode() for one in group]
                await self._may_read.wait()

    def read_on(self) -> None:
        self._may_read.set()


# --- bounds


async def test_so_many_requests_are_read_ahead() -> None:
    talk = Talk()
    reader = Reader(talk)
    talk.say(*(f"- {number}" for number in range(REQUESTS_MAX + 10)), None)
    await turns(50)
    assert len(talk.started) == REQUESTS_MAX and talk.read == REQUESTS_MAX + 1
    talk.answer("3")
    await turns(50)
    assert len(talk.started) == REQUESTS_MAX + 1
    while not reader.task.done():
        for name in talk.started:
            talk.answer(name)
        await turns(50)
    await reader.task
    assert len(reader.got) == REQUESTS_MAX + 10


@pytest.mark.parametrize("in_turn", [False, True])
async def test_so_many_bytes_are_read_ahead_and_a_larger_request_alone(in_turn: bool) -> None:
    talk = Talk(in_turn=in_turn)
    reader = Reader(talk)
    large = bytes(REQUEST_BYTES_MAX // 2)
    talk.say(b"x a " + large, b"y b", b"z c " + large, b"- d " + large * 3, b"- e", None)
    await turns(50)
    assert (talk.started, talk.read) == (["a", "b"], 3)
    talk.answer("a")
    await turns(50)
    assert (talk.started, talk.read) == (["a", "b", "c"], 4)
    talk.answer("b")
    await turns(50)
    assert talk.started == ["a", "b", "c"], "the largest goes alone"
    talk.answer("c")
    await turns(50)
    assert talk.started == ["a", "b", "c", "d"]
    talk.answer("d")
    await turns(50)
    talk.answer("e")
    await reader.task


# --- failures


async def test_failures_in_the_middle_are_answers_and_the_stream_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    talk = Talk()
    reader = Reader(talk)
    talk.say("l a", "l refused", "l bad", "l broken", "l unwritable", "l z", None)
    await turns(50)
    assert talk.started == ["a", "bad", "unwritable", "z"]
    talk.answer("z")
    talk.answer("unwritable", last=False)
    talk.answer("bad", "1", last=False)
    talk.fail("bad")
    await turns(50)
    assert reader.got == [], "failures keep the order, too"
    talk.answer("a")
    await reader.task
    assert reader.got == [
        "a=ok",
        "refused?Model not found: refused",
        "bad=1",
        "bad!bad is too long",
        "broken?Test: KeyError in the server, see its log",
        "unwritable!Test: ValueError in the server, see its log",
        "z=ok",
    ]
    assert talk.over and talk.worker.released == [talk.jobs["unwritable"]]
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [KeyError, ValueError]


async def test_a_failure_that_ends_the_stream_comes_after_the_answers_before_it() -> None:
    talk = Talk(failures_end=True)
    reader = Reader(talk, stalled=True)
    talk.say("l a", "l bad", "l never", "- free", "- other")
    await turns(50)
    talk.answer("free", "1", last=False)
    await turns(50)
    talk.answer("a")
    await turns(50)
    talk.fail("bad")
    await turns(50)
    assert talk.over, "the others are cancelled at once"
    talk.say("l late", "l later")
    await turns(50)
    assert "late" not in talk.started
    reader.read_on()
    with pytest.raises(HandlerFailed, match="bad is too long"):
        await reader.task
    assert reader.got == ["free=1", "a=ok"]
    assert {name: job.state for name, job in talk.jobs.items() if job in talk.worker.released} == dict.fromkeys(
        ("never", "free", "other"), JobState.CANCELLED
    )


@pytest.mark.parametrize("kind", ["the client's error", "a request that isn't one", "a defect"])
async def test_an_error_of_the_reading_side_ends_the_stream(kind: str) -> None:
    errors: dict[str, tuple[str | type[Exception], type[Exception]]] = {
        "the client's error": (InvalidArgument, InvalidArgument),
        "a request that isn't one": ("unreadable", InvalidArgument),
        "a defect": (ZeroDivisionError, ZeroDivisionError),
    }
    said, expected = errors[kind]
    talk = Talk()
    reader = Reader(talk)
    talk.say("l a", "l b")
    await turns(50)
    talk.answer("a")
    talk.say(said)
    with pytest.raises(expected):
        await reader.task
    assert reader.got == ["a=ok"] and talk.over
    assert talk.worker.released == [talk.jobs["b"]]


# --- a job that takes the whole stream


@pytest.mark.parametrize("failures_end", [False, True])
async def test_the_stream_ends_with_its_fed_job_whatever_the_client_still_sends(failures_end: bool) -> None:
    talk = Talk(fed=True, failures_end=failures_end)
    reader = Reader(talk)
    talk.say("l a", *["more"] * 5)
    await turns(50)
    if failures_end:
        talk.fail("a")
        with pytest.raises(HandlerFailed):
            await reader.task
    else:
        talk.answer("a")
        await reader.task
        assert reader.got == ["a=ok"]


async def test_a_fed_job_that_takes_nothing_stops_its_client() -> None:
    talk = Talk(fed=True)
    reader = Reader(talk)
    talk.say("l a", *[bytes(FED_BYTES_MAX // 4)] * 20, None)
    await turns(50)
    assert 4 <= talk.read <= 7
    for _ in range(20):
        talk.jobs["a"].allow(FED_BYTES_MAX)
        await turns(50)
    assert talk.read == 21 and len(talk.worker.fed) == 21
    talk.answer("a")
    await reader.task


async def busy(talk: Talk) -> None:
    """The reader waits for space, jobs for pieces, and, with a reader that stalls, answers for being read."""
    reading = Reader(talk, stalled=True)
    try:
        talk.say("l a", "l b", "m c", "- d", b"- e " + bytes(REQUEST_BYTES_MAX), "- f", None)
        while not talk.over or not talk.jobs:
            for name in talk.started:
                talk.answer(name, bytes(READY_BYTES_MAX // 2), last=False)
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            if talk.worker.granted_bytes > 8 * READY_BYTES_MAX:
                reading.read_on()
        await reading.task
    finally:
        reading.task.cancel()
        await asyncio.wait({reading.task})


async def left_after(count: int, talk: Talk) -> None:
    """The caller's task is cancelled after so many turns of the loop, wherever everything is by then."""
    current = asyncio.current_task()
    caller = asyncio.ensure_future(busy(talk))
    await turns(count)
    caller.cancel()
    await asyncio.wait({caller})
    assert talk.over, "a job still runs"
    assert asyncio.all_tasks() <= {current, *outer}, "a task still runs"


outer: set[asyncio.Task[Any]] = set()


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("fed", [False, True])
async def test_nothing_runs_on_wherever_the_caller_is_when_it_leaves(in_turn: bool, fed: bool) -> None:
    if in_turn and fed:
        return  # a job that is fed starts at once
    outer.clear()
    outer.update(asyncio.all_tasks())
    for count in range(40):
        await left_after(count, Talk(in_turn=in_turn, fed=fed))


# --- memory


async def answered(talk: Talk, caller: asyncio.Task[Any]) -> None:
    talk.answer("a", "1", last=False)
    await turns(50)
    talk.answer("a")
    talk.say(None)


async def failed(talk: Talk, caller: asyncio.Task[Any]) -> None:
    talk.fail("a")
    talk.say(None)


async def failed_late(talk: Talk, caller: asyncio.Task[Any]) -> None:
    talk.answer("a", "1", last=False)
    await turns(50)
    await failed(talk, caller)


async def broken(talk: Talk, caller: asyncio.Task[Any]) -> None:
    talk.say(InvalidArgument)


async def unreadable(talk: Talk, caller: asyncio.Task[Any]) -> None:
    talk.say("unreadable")


async def left(talk: Talk, caller: asyncio.Task[Any]) -> None:
    caller.cancel()


@pytest.mark.parametrize("end", [answered, failed, failed_late, broken, unreadable, left])
@pytest.mark.parametrize("options", [{}, {"failures_end": True}, {"fed": True}, {"in_turn": True}], ids=str)
def test_a_streams_requests_are_freed_with_it(
    no_collector: None, options: dict[str, bool], end: Callable[[Talk, asyncio.Task[Any]], Awaitable[None]]
) -> None:
    async def call(talk: Talk) -> tuple[str, Code]:
        """Handles an error as the engines do: they take the needed parts and release it."""
        try:
            async with contextlib.aclosing(talk.answers) as answers:
                async for _ in answers:
                    pass
        except ServeError as error:
            return error.message, error.code
        except asyncio.CancelledError:
            return "left", Code.CANCELLED
        return "", Code.OK

    async def scenario() -> None:
        body = Body(b"l a " + bytes(1000))
        alive = weakref.ref(body)
        talk = Talk(**options)
        caller = asyncio.ensure_future(call(talk))
        talk.say(body)
        del body
        await turns(50)
        if "fed" in options:
            talk.jobs["a"].allow(FEED_BYTES)
        await end(talk, caller)
        if "fed" in options and end is unreadable:  # it's the handler that reads what follows
            talk.answer("a")
        await caller
        assert talk.over
        del talk, caller
        await turns(50)  # the loop closes the client's generator
        assert alive() is None, gc.get_referrers(alive())

    asyncio.run(scenario())


# --- the two bounds by themselves


async def bring(answers: ReadyAnswers, groups: int, group: list[bytes]) -> int:
    """How many of the groups are let in while nobody takes any."""
    let_in = 0

    async def put() -> None:
        nonlocal let_in
        await answers.put(group)
        let_in += 1

    tasks = [asyncio.ensure_future(put()) for _ in range(groups)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return let_in


def test_so_many_bytes_wait_and_no_more() -> None:
    assert 200 < asyncio.run(bring(ReadyAnswers(), 1000, [PIECE])) <= READY_BYTES_MAX // 1000 + 1
    assert 20 < asyncio.run(bring(ReadyAnswers(), 1000, [PIECE] * 10)) <= READY_BYTES_MAX // 10_000 + 1
    assert asyncio.run(bring(ReadyAnswers(), 5000, [b""])) <= READY_BYTES_MAX // 128
