"""Calls that a model makes to its own server: to other models, or about the served models. Adapters give them the names
and results of their systems.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from typing import Any, ClassVar, NamedTuple

from ts.context import Context
from ts.protocol import frames
from ts.protocol.frames import CALL_BYTES, CALL_COST_BYTES, CALL_ID_MIN, Buffer, Cancel, Chunk, Credit, Failed
from ts.runtime.jobs import Failure
from ts.runtime.worker import Link

#: The size of the steps in which taken bytes are reported to the frontend.
GRANT_BYTES = CALL_BYTES // 4
#: The most calls with one answer that a batch may have in flight; others wait.
SIDE_BY_SIDE_MAX = 64


class NestedCallFailed(Exception):
    """The call failed. `code`: HTTP status."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.code, self.message = failure.code, failure.message


class ServerCall:
    """One call, with an answer in pieces. It can be used from any thread or loop."""

    def __init__(self, calls: Calls, call_id: int) -> None:
        self._calls, self.id = calls, call_id
        self._pieces: deque[Buffer] = deque()
        self._failure: Failure | None = None
        self._over = self._cancelled = False
        self._taken_bytes = 0
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def _ready(self) -> bool:
        return self._over or bool(self._pieces)

    def next(self) -> Buffer | None:
        """Waits for the next piece; None after the last. Raises NestedCallFailed."""
        self._calls.link.wait_until(self._ready)
        return self._take()

    async def anext(self) -> Buffer | None:
        with self._calls.link.ledger.lock:
            waiter = None
            if not self._ready():
                loop = asyncio.get_running_loop()
                waiter = loop.create_future()
                self._waiters.append((loop, waiter))
        if waiter is not None:
            await waiter
        return self._take()

    def _take(self) -> Buffer | None:
        with self._calls.link.ledger.lock:
            if self._pieces:
                piece = self._pieces.popleft()
                self._taken_bytes += len(piece) + CALL_COST_BYTES
                asks = self._taken_bytes >= GRANT_BYTES and not self._over
            elif self._failure is not None:
                raise NestedCallFailed(self._failure)
            else:
                return None
        if asks:
            size_bytes, self._taken_bytes = self._taken_bytes, 0
            self._calls.send(Credit(self.id, size_bytes))
        return piece

    def cancel(self) -> None:
        """Cancels the call. It fails unless its answer was complete."""
        if not self._over and not self._cancelled:
            self._cancelled = True
            self._calls.send(Cancel(self.id))

    def abandon(self) -> None:
        """Schedules `cancel`, for finalizers, which may run while the ledger is locked."""
        if not self._over:
            self._calls.abandoned.append(self)

    def put(self, message: Chunk | Failed) -> None:
        """From the frontend; the ledger is locked."""
        if isinstance(message, Failed):
            self._failure = Failure(message.code, message.message)
        elif len(message.data) or not message.last:
            self._pieces.append(message.data)
        self._over = isinstance(message, Failed) or message.last
        waiters, self._waiters = self._waiters, []
        for loop, waiter in waiters:
            with contextlib.suppress(RuntimeError):  # a loop of the model's own that it has closed
                loop.call_soon_threadsafe(_wake, waiter)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Calls:
    """All calls of one worker, of at most `bytes_max` each. `batch_id`: the batch being handled, if only one is."""

    #: The calls of the process, for threads that aren't bound to one themselves.
    latest: ClassVar[Calls | None] = None

    def __init__(self, link: Link, bytes_max: int) -> None:
        self.link = link
        self._bytes_max = bytes_max
        self.batch_id: int | None = None
        self.abandoned: deque[ServerCall] = deque()
        self._open: dict[int, ServerCall] = {}
        self._ids = itertools.count(CALL_ID_MIN)
        link.ledger.on_answer = self._answered
        _HERE.set(self)
        Calls.latest = self

    def begin(self, what: dict[str, Any], data: Buffer = b"") -> ServerCall:
        """Begins a call to the server. It is cancelled when no caller waits for its batch any more."""
        self.sweep()
        batch_id = _PLACE.get().batch_id
        message = frames.Call(next(self._ids), {**what, "batch": self.batch_id if batch_id is None else batch_id}, data)
        call = ServerCall(self, message.call_id)
        if len(data) > self._bytes_max:
            call.put(
                Failed(call.id, 413, f"The call of {len(data)} bytes is over max_request_size of {self._bytes_max}")
            )
            return call
        with self.link.ledger.lock:
            self.link.ledger.outbox.push(message)
            self._open[message.call_id] = call
        self.link.flush()
        return call

    def send(self, message: frames.Message) -> None:
        with self.link.ledger.lock:
            self.link.ledger.outbox.push(message)
        self.link.flush()

    def _answered(self, message: Chunk | Failed) -> None:
        ledger = self.link.ledger
        with ledger.lock:
            ended = isinstance(message, Failed) or message.last
            call = self._open.pop(message.job_id, None) if ended else self._open.get(message.job_id)
            if call is not None:
                call.put(message)
            ledger.changed.notify_all()

    def sweep(self) -> None:
        """Cancels the calls whose answers can no longer be taken."""
        while self.abandoned:
            self.abandoned.popleft().cancel()


class _Place(NamedTuple):
    """The batch of a task. `turns`: the number of further concurrent calls that it may begin."""

    batch_id: int | None
    turns: asyncio.Semaphore | None


_HERE: ContextVar[Calls | None] = ContextVar("here", default=None)
_PLACE: ContextVar[_Place] = ContextVar("place", default=_Place(None, None))  # noqa: B039 (immutable)


class NoServer(RuntimeError):
    """The process has no server to call."""


def here() -> Calls:
    """The calls of this worker. Raises NoServer outside of a worker."""
    found = _HERE.get() or Calls.latest
    if found is None:
        raise NoServer("there is no server to ask: this is no worker of one")
    return found


def batch_of(context: Context) -> int | None:
    """The id of the batch that the context is set to; None outside of one."""
    running: Any = getattr(context, "_batch", None)
    return None if running is None else running.batch.batch_id


def current_batch() -> int | None:
    return _PLACE.get().batch_id


def belong_to(batch_id: int | None, *, coroutines: bool = True) -> None:
    """Assigns further calls of this thread or task, and of its tasks, to that batch. `coroutines`: a loop's task."""
    _PLACE.set(_Place(batch_id, asyncio.Semaphore(SIDE_BY_SIDE_MAX) if coroutines else None))


def turn() -> AbstractAsyncContextManager[Any]:
    """Held by a coroutine during a call: a batch has at most SIDE_BY_SIDE_MAX calls at a time."""
    return _PLACE.get().turns or contextlib.nullcontext()
