"""The queue of a model with sequences: each goes to the worker that holds its state."""

from __future__ import annotations

import asyncio
import math
import time
from typing import cast

from ts_frontend.batching.batcher import Full
from ts_frontend.batching.job_queue import Taker, WorkQueue, without_expired
from ts_frontend.batching.sequence import Limits, Lost, NotBegun, Sequenced
from ts_frontend.batching.sequence_jobs import Keys, SequenceJob
from ts_frontend.batching.sequences import SequenceBatcher
from ts_frontend.errors import InvalidArgument, QueueFull, SequenceOver
from ts_frontend.job import Job, State


class SequenceQueue(WorkQueue):
    """Jobs in, batches of one job per sequence out. `refusal`: the beginning of what a caller is told whose request
    isn't taken."""

    def __init__(self, limits: Limits, keys: Keys, refusal: str) -> None:
        self._batcher = SequenceBatcher(limits)
        super().__init__(self._batcher)
        self.keys = keys
        self._refusal = refusal
        self._out: dict[int, tuple[SequenceJob, Taker]] = {}
        self._clock: asyncio.TimerHandle | None = None

    @property
    def limits(self) -> Limits:
        return self._batcher.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._batcher.limits = limits
        self.wake()

    def put(self, job: Job) -> None:
        assert isinstance(job, SequenceJob)
        try:
            self._batcher.add(job, time.monotonic())
        except Full as full:
            raise QueueFull(f"{self._refusal}: {full}") from None
        except Lost as lost:
            raise SequenceOver(str(lost)) from None
        except NotBegun as error:
            raise InvalidArgument(str(error)) from None
        job.owner = self
        job.move(State.QUEUED)
        self._keep_time()
        self.wake()

    def put_back(self, jobs: list[Job]) -> None:
        back = [job for job in cast("list[SequenceJob]", jobs) if not job.done]
        gone = self._batcher.restore(cast("list[Sequenced]", back))
        for job in cast("list[SequenceJob]", gone):
            self._fail(job, "the worker that held it has ended")
            self._batcher.settled(cast(Sequenced, job), time.monotonic())
        for job in back:
            self._out.pop(job.id, None)
            if not job.done:
                job.move(State.QUEUED)
                job.owner = self
        self.wake()

    def detach(self, taker: Taker) -> None:
        super().detach(taker)
        for job in cast("list[SequenceJob]", self._batcher.lose(taker, time.monotonic())):
            self._fail(job, "the worker that held it has ended")
        self.wake()

    def release(self, job: Job) -> None:
        self._batcher.remove(cast(Sequenced, job), time.monotonic())
        self._keep_time()
        self.wake()

    def _fail(self, job: SequenceJob, why: str) -> None:
        job.fail(SequenceOver(f"Sequence {job.sequence_id} is over, {why}: start it again"))

    # --- what answers say

    def begun(self, job: SequenceJob) -> None:
        self._batcher.begun(cast(Sequenced, job))
        self.wake()

    def ended(self, sequence_ids: list[str]) -> None:
        for sequence_id in sequence_ids:
            for job in cast("list[SequenceJob]", self._batcher.end(sequence_id, time.monotonic())):
                self._fail(job, "its handler has ended it")

    # --- deciding

    def _dispatch(self) -> None:
        self._scheduled = False
        now_s = time.monotonic()
        self._settle(now_s)
        touched: set[Taker] = set()
        while len(self._batcher):
            free = self._free()
            if not free:
                break
            due_s = self._batcher.due_s(now_s)
            if due_s > 0:
                if due_s != math.inf:
                    self._wake_in(due_s)
                break
            self._give(free[0], len(free), now_s)
            touched.add(free[0])
        for taker in touched:
            taker.flush()

    def _settle(self, now_s: float) -> None:
        """Notices which jobs are off their workers: what comes after them may go."""
        for job, _ in [entry for entry in self._out.values() if not entry[1].holds(entry[0])]:
            del self._out[job.id]
            self._batcher.settled(cast(Sequenced, job), now_s)
        self._keep_time()

    def _free(self) -> list[Taker]:
        """The workers with room that have something to take: the most eager first, of these the one with the fewest
        sequences."""
        batcher = self._batcher
        rooms = [(taker.room(), taker) for taker in self._takers if batcher.has_work(taker)]
        free = [(-room, batcher.sequences_of(taker), taker) for room, taker in rooms if room > 0]
        return [taker for _, _, taker in sorted(free, key=lambda entry: entry[:2])]

    def _give(self, taker: Taker, free: int, now_s: float) -> None:
        batch = cast("list[SequenceJob]", self._batcher.take(taker, free))
        jobs = without_expired(cast("list[Job]", batch), now_s)
        for job in batch:
            if job.done:
                self._batcher.settled(cast(Sequenced, job), now_s)
            else:
                self._out[job.id] = job, taker
        if jobs:
            taker.take(jobs)

    # --- time

    def _keep_time(self) -> None:
        """Looks again when the next sequence may end by itself."""
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
