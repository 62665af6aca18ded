"""The batches and requests of a worker, and the state of each answer. No I/O.

Two threads use it: the one that runs handlers, and the one that stands in for it at the socket. State that both touch
is guarded by `Ledger.lock`.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

from ts.protocol.frames import (
    ANSWER_BYTES_MAX,
    CHUNK_COST_BYTES,
    Buffer,
    Cancel,
    Chunk,
    Credit,
    Failed,
    Feed,
    Item,
    Measure,
    Message,
    Pairs,
    Predict,
    Stop,
    answer_frame,
    check,
)
from ts.protocol.outbox import Outbox


class Failure(NamedTuple):
    """The failure of a request. `code`: HTTP status. `by_handler`: the handler is at fault, not its request; `cause`
    is its error in one line, and `traceback` that of the error."""

    code: int
    message: str
    by_handler: bool = False
    cause: str = ""
    traceback: str = ""


Outcome: TypeAlias = "Buffer | Failure"

CANCELLED: Final = Failure(499, "Request cancelled")
EXPIRED: Final = Failure(504, "Deadline exceeded before the request was started")


def too_large(size: int, limit: int) -> Failure:
    return Failure(500, f"Response of {size} bytes is over max_response_size of {limit} bytes")


#: The characters that are sent of a traceback, from its end.
TRACEBACK_CHARS_MAX: Final = 4000
EARLY_CANCELS_MAX: Final = 1024


class Job:
    """One request. `held`: pieces that wait for credit of the reader."""

    __slots__ = (
        *("answered", "batch", "cancelled", "credit_bytes", "deadline_s", "done", "held", "item", "job_id", "over"),
        *("on_feed", "request_id"),
    )

    def __init__(self, item: Item, batch: Batch, credit_bytes: int) -> None:
        self.job_id, self.request_id, self.deadline_s, _, _ = item
        self.item: Item | None = item  # until its inputs have been handed over
        self.batch = batch
        self.credit_bytes = credit_bytes
        self.held: deque[Chunk | Failed] | None = None
        self.on_feed: Callable[[Feed], None] | None = None  # receives its further inputs
        self.answered = False  # something has been sent
        self.cancelled = False
        self.over = False  # the handler has given the last piece
        self.done = False  # the last piece is in the outbox

    @property
    def stalled(self) -> bool:
        return self.credit_bytes <= 0 and not self.cancelled and not self.over


class Batch:
    """Requests that the handler gets together. `on_change` is called for new credit and for a cancel; `failed`: the
    batch failed as a whole, so further failures aren't caused by single requests."""

    __slots__ = ("batch_id", "failed", "jobs", "on_change", "started")

    def __init__(self, batch_id: int) -> None:
        self.batch_id = batch_id
        self.jobs: list[Job] = []
        self.started = self.failed = False
        self.on_change: Callable[[], None] | None = None

    @property
    def cancelled(self) -> bool:
        jobs = self.jobs
        return jobs[0].cancelled if len(jobs) == 1 else all(job.cancelled for job in jobs)

    @property
    def stalled(self) -> bool:
        """True if a reader has no credit left: the batch is one computation, so it waits as a whole."""
        jobs = self.jobs
        return jobs[0].stalled if len(jobs) == 1 else any(job.stalled for job in jobs)

    def request_ids(self) -> dict[int, str]:
        if len(self.jobs) == 1:
            return {0: self.jobs[0].request_id}
        return {index: job.request_id for index, job in enumerate(self.jobs)}


class Ledger:
    """Every request from its arrival to its end, and the messages to send. `explains`: callers may see a handler's
    error; otherwise they get the place of its log."""

    def __init__(self, credit_bytes: int, response_bytes_max: int, explains: bool = False) -> None:
        self.credit_bytes, self.response_bytes_max, self.explains = credit_bytes, response_bytes_max, explains
        self._small_bytes_max = min(response_bytes_max, ANSWER_BYTES_MAX)
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.outbox = Outbox()
        self.unsent = 0
        #: The first piece of an answer is among them.
        self.first_waits = False
        self.queue: deque[Batch] = deque()
        self.jobs: dict[int, Job] = {}
        self.stopping = False
        self.on_answer: Callable[[Chunk | Failed], None] = lambda message: None  # of the worker's own calls
        self.on_measure: Callable[[int], None] = lambda job_id: None
        #: Gets the arguments of `give` before they are sent; None while no request is measured.
        self.on_given: Callable[[Job, Outcome, bool], None] | None = None
        self._early_cancels: dict[int, None] = {}

    # --- from the frontend

    def receive(self, message: Message) -> None:
        if type(message) is Predict:
            self._admit(message)
        elif type(message) is Credit:
            self._grant(message.job_id, message.size_bytes)
        elif type(message) is Cancel:
            self._cancel(message.job_id)
        elif type(message) is Feed:
            self._feed(message)
        elif type(message) is Stop:
            self.stopping = True
        elif isinstance(message, (Chunk, Failed)):
            self.on_answer(message)
        elif type(message) is Measure:
            self.on_measure(message.job_id)

    def _admit(self, predict: Predict) -> None:
        batch_id, items = predict
        batch = Batch(batch_id)
        for item in items:
            job = Job(item, batch, self.credit_bytes)
            batch.jobs.append(job)
            self.jobs[job.job_id] = job
        if self._early_cancels:
            for job in batch.jobs:
                if self._early_cancels.pop(job.job_id, 0) is None:
                    self._cancel(job.job_id)
        self.queue.append(batch)

    def _grant(self, job_id: int, size_bytes: int) -> None:
        job = self.jobs.get(job_id)
        if job is None:
            return
        with self.lock:
            job.credit_bytes += size_bytes
            while job.held and (job.credit_bytes > 0 or type(job.held[0]) is Failed):
                self._push(job, job.held.popleft())
            self.changed.notify_all()
        if job.batch.on_change is not None:
            job.batch.on_change()

    def _feed(self, feed: Feed) -> None:
        job = self.jobs.get(feed.job_id)
        if job is not None and job.on_feed is not None:
            job.on_feed(feed)

    def ask_for(self, job: Job, size_bytes: int) -> None:
        """Grants the frontend `size_bytes` more of the request's inputs."""
        with self.lock:
            if not job.done:
                self.outbox.push(Credit(job.job_id, size_bytes))

    def _cancel(self, job_id: int) -> None:
        job = self.jobs.get(job_id)
        if job is None:  # control frames overtake bulk: its request may still be on the way
            self._early_cancels[job_id] = None
            if len(self._early_cancels) > EARLY_CANCELS_MAX:
                del self._early_cancels[next(iter(self._early_cancels))]
            return
        with self.lock:
            job.cancelled = True
            if job.held is not None:
                job.held.clear()
            if not job.batch.started or job.over:
                self._end(job, self._failed(job, CANCELLED)._replace(begun=job.batch.started))
            self.changed.notify_all()
        if job.batch.on_change is not None:
            job.batch.on_change()

    # --- to the frontend

    def start(self, batch: Batch) -> bool:
        """Drops cancelled and expired requests; returns False if none is left."""
        with self.lock:
            batch.started = True
            jobs = batch.jobs
            if len(jobs) == 1 and jobs[0].deadline_s == math.inf and not jobs[0].done:  # the usual batch
                return True
            now_s, whole = 0.0, True
            for job in batch.jobs:
                if not job.done and job.deadline_s != math.inf:
                    now_s = now_s or time.monotonic()
                    if job.deadline_s <= now_s:
                        self._end(job, self._failed(job, EXPIRED)._replace(begun=False))
                whole = whole and not job.done
            if not whole:
                batch.jobs = [job for job in batch.jobs if not job.done]
        return bool(batch.jobs)

    def give(
        self,
        job: Job,
        value: Outcome,
        last: bool,
        status: int = 200,
        phrase: str = "",
        headers: Pairs = (),
        later: Pairs = (),
    ) -> None:
        """A piece of a request's answer, or its failure: sent now, or held until its reader has credit. Status,
        phrase and headers count for the first piece, `later` are headers of those after it. Raises ValueError for a
        piece that doesn't fit a message: the request is then unchanged, and can still be failed."""
        if self.on_given is not None:
            self.on_given(job, value, last)
        with self.lock:
            if job.over:
                return
            if last and status == 200 and not phrase and not headers and self._give_small(job, value):
                return
            if job.cancelled:
                if not last:
                    return
                value = CANCELLED
            elif type(value) is not Failure and len(value) > self.response_bytes_max:
                value = too_large(len(value), self.response_bytes_max)
            if type(value) is Failure:
                failed = self._failed(job, value)
                self._put(job, failed._replace(whole=True) if job.batch.failed and not job.cancelled else failed)
                job.over = True
                return
            if job.answered:
                status, phrase, headers = 200, "", later
            self._put(job, Chunk(job.job_id, value, last, status, phrase, headers))  # type: ignore[arg-type]
            job.answered = True
            job.over = last

    def give_whole(self, jobs: Sequence[Job], values: Sequence[Outcome]) -> Sequence[int]:
        """`give` of the usual answers among these whole ones without status and headers: small bytes, which go as they
        are. Returns the places of the others, which are left to `give`."""
        if self.on_given is not None:
            return range(len(jobs))
        with self.lock:
            return [place for place, job in enumerate(jobs) if not self._give_small(job, values[place])]

    def _give_small(self, job: Job, value: Outcome) -> bool:
        """Sends a whole answer that can go as it is, as most can; False for any other."""
        if (
            type(value) is not bytes
            or job.over
            or job.answered
            or job.cancelled
            or job.credit_bytes <= 0
            or len(value) > self._small_bytes_max
        ):
            return False
        self.outbox.push_frame(answer_frame(job.job_id, value))
        job.answered = job.over = job.done = True
        self.jobs.pop(job.job_id, None)
        self.unsent += 1
        return True

    def add_piece(self, job: Job, data: bytes) -> bool:
        """The usual case of `give`: a piece between the first and the last, whose reader has credit. False for any
        other, which is left to `give`."""
        with self.lock:
            size = len(data)
            if job.over or job.cancelled or job.held or job.credit_bytes <= 0 or size > self.response_bytes_max:
                return False
            self.outbox.push_piece(job.job_id, data)
            job.credit_bytes -= size + CHUNK_COST_BYTES
            self.unsent += 1
            return True

    def _failed(self, job: Job, failure: Failure) -> Failed:
        """The failure in the form that the caller may see."""
        code, message, by_handler, cause, trace = failure
        if not by_handler:
            return Failed(job.job_id, code, message)
        if self.explains:
            message = f"{message}: {cause}" if cause else message
            return Failed(job.job_id, code, message, True, trace[-TRACEBACK_CHARS_MAX:])
        if cause:
            message = f"{message} (request ID {job.request_id}: the model's log says why)"
        return Failed(job.job_id, code, message, True)

    def refuse(self, job: Job, failure: Failure) -> None:
        """Fails a request that doesn't reach the handler."""
        with self.lock:
            if not job.over:
                self._put(job, self._failed(job, failure)._replace(begun=False))
                job.over = True

    def held_bytes(self, job: Job) -> int:
        with self.lock:
            return sum(len(piece.data) for piece in job.held or () if isinstance(piece, Chunk))

    def _put(self, job: Job, piece: Chunk | Failed) -> None:
        if job.held or (job.credit_bytes <= 0 and type(piece) is Chunk):
            if job.held is None:
                job.held = deque()
            check(piece)
            job.held.append(piece)
        else:
            self._push(job, piece)

    def _push(self, job: Job, piece: Chunk | Failed) -> None:
        if type(piece) is not Chunk or piece.last:
            self._end(job, piece)
            return
        if _is_bare(piece):
            self.outbox.push_piece(piece.job_id, piece.data)  # type: ignore[arg-type]  # a bare piece's data is bytes
        else:
            self.outbox.push(piece)
        job.credit_bytes -= len(piece.data) + CHUNK_COST_BYTES
        self.unsent += 1
        self.first_waits |= not job.answered

    def _end(self, job: Job, piece: Chunk | Failed) -> None:
        if job.done:
            return
        if type(piece) is Chunk and _is_bare(piece):
            self.outbox.push_last(piece.job_id, piece.data)  # type: ignore[arg-type]
        else:
            self.outbox.push(piece)
        job.done = job.over = True
        self.jobs.pop(job.job_id, None)
        self.unsent += 1


def _is_bare(piece: Chunk) -> bool:
    """Whether a piece is nothing but its data, so that it can share a frame."""
    _, data, _, status, phrase, headers = piece
    return type(data) is bytes and status == 200 and not phrase and not headers


class SilentLedger(Ledger):
    """The ledger of a rank other than 0, whose answers are not needed: it reports only the end of each request. Its
    pieces need no credit, so no reader delays it."""

    def give(
        self,
        job: Job,
        value: Outcome,
        last: bool,
        status: int = 200,
        phrase: str = "",
        headers: Pairs = (),
        later: Pairs = (),
    ) -> None:
        if last or type(value) is Failure:
            super().give(job, value if type(value) is Failure else b"", last)

    def give_whole(self, jobs: Sequence[Job], values: Sequence[Outcome]) -> Sequence[int]:
        return range(len(jobs))

    def add_piece(self, job: Job, data: bytes) -> bool:
        return False
