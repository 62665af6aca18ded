"""Calls of a running handler to the server, mostly to other models. Each call is a task here, and its answer is sent
over the worker's connection as fast as the handler reads it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, NamedTuple, TypeAlias

from ts.protocol.frames import CALL_BYTES, CALL_COST_BYTES, Buffer, Call, Chunk, Credit, Failed, Message, Pairs
from ts_frontend.errors import QueueFull, ServeError
from ts_frontend.tasks import owned
from ts_frontend.workers.in_flight import Batch

log = logging.getLogger(__name__)

#: Calls of one worker at a time.
CALLS_MAX = 1024
#: The number of remembered cancels whose call hasn't arrived yet: a cancel overtakes large messages.
EARLY_MAX = 1024
CANCELLED = "The call was cancelled"
CALLER_LEFT = "The call was cancelled: nobody waits for the request that it was made for"


class Caller(NamedTuple):
    """The calling model and its request. `deadline_s`: the time after which no client waits for the answer
    (`time.monotonic()` seconds); `limit_s`: the most seconds until the answer or its next piece; `request_id` and
    `headers`: of the request, if it is known."""

    model: str
    deadline_s: float
    limit_s: float
    request_id: str = ""
    headers: Pairs = ()


#: Answers a call: (operation and its arguments, data, caller) to the pieces of the answer; True marks the last one.
#: Raises ServeError.
Answer: TypeAlias = Callable[[Mapping[str, Any], Buffer, Caller], AsyncGenerator[tuple[Buffer, bool], None]]


class _Open:
    """A call without a complete answer. `credit_bytes`: the bytes that the worker still accepts."""

    __slots__ = ("batch", "credit_bytes", "reason", "space", "task")

    def __init__(self, batch: Batch | None) -> None:
        self.batch = batch
        self.credit_bytes = CALL_BYTES
        self.reason = CANCELLED
        self.space = asyncio.Event()
        self.task: asyncio.Task[Chunk | Failed] | None = None

    async def wait_for_credit(self) -> None:
        while self.credit_bytes <= 0:
            self.space.clear()
            await self.space.wait()

    def cancel(self, reason: str) -> None:
        self.reason = reason
        if self.task is not None:
            self.task.cancel()


class HandlerCalls:
    """The open calls of one worker's handler. `push` sends to the worker, `alive` gets the batch of a call that
    progresses, `limit_s` is the most seconds until an answer or its next piece."""

    def __init__(
        self,
        answer: Answer,
        model: str,
        push: Callable[[Message], None],
        alive: Callable[[Batch], None],
        limit_s: float,
    ) -> None:
        self._answer_to, self._model, self._limit_s = answer, model, limit_s
        self._push, self._alive = push, alive
        self._open: dict[int, _Open] = {}
        self._early: dict[int, None] = {}

    def begin(self, call: Call, batch: Batch | None) -> None:
        """Begins a call. `batch`: the one that the model computes, if known; without waiting clients the call ends."""
        if call.call_id in self._early:
            del self._early[call.call_id]
            self._push(Failed(call.call_id, 499, CANCELLED))
        elif len(self._open) >= CALLS_MAX:
            full = QueueFull(f"{CALLS_MAX} calls of one worker of model {self._model} are on their way already")
            self._push(Failed(call.call_id, full.http_status, full.message))
        else:
            entry = self._open[call.call_id] = _Open(batch)
            task = entry.task = owned(self._run(call, entry))
            task.add_done_callback(lambda done: self._ended(call.call_id, entry, done))
            self._sign(entry)

    def grant(self, credit: Credit) -> None:
        entry = self._open.get(credit.job_id)
        if entry is not None:
            entry.credit_bytes += credit.size_bytes
            entry.space.set()

    def cancel(self, call_id: int) -> None:
        entry = self._open.get(call_id)
        if entry is not None:
            entry.cancel(CANCELLED)
            return
        self._early[call_id] = None
        if len(self._early) > EARLY_MAX:
            del self._early[next(iter(self._early))]

    def release(self, batch: Batch) -> None:
        """Cancels the calls made for this batch if no client waits for its answers any more."""
        if all(job.done for job in batch.jobs):
            for entry in self._open.values():
                if entry.batch is batch:
                    entry.cancel(CALLER_LEFT)

    def close(self) -> None:
        for entry in self._open.values():
            entry.cancel(CANCELLED)

    # --- one call

    async def _run(self, call: Call, entry: _Open) -> Chunk | Failed:
        """Runs a call and returns its end, after all pieces of its answer but the last are sent."""
        try:
            return await self._answer(call, entry)
        except ServeError as error:
            return Failed(call.call_id, error.http_status, error.message)
        except Exception as error:
            log.exception("A call of model %s could not be answered", self._model)
            return Failed(call.call_id, 500, f"{type(error).__name__}: {error}")

    def _ended(self, call_id: int, entry: _Open, task: asyncio.Task[Chunk | Failed]) -> None:
        """Sends the end of a call, also if its task was cancelled before it ran. Removes the task from `entry`,
        because the task's exception refers to its frames and thus to `entry`."""
        del self._open[call_id]
        entry.task = None
        self._push(Failed(call_id, 499, entry.reason) if task.cancelled() else task.result())
        self._sign(entry)

    async def _answer(self, call: Call, entry: _Open) -> Chunk:
        """Sends all pieces but the last. Raises ServeError."""
        async with aclosing(self._answer_to(call.what, call.data, self._caller(entry.batch))) as pieces:
            async for data, last in pieces:
                await entry.wait_for_credit()
                if last:
                    return Chunk(call.call_id, data)
                entry.credit_bytes -= len(data) + CALL_COST_BYTES
                self._push(Chunk(call.call_id, data, last=False))
                self._sign(entry)
        return Chunk(call.call_id, b"")

    def _caller(self, batch: Batch | None) -> Caller:
        if batch is None:
            return Caller(self._model, math.inf, self._limit_s)
        first = batch.jobs[0]
        deadline_s = max(job.deadline_s for job in batch.jobs)
        return Caller(self._model, deadline_s, self._limit_s, first.request_id, first.request_headers)

    def _sign(self, entry: _Open) -> None:
        if entry.batch is not None:
            self._alive(entry.batch)
