"""The queue of a model with sequences: the requests of a sequence go to the worker that holds its state."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from ts.protocol.frames import Chunk, Input, Pairs, Pieces, chunks_of
from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import InvalidArgument, QueueFull, SequenceOver
from ts_frontend.job import Job, JobState, Ledger
from ts_frontend.scheduling.batcher import Full
from ts_frontend.scheduling.queues import FULL, IDLE, QueueWorker, WorkQueue, without_expired
from ts_frontend.scheduling.sequences import (
    SequenceBatcher,
    SequencedJob,
    SequenceLimits,
    SequenceLost,
    SequenceNotBegun,
)


class SequenceHeaders(NamedTuple):
    """The headers' names, in lower case: of a sequence's id, its first request, its last one."""

    id: str = "ts_request_sequence_id"
    start: str = "ts_request_sequence_start"
    end: str = "ts_request_sequence_end"


def sequence_headers(config: ServerConfig) -> SequenceHeaders:
    names = config.ts_header_key_sequence_id, config.ts_header_key_sequence_start, config.ts_header_key_sequence_end
    return SequenceHeaders(*(name.lower() for name in names))


class SequenceJob(SequencedJob):
    """A request of a sequence. `made`: the server has made the id, and the answer carries it."""

    __slots__ = ("begun", "made", "queue")
    begun: bool
    made: bool
    queue: SequenceQueue

    def deliver(self, chunk: Chunk, now_s: float | None = None) -> None:
        if chunk.headers:
            ids = [value for name, value in chunk.headers if name.lower() == self.queue.keys.end]
            if ids:
                self.queue.ended([part.strip() for part in ids[-1].split(";")])
        if not self.begun:
            self.begun = True
            if self.state is JobState.SENT:
                self.queue.begun(self)
            if self.made:
                chunk = chunk._replace(headers=_with(chunk.headers, self.queue.keys.id, self.sequence_id))
        super().deliver(chunk, now_s)

    def deliver_pieces(self, pieces: Pieces, now_s: float) -> None:
        if self.begun:  # and they have no headers
            super().deliver_pieces(pieces, now_s)
        else:
            for chunk in chunks_of(pieces):
                self.deliver(chunk, now_s)


class SequenceJobFactory:
    """Makes a model's jobs. A request without a sequence id gets a new one and begins that sequence, unless
    `told_start` requires an explicit start. Describe calls have no sequence."""

    def __init__(self, queue: SequenceQueue, told_start: bool = False) -> None:
        self._queue, self._told_start = queue, told_start

    def __call__(
        self, ledger: Ledger, inputs: Sequence[Input], *, headers: Pairs = (), alone: bool = False, **more: Any
    ) -> SequenceJob:
        keys = self._queue.keys
        found = {name.lower(): value for name, value in headers if name.lower() in keys}
        sequence_id = found.get(keys.id, "")
        made = not sequence_id and not alone
        if made and self._told_start:
            raise InvalidArgument("The request names no sequence: this model needs its id, a number but 0 or a text")
        if made:
            sequence_id = f"ts-seq-{uuid.uuid4()}"
            named = [(name, value) for name, value in headers if name.lower() not in (keys.id, keys.start)]
            headers = [*named, (keys.id, sequence_id), (keys.start, "true")]
        starts = made or _says_yes(found.get(keys.start))
        ends = _says_yes(found.get(keys.end))
        job = SequenceJob(ledger, inputs, headers=headers, alone=alone, **more)
        job.in_sequence(sequence_id, starts, ends)
        job.queue, job.made, job.begun = self._queue, made, False
        return job


def _says_yes(value: str | None) -> bool:
    return value is not None and value.strip().lower() == "true"


def _with(headers: Pairs, name: str, value: str) -> Pairs:
    return headers if any(known.lower() == name for known, _ in headers) else [*headers, (name, value)]


class SequenceQueue(WorkQueue):
    """Jobs in, batches of one job per sequence out. `refusal`: the beginning of the message for a refused request."""

    def __init__(
        self,
        limits: SequenceLimits,
        keys: SequenceHeaders,
        refusal: str,
        batcher: SequenceBatcher[SequenceJob] | None = None,
    ) -> None:
        self._batcher: SequenceBatcher[SequenceJob] = SequenceBatcher(limits) if batcher is None else batcher
        super().__init__(self._batcher)
        self.keys = keys
        self._refusal = refusal
        self._out: dict[int, tuple[SequenceJob, QueueWorker]] = {}
        self._clock: asyncio.TimerHandle | None = None

    @property
    def sequences(self) -> int:
        return self._batcher.sequences

    def holds(self, sequence_id: str) -> bool:
        return self._batcher.holds(sequence_id)

    @property
    def limits(self) -> SequenceLimits:
        return self._batcher.limits

    @limits.setter
    def limits(self, limits: SequenceLimits) -> None:
        self._batcher.limits = limits
        self.wake()

    def put(self, job: Job) -> None:
        assert isinstance(job, SequenceJob)
        try:
            self._batcher.add(job, time.monotonic())
        except Full as full:
            raise QueueFull(f"{self._refusal}: {full}") from None
        except SequenceLost as lost:
            raise SequenceOver(str(lost)) from None
        except SequenceNotBegun as error:
            raise InvalidArgument(str(error)) from None
        self._own(job)
        self._keep_time()
        self.wake()

    def put_back(self, jobs: list[Job]) -> None:
        back = [job for job in cast("list[SequenceJob]", jobs) if not job.done]
        gone = self._batcher.restore(back)
        for job in gone:
            self._fail(job, "the worker that held it has ended")
            self._batcher.settled(job, time.monotonic())
        for job in back:
            self._out.pop(job.id, None)
            if not job.done:
                self._own(job)
        self.wake()

    def detach(self, worker: QueueWorker) -> None:
        super().detach(worker)
        for job in self._batcher.lose(worker, time.monotonic()):
            self._fail(job, "the worker that held it has ended")
        self.wake()

    def release(self, job: Job) -> None:
        assert isinstance(job, SequenceJob)
        self._batcher.remove(job, time.monotonic())
        self._keep_time()
        self.wake()

    def _fail(self, job: SequenceJob, why: str) -> None:
        job.fail(SequenceOver(f"Sequence {job.sequence_id} is over, {why}: start it again"))

    # --- answers

    def begun(self, job: SequenceJob) -> None:
        self._batcher.begun(job)
        self.wake()

    def ended(self, sequence_ids: list[str]) -> None:
        for sequence_id in sequence_ids:
            for job in self._batcher.end(sequence_id, time.monotonic()):
                self._fail(job, "its handler has ended it")

    # --- deciding

    def _dispatch(self) -> None:
        self._scheduled = False
        now_s = time.monotonic()
        self._settle(now_s)
        touched: set[QueueWorker] = set()
        while len(self._batcher):
            free = self._free()
            if not free:
                break
            due_s = self._batcher.due_s(now_s, free[0].room() == IDLE)
            if due_s > 0:
                if due_s != math.inf:
                    self._wake_in(due_s)
                break
            self._give(free[0], len(free), now_s)
            touched.add(free[0])
        for worker in touched:
            worker.flush()
        self._batcher.patience.settle()

    def _settle(self, now_s: float) -> None:
        """Finds the jobs that have left their workers, so that the next of their sequences may go."""
        for job, _ in [entry for entry in self._out.values() if not entry[1].holds(entry[0])]:
            del self._out[job.id]
            self._batcher.settled(job, now_s)
        self._keep_time()

    def _free(self) -> list[QueueWorker]:
        """The workers with room that have work waiting: the most room first, then the fewest sequences."""
        batcher = self._batcher
        rooms = [(worker.room(), worker) for worker in self._workers if batcher.has_work(worker)]
        free = [(-room, batcher.sequences_of(worker), worker) for room, worker in rooms if room > FULL]
        return [worker for _, _, worker in sorted(free, key=lambda entry: entry[:2])]

    def _give(self, worker: QueueWorker, free: int, now_s: float) -> None:
        batch = self._batcher.take(worker, free)
        jobs = without_expired(list(batch), now_s)
        for job in batch:
            if job.done:
                self._batcher.settled(job, now_s)
            else:
                self._out[job.id] = job, worker
        if jobs:
            worker.dispatch(jobs, now_s)

    # --- time

    def _keep_time(self) -> None:
        """Schedules a check for the time at which the next sequence may end by itself."""
        if self._clock is not None:
            return
        end_s = self._batcher.next_end_s()
        if end_s != math.inf:
            delay_s = max(0.0, end_s - time.monotonic())
            self._clock = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._clock = None
        self._batcher.expire(time.monotonic())
        self._keep_time()
        self.wake()
