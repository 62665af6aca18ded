"""Streams of requests: many requests on one call, and the answers to them.

`Multiplexer` reads the requests ahead, runs them, and hands their answers out as they become ready. Both directions are
bounded in bytes: a client waits if it sends faster than it gets answers, and a handler waits if it answers faster than
its client reads. A protocol describes its requests with a subclass of `StreamRequest`.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Sequence
from typing import TypeVar

from ts.protocol.frames import Buffer, Input
from ts_frontend.errors import Ending, ServeError
from ts_frontend.job import FedJob, Job
from ts_frontend.tasks import owned

Piece = TypeVar("Piece")


async def chunks(job: Job) -> AsyncGenerator[list[Buffer], None]:
    """Yields lists of the answer's pieces that are ready together; at least one list. Raises the ServeError that the
    job ended with.

    Each list taken gives the handler credit for more. Closing the generator early cancels the job.
    """
    sent_any = False
    try:
        while True:
            if job.waits:
                await job.more()
            ready = job.take()
            if not ready:
                break
            sent_any = True
            yield ready
            job.give_credit(ready)
        if not sent_any:
            yield [b""]
    finally:
        job.cancel()


async def resumed(first: list[Piece], rest: AsyncGenerator[list[Piece], None]) -> AsyncGenerator[list[Piece], None]:
    """Yields what `rest` does, after the list that was already taken from it, and closes it."""
    try:
        yield first
        async for pieces in rest:
            yield pieces
    finally:
        await rest.aclose()


log = logging.getLogger(__name__)

#: The largest number of unanswered requests of a stream that are read; the client's next ones wait in its connection.
REQUESTS_MAX = 64
#: The largest size of these requests in bytes: two of the largest requests that the default limits allow. A larger
#: request is read alone.
REQUEST_BYTES_MAX = 16 * 1024 * 1024
#: Bytes of a stream's answers that its client hasn't read.
READY_BYTES_MAX = 256 * 1024
#: The cost of an answer in addition to its bytes.
ANSWER_COST_BYTES = 128


class StreamRequest(ABC):
    """One request of a stream, in the terms of its protocol.

    `lane`: requests of one lane are answered in their order, different lanes concurrently; None for a lane of its own.
    `starts_in_turn`: its job starts when the previous request of the lane has been answered; otherwise at once, and
    only its answers wait.
    """

    lane: Hashable | None = None
    starts_in_turn: bool = False

    @abstractmethod
    def start(self) -> Job:
        """Submits the job; raises a ServeError, the request's failure. A FedJob that starts at once gets all later
        messages of the client, and the stream ends with it."""

    @abstractmethod
    def answers(self, job: Job, pieces: list[Buffer]) -> list[bytes]:
        """Returns the messages for these pieces of the answer."""

    @abstractmethod
    def failure(self, error: ServeError, started: bool) -> bytes | ServeError:
        """A message, after which the stream continues, or the error that ends it. `started`: there was a job."""

    def following(self, data: bytes) -> Sequence[Input]:
        """Returns a later message of the stream as inputs of this request's FedJob."""
        raise NotImplementedError

    def answered(self, job: Job) -> None:  # noqa: B027  # most protocols have nothing to add
        """Is called when the last piece of the answer has been queued for the client."""


class Multiplexer:
    """The requests of one stream. `accept` turns each message into a request; a ServeError that it raises ends the
    stream. `name`: the stream's name in the log and in messages to clients about faults of the server."""

    def __init__(self, name: str, accept: Callable[[bytes], StreamRequest]) -> None:
        self._name, self._accept = name, accept
        self._ahead = ReadAhead()
        self._ready = ReadyAnswers()
        self._lanes: dict[Hashable, deque[_Entry]] = {}
        self._running: dict[asyncio.Task[None], deque[_Entry]] = {}
        self._fed: tuple[StreamRequest, FedJob] | None = None
        self._closed = False  # it's over, even if the client sends more
        self._ending: Ending | None = None

    async def answers(self, messages: AsyncIterator[bytes]) -> AsyncGenerator[Sequence[bytes], None]:
        """Yields the answers to `messages`; answers that are ready together are in one list. Raises the ServeError
        that ends the stream, and any exception of `messages`. When it ends, is closed or cancelled, all jobs have
        ended."""
        reader = owned(self._read(messages))
        try:
            while (ready := await self._ready.get()) is not None:
                yield ready
            if self._ending is not None:
                raise self._ending.error()
            if not self._closed:
                await reader
        finally:
            reader.cancel()
            self._stop()
            try:
                await asyncio.wait({reader, *self._running})
            finally:
                if reader.done() and not reader.cancelled():
                    reader.exception()  # raised above, or of a stream that had ended before
                del reader  # the exception that it ended with may be on its way through this frame

    async def _read(self, messages: AsyncIterator[bytes]) -> None:
        try:
            async for data in messages:
                if self._fed is not None:
                    request, job = self._fed
                    await job.feed(request.following(data))
                else:
                    await self._ahead.enter(len(data))
                    if not self._closed:
                        self._take(data)
                del data  # the stream may rest
                if self._closed:
                    return
            if self._fed is not None:
                await self._fed[1].feed((), last=True)
            while self._running:
                await asyncio.wait(self._running)
        except BaseException:
            self._stop()
            raise
        finally:
            self._ready.end()

    def _take(self, data: bytes) -> None:
        request = self._accept(data)
        entry = _Entry(request, len(data))
        if not request.starts_in_turn:
            self._start(entry)
            if isinstance(entry.job, FedJob):
                self._fed = request, entry.job
        lane = self._lanes.get(request.lane) if request.lane is not None else None
        if lane is not None:
            lane.append(entry)
            return
        lane = deque((entry,))
        if request.lane is not None:
            self._lanes[request.lane] = lane
        task = owned(self._run(request.lane, lane))
        self._running[task] = lane
        task.add_done_callback(self._running.pop)

    def _start(self, entry: _Entry) -> None:
        try:
            entry.job = entry.request.start()
        except ServeError as error:
            entry.refusal = error.ending()
        except Exception as error:
            entry.refusal = self._unforeseen(error).ending()

    def _unforeseen(self, error: Exception) -> ServeError:
        log.error("A request of %s failed", self._name, exc_info=error)
        return ServeError(f"{self._name}: {type(error).__name__} in the server, see its log")

    async def _run(self, key: Hashable | None, lane: deque[_Entry]) -> None:
        try:
            while lane:
                await self._answer(lane[0])
                self._ahead.leave(lane.popleft().size_bytes)
        except Exception as error:
            self._close(self._unforeseen(error).ending())
        finally:
            if key is not None:
                del self._lanes[key]

    async def _answer(self, entry: _Entry) -> None:
        request = entry.request
        try:
            await self._drain(entry)
        except ServeError as error:
            await self._fail(request, error, entry.job is not None)
        except Exception as error:
            await self._fail(request, self._unforeseen(error), entry.job is not None)
        if self._fed is not None and self._fed[0] is request:
            self._close(None)

    async def _drain(self, entry: _Entry) -> None:
        request = entry.request
        if request.starts_in_turn:
            self._start(entry)
        if entry.refusal is not None:
            raise entry.refusal.error()
        job = entry.job
        assert job is not None
        coming = chunks(job)
        try:
            async for pieces in coming:
                answers = request.answers(job, pieces)
                if answers:
                    await self._ready.put(answers)
        finally:
            await coming.aclose()
            job.cancel()  # a job that was left before its first chunk
        request.answered(job)

    async def _fail(self, request: StreamRequest, error: ServeError, started: bool) -> None:
        answer = request.failure(error, started)
        if isinstance(answer, ServeError):
            self._close(answer.ending())
        else:
            await self._ready.put([answer])

    def _close(self, ending: Ending | None) -> None:
        """Ends the stream after the answers that are ready, with that error or successfully."""
        if not self._closed:
            self._closed, self._ending = True, ending
            self._stop()
            self._ready.end()

    def _stop(self) -> None:
        """Ends all jobs at once, and the tasks when they are next scheduled."""
        for task, lane in self._running.items():
            task.cancel()
            for entry in lane:
                if entry.job is not None:
                    entry.job.cancel()


class _Entry:
    """A request that has been read: its job, or the reason why it has none."""

    __slots__ = ("job", "refusal", "request", "size_bytes")

    def __init__(self, request: StreamRequest, size_bytes: int) -> None:
        self.request, self.size_bytes = request, size_bytes
        self.job: Job | None = None
        self.refusal: Ending | None = None


class ReadAhead:
    """The requests of one stream that have been read and not answered. One reader waits until there may be more."""

    def __init__(self, requests_max: int = REQUESTS_MAX, bytes_max: int = REQUEST_BYTES_MAX) -> None:
        self._requests_max, self._bytes_max = requests_max, bytes_max
        self._requests = self._bytes = 0
        self._changed: asyncio.Future[None] | None = None

    async def enter(self, size_bytes: int) -> None:
        """Waits until the limits allow a request of this size (bytes), and counts it."""
        while self._requests and (self._requests >= self._requests_max or self._bytes + size_bytes > self._bytes_max):
            self._changed = asyncio.get_running_loop().create_future()
            await self._changed
        self._requests += 1
        self._bytes += size_bytes

    def leave(self, size_bytes: int) -> None:
        self._requests -= 1
        self._bytes -= size_bytes
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)


class ReadyAnswers:
    """A queue of groups of answers. A group of any size is accepted while fewer than READY_BYTES_MAX bytes wait."""

    def __init__(self) -> None:
        self._groups: asyncio.Queue[list[bytes] | None] = asyncio.Queue()
        self._waiting_bytes = 0
        self._space = asyncio.Event()

    async def put(self, answers: list[bytes]) -> None:
        while self._waiting_bytes >= READY_BYTES_MAX:
            self._space.clear()
            await self._space.wait()
        self._waiting_bytes += _cost_bytes(answers)
        self._groups.put_nowait(answers)

    def end(self) -> None:
        """Marks the end: nothing is added after it."""
        self._groups.put_nowait(None)

    async def get(self) -> list[bytes] | None:
        """Returns all answers that are ready, at least one group; None at the end."""
        group = self._taken(await self._groups.get())
        if group is None or self._groups.empty():
            return group
        answers = list(group)
        while not self._groups.empty():
            group = self._taken(self._groups.get_nowait())
            if group is None:
                self.end()
                break
            answers += group
        return answers

    def _taken(self, answers: list[bytes] | None) -> list[bytes] | None:
        if answers is not None:
            self._waiting_bytes -= _cost_bytes(answers)
            self._space.set()
        return answers


def _cost_bytes(answers: list[bytes]) -> int:
    return sum(map(len, answers)) + ANSWER_COST_BYTES * len(answers)
