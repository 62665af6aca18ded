"""Job: one request between a listener and a worker, with its id, and the ledger of all jobs of a model.

An accepted request has exactly one final status. Every end (answer, failure, cancellation, expiry, death of the worker)
is a transition of one table; an ended job ignores what arrives later. The transitions also update the gauges (queued,
running), so that these always return to 0.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import struct
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, NamedTuple, Protocol, TypeAlias

from ts.protocol.frames import (
    CHUNK_COST_BYTES,
    FEED_BYTES,
    FEED_COST_BYTES,
    Buffer,
    Chunk,
    Failed,
    Feed,
    Input,
    Item,
    PackedPairs,
    Pairs,
    Pieces,
    Times,
    packed,
    packed_headers,
    size_of,
)
from ts_frontend.errors import Cancelled, Ending, HandlerFailed, InvalidArgument, MessageTooLarge, ServeError

CREDIT_GRANT_BYTES: Final = 65_536

#: The header, and the metadata, for the phrase of the status that a handler set.
PHRASE_KEY: Final = "ts-response-phrase"


class JobState(Enum):
    """The state of a job. QUEUED waits for a worker, SENT is on a worker (running, or read ahead)."""

    NEW = "new"
    QUEUED = "queued"
    SENT = "sent"
    ANSWERED = "answered"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    __hash__ = object.__hash__  # Enum's own hash is Python code, and each request uses it a dozen times


NEXT: Final[dict[JobState, frozenset[JobState]]] = {
    JobState.NEW: frozenset({JobState.QUEUED, JobState.FAILED}),
    JobState.QUEUED: frozenset({JobState.SENT, JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED}),
    JobState.SENT: frozenset(
        {JobState.QUEUED, JobState.ANSWERED, JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED}
    ),
    JobState.ANSWERED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
    JobState.EXPIRED: frozenset(),
}
FINAL: Final = frozenset(state for state, following in NEXT.items() if not following)
_NEW: Final = JobState.NEW
_QUEUED: Final = JobState.QUEUED
_SENT: Final = JobState.SENT
_ANSWERED: Final = JobState.ANSWERED


class IllegalTransition(Exception):
    """A transition that the table doesn't have: a bug in the server."""


class Owner(Protocol):
    """The holder of a job: its queue or its worker."""

    def release(self, job: Job) -> None:
        """Drops the job, or cancels it on the worker: its caller has left."""

    def grant(self, job: Job, size_bytes: int) -> None:
        """Lets the handler send `size_bytes` more, after the stream's reader has taken as many."""

    def feed(self, job: Job, feed: Feed) -> None:
        """Sends a further input of a job that runs."""

    def measure(self, job: Job) -> Whereabouts:
        """Starts the timing of a job that is about to be sent; returns its batch and worker."""


class Whereabouts(NamedTuple):
    """The batch and worker of a job. `ready_at_s`: the time when the worker had its model, `free_since_s`: the
    time since which it was idle, None if it wasn't (`time.monotonic()` seconds)."""

    worker_id: int
    batch_size: int
    ready_at_s: float
    free_since_s: float | None


class Timing(Protocol):
    """Times one job (`ts_frontend.telemetry.timing`)."""

    def sent(self, job: Job, place: Whereabouts) -> None:
        """The job goes to a worker."""

    def measured(self, times: Times, now_s: float) -> None:
        """The worker's times have arrived."""


#: Measures an answer: when its job was queued and sent, and now (`time.monotonic()` seconds).
Recorder: TypeAlias = "Callable[[float, float, float], None]"


class Ledger:
    """All jobs of one model, counted by state, and the times of its inferences.

    Sums in seconds: `answered_s` and `failed_s` from queueing to the end, `queued_s` of the answered ones until
    they were sent. `last_s`: the time of the last answer (`time.monotonic()`).
    """

    def __init__(self) -> None:
        self.counts = dict.fromkeys(JobState, 0)
        self.answered = self.failed = 0
        self.answered_s = self.failed_s = self.queued_s = self.last_s = 0.0
        self.live: dict[int, Job] = {}
        #: Get each job that has left NEW, and each that has ended.
        self.on_entered: Callable[[Job], None] | None = None
        self.on_left: Callable[[Job], None] | None = None
        #: Gets each answered inference and its time (`time.monotonic()`).
        self.on_answered: Callable[[Job, float], None] | None = None
        self._emptied: list[Callable[[], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def future(self) -> asyncio.Future[None]:
        """A future of the loop all jobs live in; asking for the running loop each time costs a system call."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop.create_future()

    @property
    def queued(self) -> int:
        return self.counts[JobState.QUEUED]

    @property
    def sent(self) -> int:
        return self.counts[JobState.SENT]

    def when_empty(self, call: Callable[[], None]) -> None:
        """Calls `call` once when no job is alive, at once if none is."""
        if self.live:
            self._emptied.append(call)
        else:
            call()

    # --- calls from its jobs, once they are in their new state

    def entered(self, job: Job) -> None:
        """A job has left NEW."""
        if self.on_entered is not None:
            self.on_entered(job)
        self.live[job.id] = job

    def moved(self, job: Job, old: JobState) -> None:
        """A job has moved from `old` to its present state."""
        counts, new = self.counts, job.state
        if old is _NEW:
            self.entered(job)
        else:
            counts[old] -= 1
        counts[new] += 1
        if new is _ANSWERED:
            self.left(job, time.monotonic())
        elif new in FINAL:
            if job.recorder is not None:
                self.failed += 1
                self.failed_s += time.monotonic() - job.queued_at_s if old is not _NEW else 0.0
            self.left(job, 0.0)

    def left(self, job: Job, answered_s: float) -> None:
        """A job has ended. `answered_s`: the time of its answer (`time.monotonic()`), 0 without one."""
        if self.on_left is not None:
            self.on_left(job)
        self.live.pop(job.id, None)
        recorder = job.recorder
        if answered_s and recorder is not None:
            queued_at_s, sent_at_s = job.queued_at_s, job.sent_at_s
            self.answered += 1
            self.answered_s += answered_s - queued_at_s
            self.queued_s += sent_at_s - queued_at_s
            self.last_s = answered_s
            recorder(queued_at_s, sent_at_s, answered_s)
            if self.on_answered is not None:
                self.on_answered(job, answered_s)
        if self._emptied and not self.live:
            calls, self._emptied = self._emptied, []
            for call in calls:
                call()


class RequestIds:
    """Ids in the form of a UUID, unique across processes: a random prefix and a counter.

    0.3 us each, where `uuid.uuid4` takes 3 us.
    """

    def __init__(self) -> None:
        self._beginning = str(uuid.uuid4())[:24]
        self._count = itertools.count().__next__

    def next(self) -> str:
        # Compiled, a formatted string takes three times as long.
        return self._beginning + self._count().to_bytes(6, "big").hex()


def shared_headers(pairs: Pairs) -> Pairs:
    """Headers that many requests have for their handlers, packed once."""
    return PackedPairs(packed(pairs))


def handlers_headers(headers: Sequence[tuple[bytes, bytes]], more: Pairs = ()) -> Pairs:
    """The headers of an HTTP request for its handler, and `more` after them: they stay bytes until they are read.
    Raises InvalidArgument for texts that can't be passed on."""
    try:
        return PackedPairs(packed_headers(headers) + packed(more))
    except (ValueError, struct.error) as error:
        raise InvalidArgument(f"The request can't be passed to a worker: {error}") from None


_ids: Final = itertools.count(1).__next__


#: The header with the ms for which the request waited for the model's load.
COLD_HEADER: Final = "x-cold-start-ms"


class Job:
    """One request. Its caller awaits `result()` or `pieces()`, or reads it by `scheduling.pieces`; its worker calls
    `deliver` and `fail`. It expires if it hasn't begun by `deadline_s` or isn't answered by `ends_s`
    (`time.monotonic()` seconds)."""

    #: The sequence it belongs to, "" for none.
    sequence_id: str = ""

    __slots__ = (
        "_chunks",
        "_ending",
        "_taken",
        "_ungranted",
        "_unread_s",
        "_waiter",
        "alone",
        "deadline_s",
        "deaths",
        "ends_s",
        "headers",
        "id",
        "inputs",
        "ledger",
        "owner",
        "phrase",
        "queued_at_s",
        "received_bytes",
        "recorder",
        "request_headers",
        "request_id",
        "response_bytes_max",
        "sent_at_s",
        "size_bytes",
        "state",
        "status",
        "stream",
        "timing",
        "told",
    )

    def __init__(
        self,
        ledger: Ledger,
        inputs: Sequence[Input],
        request_id: str,
        headers: Pairs = (),
        deadline_s: float = math.inf,
        ends_s: float = math.inf,
        stream: bool = False,
        alone: bool = False,
        response_bytes_max: int = 1 << 62,
        recorder: Recorder | None = None,
        timing: Timing | None = None,
    ) -> None:
        self.id = _ids()
        self.ledger = ledger
        self.inputs = inputs
        self.request_id = request_id
        self.request_headers = headers
        self.deadline_s = deadline_s
        self.ends_s = ends_s
        self.stream = stream
        self.alone = alone
        self.response_bytes_max = response_bytes_max
        self.recorder = recorder
        self.timing = timing
        self.size_bytes = size_of(inputs)
        self.state = JobState.NEW
        self.owner: Owner | None = None
        self.queued_at_s = self.sent_at_s = 0.0
        #: The workers that died when it was the next request that they would begin.
        self.deaths = 0
        #: Headers of the answer that the server adds to the handler's.
        self.told: Pairs = ()
        self.status = 200
        self.phrase = ""
        self.headers: Pairs = ()
        self.received_bytes = 0
        self._chunks: list[Buffer] = []
        self._ending: Ending | None = None
        self._taken: Buffer | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._ungranted = 0
        self._unread_s = math.inf

    def item(self) -> Item:
        return Item(self.id, self.request_id, self.deadline_s, self.request_headers, self.inputs)

    @property
    def done(self) -> bool:
        return self.state in FINAL

    @property
    def failure(self) -> Ending | None:
        """The error that it ended with, None for an answer."""
        return self._ending

    @property
    def untaken(self) -> Sequence[Buffer] | None:
        """All pieces of its answer so far; None once its reader has taken some."""
        return self._chunks if sum(map(len, self._chunks)) == self.received_bytes else None

    @property
    def at_hand(self) -> Sequence[Buffer]:
        """The pieces of its answer that its reader hasn't taken yet, after the last one that it has."""
        return self._chunks if self._taken is None else [self._taken, *self._chunks]

    def tell_cold(self, seconds: float) -> None:
        """Tells the client that its request waited so long for its model's load on demand."""
        self.told = (*self.told, (COLD_HEADER, str(math.ceil(seconds * 1000))))

    # --- transitions: those of every request have a method each, equivalent to `move`

    def move(self, state: JobState) -> None:
        """Moves to any state that the table allows; raises IllegalTransition for others."""
        old = self.state
        if state not in NEXT[old]:
            raise IllegalTransition(f"job {self.id}: {old.value} -> {state.value}")
        self.state = state
        self.ledger.moved(self, old)
        if state in FINAL:
            self.owner = None
            self._wake()

    def enqueue(self, owner: Owner) -> None:
        """To QUEUED: it waits in `owner`."""
        if self.state is _NEW:
            self.state = _QUEUED
            ledger = self.ledger
            ledger.entered(self)
            ledger.counts[_QUEUED] += 1
        else:
            self.move(_QUEUED)
        self.owner = owner

    def send(self, owner: Owner | None, now_s: float) -> None:
        """To SENT: `owner` runs it, from `now_s` on."""
        if self.state is not _QUEUED:
            raise IllegalTransition(f"job {self.id}: {self.state.value} -> sent")
        self.state = _SENT
        self.owner, self.sent_at_s = owner, now_s
        if self.timing is not None and owner is not None:
            self.timing.sent(self, owner.measure(self))
        counts = self.ledger.counts
        counts[_QUEUED] -= 1
        counts[_SENT] += 1

    def answer(self, now_s: float) -> None:
        if self.state is not _SENT:
            raise IllegalTransition(f"job {self.id}: {self.state.value} -> answered")
        self.state = _ANSWERED
        self.owner = None
        ledger = self.ledger
        counts = ledger.counts
        counts[_SENT] -= 1
        counts[_ANSWERED] += 1
        ledger.left(self, now_s)
        self._wake()

    def deliver(self, chunk: Chunk, now_s: float | None = None) -> None:
        """A piece of the answer has come from the worker, at `now_s` (`time.monotonic()` seconds; None: now)."""
        if self.state is not _SENT:
            return
        now_s = time.monotonic() if now_s is None else now_s
        _, data, last, status, phrase, headers = chunk
        if not self.received_bytes and not self._chunks:
            if phrase:  # HTTP/2 and gRPC have no other place for it
                headers = (*headers, (PHRASE_KEY, phrase))
            self.status, self.phrase, self.headers = (status, phrase, (*headers, *self.told) if self.told else headers)
        size = len(data)
        self.received_bytes += size
        if not self.stream and self.received_bytes > self.response_bytes_max:
            self._refuse_response()
            return
        if size or not last:
            self._chunks.append(data)
        if last:
            self.answer(now_s)
        else:
            self._more_came(size + CHUNK_COST_BYTES, now_s)

    def deliver_pieces(self, pieces: Pieces, now_s: float) -> None:
        """`deliver` of each of these pieces, at once."""
        if self.state is not _SENT:
            return
        _, data, last = pieces
        if not self.received_bytes and not self._chunks:
            self.status, self.phrase, self.headers = 200, "", self.told
        size = sum(map(len, data))
        self.received_bytes += size
        if not self.stream and self.received_bytes > self.response_bytes_max:
            self._refuse_response()
            return
        self._chunks += data
        if not last:
            self._more_came(size + CHUNK_COST_BYTES * len(data), now_s)
            return
        if not len(self._chunks[-1]):
            self._chunks.pop()
        self.answer(now_s)

    def _more_came(self, cost_bytes: int, now_s: float) -> None:
        """Pieces have come, and the answer goes on."""
        if self.stream:
            if self._waiter is None and self._unread_s == math.inf:
                self._unread_s = now_s
            self._wake()
        elif self.owner is not None:
            self.owner.grant(self, cost_bytes)

    def _refuse_response(self) -> None:
        owner = self.owner
        limit = self.response_bytes_max
        self._chunks = []
        self.fail(
            MessageTooLarge(
                f"Response of at least {self.received_bytes} bytes is over max_response_size of {limit} bytes"
            )
        )
        if owner is not None:
            owner.release(self)

    def fail(self, error: ServeError, state: JobState = JobState.FAILED) -> None:
        """Ends the job without an answer; an ended job stays as it ended. `error` itself isn't kept."""
        if self.state in FINAL:
            return
        self._ending = error.ending()
        self.move(state)

    def failed_by_worker(self, failed: Failed) -> None:
        self.fail(HandlerFailed(failed.code, failed.message, failed.traceback, by_handler=failed.by_handler))

    def cancel(self) -> None:
        """The caller has gone; the queue forgets the job, or its worker gets a cancel."""
        if self.state in FINAL:
            return
        owner = self.owner
        self.fail(Cancelled("Request was cancelled by its caller"), JobState.CANCELLED)
        if owner is not None:
            owner.release(self)

    def expire(self, error: ServeError) -> None:
        self.fail(error, JobState.EXPIRED)

    def unread_since(self, now_s: float) -> float:
        """Seconds for which pieces have waited for the reader, or it has been busy; -inf if it waits for more."""
        return now_s - self._unread_s

    def client_wait_s(self, now_s: float) -> float:
        """Seconds for which it has been waiting for its client; negative if it waits for its handler."""
        return now_s - self._unread_s

    def allow(self, size_bytes: int) -> None:
        """The handler accepts `size_bytes` more of further inputs (only for a `FedJob`)."""

    @property
    def repeatable(self) -> bool:
        """Whether it can run again: its caller has got no part of an answer."""
        return not self.received_bytes

    # --- the caller's side

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    async def _wait(self) -> None:
        waiter = self._waiter = self.ledger.future()
        try:
            await waiter
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def result(self) -> Buffer:
        """The whole answer, its pieces joined; raises the ServeError it ended with."""
        if self.state not in FINAL:  # as `_wait`, without its coroutine
            waiter = self._waiter = self.ledger.future()
            try:
                await waiter
            except asyncio.CancelledError:
                self.cancel()
                raise
        if self._ending is not None:
            raise self._ending.error()
        chunks = self._chunks
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def pieces(self) -> list[Buffer]:
        """The whole answer in the handler's pieces, without empty ones, of no stream's job; raises as `result`."""
        if self.state not in FINAL:
            await self._wait()
        if self._ending is not None:
            raise self._ending.error()
        chunks = self._chunks
        return chunks if len(chunks) == 1 and len(chunks[0]) else [piece for piece in chunks if len(piece)]

    async def whole(self) -> list[Buffer] | None:
        """All pieces of the answer if it has ended when its first piece arrives; None if more will come, which
        `scheduling.pieces.chunks` yields. Raises the job's ServeError, also after some pieces."""
        if not self._chunks and self.state not in FINAL:
            await self._wait()
        if self.state not in FINAL:
            return None
        if self._ending is not None:
            raise self._ending.error()
        return self._chunks

    @property
    def waits(self) -> bool:
        """Whether its reader has to wait for the next pieces, or for the end."""
        return not self._chunks and self.state not in FINAL

    async def more(self) -> None:
        self._unread_s = math.inf
        await self._wait()

    def take(self) -> list[Buffer]:
        """The ready pieces, for the reader; empty after the end, unless the job failed: raises its ServeError."""
        ready, self._chunks = self._chunks, []
        if ready:
            self._taken = ready[-1]
            self._unread_s = time.monotonic()
        elif self._ending is not None:
            raise self._ending.error()
        return ready

    def give_credit(self, taken: list[Buffer]) -> None:
        """The reader has had these pieces: the handler may send more."""
        self._ungranted += sum(map(len, taken)) + CHUNK_COST_BYTES * len(taken)
        if self._ungranted >= CREDIT_GRANT_BYTES and self.owner is not None and self.state is JobState.SENT:
            self.owner.grant(self, self._ungranted)
            self._ungranted = 0


#: The most bytes of inputs that wait for the handler; a caller with more waits.
WAITING_BYTES_MAX: Final = 256 * 1024


class FedJob(Job):
    """A job with further inputs, which wait until its worker has room for them: the handler takes them one after
    another. It is repeatable only until a worker got a further input."""

    __slots__ = ("_allowed_bytes", "_closed", "_fed", "_idle_s", "_space", "_waiting", "_waiting_bytes")

    def __init__(
        self,
        ledger: Ledger,
        inputs: Sequence[Input],
        request_id: str,
        headers: Pairs = (),
        deadline_s: float = math.inf,
        ends_s: float = math.inf,
        stream: bool = False,
        alone: bool = False,
        response_bytes_max: int = 1 << 62,
        recorder: Recorder | None = None,
        timing: Timing | None = None,
    ) -> None:
        super().__init__(
            ledger, inputs, request_id, headers, deadline_s, ends_s, stream, alone, response_bytes_max, recorder, timing
        )
        self._waiting: deque[Feed] = deque()
        self._waiting_bytes = self._allowed_bytes = 0
        self._space: asyncio.Future[None] | None = None
        self._closed = self._fed = False
        self._idle_s = math.inf

    async def feed(self, inputs: Sequence[Input], last: bool = False) -> None:
        """Adds inputs; waits while too many bytes are waiting. Inputs after the job's end are dropped."""
        while self._waiting_bytes >= WAITING_BYTES_MAX and not self.done:
            self._space = self.ledger.future()
            await self._space
        if not self.done:
            feed = Feed(self.id, inputs, last)
            self._closed |= last
            self._waiting.append(feed)
            self._waiting_bytes += _cost(feed)
            self._send()

    def allow(self, size_bytes: int) -> None:
        self._allowed_bytes += size_bytes
        self._send()

    def _send(self) -> None:
        while self._waiting and self._allowed_bytes > 0 and self.state is JobState.SENT and self.owner is not None:
            feed = self._waiting.popleft()
            self._waiting_bytes -= _cost(feed)
            self._allowed_bytes -= _cost(feed)
            self._fed = True
            self.owner.feed(self, feed)
        # Once the worker has given back all it was allowed, its handler waits for the next.
        idle = self._allowed_bytes >= FEED_BYTES and not self._closed
        self._idle_s = time.monotonic() if idle else math.inf
        if self._waiting_bytes < WAITING_BYTES_MAX:
            self._make_space()

    def _make_space(self) -> None:
        space, self._space = self._space, None
        if space is not None and not space.done():
            space.set_result(None)

    def move(self, state: JobState) -> None:
        super().move(state)
        if state is JobState.QUEUED:
            self._allowed_bytes = 0  # the next worker grants its own
            self._idle_s = math.inf
        elif self.done:
            self._drop_waiting()

    def answer(self, now_s: float) -> None:
        super().answer(now_s)
        self._drop_waiting()

    def _drop_waiting(self) -> None:
        self._waiting.clear()
        self._make_space()

    def client_wait_s(self, now_s: float) -> float:
        return max(super().client_wait_s(now_s), now_s - self._idle_s)

    @property
    def repeatable(self) -> bool:
        return super().repeatable and not self._fed


def _cost(feed: Feed) -> int:
    return FEED_COST_BYTES + size_of(feed.inputs)
