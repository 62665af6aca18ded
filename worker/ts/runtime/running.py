"""One batch inside the handler: what its context can see and send, and how its result becomes answers."""

from __future__ import annotations

import math
from asyncio import CancelledError
from collections.abc import Sequence
from typing import Any, NamedTuple

from ts.context import Context, RequestCancelled
from ts.protocol.decoder import decode_bytes
from ts.protocol.frames import Chunk, Failed
from ts.runtime import replies, requests
from ts.runtime.jobs import Batch, Ledger
from ts.runtime.replies import PREDICTION_FAILED, Failure, Outcome, outcome, outcomes, raised
from ts.runtime.worker import Link

HELD_BYTES_MAX = 64 * 1024 * 1024


class Refused(NamedTuple):
    """As an element of what a generator yields: a failure among the answers, after which the request goes on."""

    error: Exception


class Ended(NamedTuple):
    """As an element of what a generator yields: this request ends, with `value` as its last piece (None: without)."""

    value: Any


class Running:
    """Implements `ts.context.RunningBatch`."""

    __slots__ = ("batch", "context", "jobs", "ledger", "link", "waiter")

    def __init__(self, batch: Batch, context: Context, link: Link) -> None:
        self.batch, self.context, self.link = batch, context, link
        self.ledger: Ledger = link.ledger
        self.jobs = batch.jobs
        self.waiter: Any = None

    def rows(self, decode: bool) -> list[Any]:
        """What the handler gets as data; turns the context to this batch. Empty when no request could be read."""
        inputs, headers = [], []
        for job in self.jobs:
            item, job.item = job.item, None
            if item is not None:
                fields = requests.fields(item)
                inputs.append(fields)
                headers.append(requests.headers(item, fields))
        self.context.begin(self, self.batch.request_ids(), headers)
        return [requests.row(fields, decode) for fields in inputs]

    # --- what the handler sees

    def is_cancelled(self, idx: int | None) -> bool:
        return self.batch.cancelled if idx is None else self.jobs[idx].cancelled

    def deadline_s(self, idx: int | None) -> float:
        if idx is not None:
            return self.jobs[idx].deadline_s
        return max((job.deadline_s for job in self.jobs), default=math.inf)

    def send(self, ret: Sequence[Any], indices: Sequence[int], message: str, code: int) -> None:
        """One piece per request, now. Raises RequestCancelled; waits for credit (async handlers: `drain`)."""
        self._give(
            [
                (index, self._outcome(index, ret[index], False) if code == 200 else replies.failure(code, message))
                for index in indices
            ]
        )

    def send_frames(self, data: bytes) -> None:
        """What `create_predict_response` made."""
        pieces: list[tuple[int, Outcome]] = []
        for message in decode_bytes(data):
            if isinstance(message, Chunk):
                pieces.append((message.job_id, message.data))
            elif isinstance(message, Failed):
                pieces.append((message.job_id, Failure(message.code, message.message)))
        self._give(pieces)

    def _give(self, pieces: Sequence[tuple[int, Outcome]]) -> None:
        if self.batch.stalled:
            self.link.wait_for_credit(self.batch)
        if self.batch.cancelled:
            raise RequestCancelled
        for index, _ in pieces:
            if self.jobs[index].held and self.ledger.held_bytes(self.jobs[index]) > HELD_BYTES_MAX:
                raise BufferError(f"over {HELD_BYTES_MAX} bytes wait for a slow reader: await context.drain()")
        sent = [self._piece(index, frozen(value), last=False) for index, value in pieces]
        if not self.link.may_hold_back():
            self.link.flush()
        if not all(sent) and all(job.over for job in self.jobs):
            raise ValueError("no request of the batch is left: what was to be sent can't be, the log says why")

    async def drain(self) -> None:
        while self.batch.stalled and not self.batch.cancelled:
            await self.waiter()

    # --- how its result becomes answers

    def _outcome(self, index: int, value: Any, last: bool) -> Outcome:
        """What is sent for one element of a result; `last`: the answer to that request ends with it."""
        return outcome(value)

    def _outcomes(self, result: Any, last: bool) -> Sequence[Outcome] | Failure:
        """What is sent for a whole result."""
        return outcomes(result, len(self.jobs))

    def _head(self, index: int) -> replies.Head:
        return replies.head(self.context.request_processor[index])

    def _piece(self, index: int, value: Outcome, last: bool) -> bool:
        """Gives a piece of one answer. One whose head or bytes can't be sent fails that request alone: False."""
        try:
            self._put(index, value, last)
            return True
        except Exception as error:
            job = self.jobs[index]
            self.ledger.give(job, raised(error, [job.request_id]), last=True)
            return False

    def _put(self, index: int, value: Outcome, last: bool) -> None:
        job = self.jobs[index]
        start = replies.PLAIN_HEAD if job.answered else self._head(index)
        self.ledger.give(job, value, last, *start)

    def step(self, value: Any) -> bool:
        """Takes what a generator yielded: an element per request (None: nothing for it). False ends the batch."""
        if not isinstance(value, list) and len(self.jobs) == 1:
            value = [value]
        pieces = self._outcomes(value, False)
        if isinstance(pieces, Failure):
            self.fail(pieces)
            return False
        for index, piece in enumerate(pieces):
            if value[index] is not None:
                self._piece(index, frozen(piece), last=type(value[index]) is Ended)
        return not all(job.over for job in self.jobs)

    def finish(self, result: Any) -> None:
        """The handler has returned `result`."""
        pieces = self._outcomes(result, True)
        if isinstance(pieces, Failure):
            self.fail(pieces)
            return
        for index, piece in enumerate(pieces):
            self._piece(index, piece, last=True)

    def finish_stream(self, result: Any) -> None:
        """A generator has ended; `result` is its return value, None for no last piece."""
        if result is None:
            result = [b""] * len(self.jobs)
        elif not isinstance(result, list) and len(self.jobs) == 1:
            result = [result]
        self.finish(result)

    def fail(self, failure: Failure) -> None:
        """Ends every request that has not ended yet; cancelled ones are answered as such."""
        for job in self.jobs:
            self.ledger.give(job, failure, last=True)

    def failed(self, error: BaseException) -> None:
        """The handler raised `error`; SystemExit is the caller's to deal with."""
        if self.batch.cancelled and isinstance(error, (RequestCancelled, CancelledError)):
            self.fail(PREDICTION_FAILED)
        else:
            self.fail(raised(error, [job.request_id for job in self.jobs]))


def frozen(value: Outcome) -> Outcome:
    """A copy of what the handler may change before it is written."""
    return bytes(value) if isinstance(value, (bytearray, memoryview)) else value
