"""The queue of one model version, from which its workers are served as soon as one is free."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any, Final, Protocol

from ts.protocol.frames import Feed, Input, Pairs
from ts_frontend.errors import DeadlineExceeded, QueueFull, ServeError
from ts_frontend.job import Job, Ledger, Whereabouts
from ts_frontend.scheduling.batcher import (
    Batcher,
    Full,
    Group,
    Policy,
    Priorities,
    PriorityBatcher,
    PriorityJob,
    RepeatLane,
)
from ts_frontend.scheduling.sequences import SequenceBatcher

#: The room of a worker for batches: a worker that has nothing to do, and one that takes no more. Between them is a busy
#: worker that takes another batch; of several, the one with the most room gets it.
IDLE: Final = 2
FULL: Final = 0
#: Read-ahead: seconds that a worker's batches may take if another is sent to it. A sibling could be free sooner...
AHEAD_S = 0.004
#: ... but a model's only worker gets the next batch anyway: ahead of its end, the worker doesn't wait for it.
SOLE_AHEAD_S = 0.05
#: A batch with room for more requests is worth waiting for, unless it costs less than a round trip.
PART_AHEAD_S: Final = 0.0005


class QueueWorker(Protocol):
    """A worker, as the queue sees it."""

    def __hash__(self) -> int: ...

    def room(self, ahead_s: float = AHEAD_S) -> float:
        """Returns IDLE, FULL, or a number between them for a busy worker that takes another batch. `ahead_s`: the
        longest time of the batch behind which it takes one; several batches together take AHEAD_S at most."""

    def dispatch(self, jobs: list[Job], now_s: float) -> None:
        """Runs these jobs as one batch, from `now_s` on (`time.monotonic()` seconds)."""

    def dispatch_alone(self, job: Job, now_s: float) -> None:
        """Runs a job, and accepts no other before its end. Only for an idle worker."""

    def reserve(self) -> None:
        """Accepts no further jobs until it is idle."""

    def flush(self) -> None:
        """Writes the dispatched jobs to the worker."""

    def look(self) -> None:
        """Takes the answers that have arrived."""

    def holds(self, job: Job) -> bool:
        """Returns whether the worker still computes the job, even if no caller waits for it."""


class WorkQueue:
    """The base of all queues: it has workers, dispatches soon after a change, and ends jobs that wait for too long."""

    def __init__(self, store: Batcher[Any] | SequenceBatcher[Any]) -> None:
        self._store = store
        self._workers: list[QueueWorker] = []
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._expires_s = math.inf  # no waiting job's deadline is earlier

    def __len__(self) -> int:
        return len(self._store)

    def put(self, job: Job) -> None:
        """Accepts a job or raises QueueFull; it is then in state QUEUED."""
        raise NotImplementedError

    def put_back(self, jobs: list[Job]) -> None:
        """Puts jobs that a worker had received but not started at the head of the queue."""
        raise NotImplementedError

    def run_again(self, groups: Sequence[Group]) -> None:
        """Sends these jobs to workers once more, in these groups and before all others."""
        raise NotImplementedError

    def attach(self, worker: QueueWorker) -> None:
        self._workers.append(worker)
        self.wake()

    def detach(self, worker: QueueWorker) -> None:
        if worker in self._workers:
            self._workers.remove(worker)

    def wake(self) -> None:
        """Dispatches jobs once this turn of the loop is over, so that jobs that arrive together go together."""
        if not self._scheduled:
            self._scheduled = True
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        raise NotImplementedError

    def _wake_in(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self.wake)

    def _own(self, job: Job) -> None:
        """Makes this queue the owner of a job that it has just stored."""
        job.enqueue(self)
        if job.deadline_s < self._expires_s:
            self._expires_s = job.deadline_s

    # --- as a job's owner

    def release(self, job: Job) -> None:
        raise NotImplementedError

    def grant(self, job: Job, size_bytes: int) -> None:
        """Does nothing: a waiting job has no stream yet."""

    def feed(self, job: Job, feed: Feed) -> None:
        """Does nothing: a waiting job has no handler for further inputs yet."""

    def measure(self, job: Job) -> Whereabouts:
        """Does nothing: a queue receives no messages about batches."""
        raise AssertionError(f"job {job.id} was sent to a queue")

    # --- ending waiting jobs

    def waiting(self) -> list[Job]:
        return self._store.waiting()

    def expire(self, now_s: float) -> None:
        """Ends the waiting jobs whose deadline has passed. Looks at them only if there may be one, because a full queue
        asks for each request that it refuses."""
        if now_s < self._expires_s:
            return
        waiting = self.waiting()
        self._expires_s = min((job.deadline_s for job in waiting if job.deadline_s > now_s), default=math.inf)
        for job in waiting:
            if job.deadline_s <= now_s:
                self.release(job)
                expired(job, now_s)

    def fail_all(self, error: ServeError) -> int:
        """Ends every waiting job with `error`; returns how many there were."""
        return self.fail_older(error, -math.inf)

    def fail_older(self, error: ServeError, age_s: float) -> int:
        """Ends every job that has waited longer than `age_s` seconds with `error`; returns how many there were."""
        now_s = time.monotonic()
        old = [job for job in self.waiting() if now_s - job.queued_at_s > age_s]
        for job in old:
            self.release(job)
            job.fail(error)
        return len(old)


def expired(job: Job, now_s: float) -> None:
    waited_ms = (now_s - job.queued_at_s) * 1000
    last = "the request waited for another worker" if job.sent_at_s else "the request never ran"
    job.expire(DeadlineExceeded(f"Deadline passed after {waited_ms:.0f} ms in the queue; {last}"))


def without_expired(batch: list[Job], now_s: float) -> list[Job]:
    """Returns a batch without the jobs whose deadline has passed: expired jobs are never sent."""
    late = [job for job in batch if job.deadline_s <= now_s]
    if not late:
        return batch
    for job in late:
        expired(job, now_s)
    return [job for job in batch if not job.done]


class JobQueue(WorkQueue):
    """Jobs in, batches out to whichever worker is free. Work-conserving: nothing waits while a worker is idle,
    except for a delay that the model's user asked for."""

    def __init__(self, policy: Policy, batcher: Batcher[Any] | None = None) -> None:
        self._batcher: Batcher[Any] = Batcher(policy) if batcher is None else batcher
        super().__init__(self._batcher)
        self._turn = 0
        self._again = RepeatLane()
        self._reserved: QueueWorker | None = None  # for a job that runs again alone

    def __len__(self) -> int:
        return len(self._batcher) + len(self._again)

    @property
    def policy(self) -> Policy:
        return self._batcher.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._batcher.policy = policy
        self.wake()

    def put(self, job: Job) -> None:
        try:
            self._batcher.add(job, time.monotonic())
        except Full:
            self._put_after_all(job)
        self._own(job)
        if not self._scheduled:
            self.wake()

    def _put_after_all(self, job: Job) -> None:
        """Adds the job once expired jobs, and those that idle workers take, have left the queue. Raises QueueFull.

        Workers may have answered since this turn of the loop began. Without a look at them, a turn in which many
        requests are refused gives each worker only as many as it had room for before, so that few are answered and
        most go on being refused.
        """
        now_s = time.monotonic()
        self.expire(now_s)
        for worker in list(self._workers):
            worker.look()
        self._dispatch()
        try:
            self._batcher.add(job, now_s)
        except Full as full:
            raise QueueFull(str(full)) from None

    def put_back(self, jobs: list[Job]) -> None:
        back = [job for job in jobs if not job.done]
        for job in back:
            self._own(job)
        self._batcher.restore(back)
        self.wake()

    def run_again(self, groups: Sequence[Group]) -> None:
        for group in groups:
            for job in group.jobs:
                self._own(job)
        self._again.add(groups)
        self.wake()

    def release(self, job: Job) -> None:
        if not self._batcher.remove(job):
            self._again.remove(job)

    def waiting(self) -> list[Job]:
        return [*self._again.waiting(), *super().waiting()]

    # --- deciding

    def _dispatch(self) -> None:
        self._scheduled = False
        batcher = self._batcher
        waiting, policy = batcher.jobs, batcher.policy
        touched: list[QueueWorker] = []
        now_s = time.monotonic()
        if self._again:
            self._dispatch_again(touched, now_s)
        while waiting:
            worker = self._pick(self._ahead_s() if len(waiting) >= policy.batch_size else PART_AHEAD_S)
            if worker is None:
                break
            if policy.delay_s:
                due_s = batcher.due_s(now_s, worker.room() == IDLE)
                if due_s > 0:
                    self._wake_in(due_s)
                    break
            jobs = batcher.take()
            if len(jobs) != 1 or jobs[0].deadline_s <= now_s:
                jobs = without_expired(jobs, now_s)
            if jobs:
                worker.dispatch(jobs, now_s)
                if worker not in touched:
                    touched.append(worker)
        for worker in touched:
            worker.flush()
        if policy.delay_s:
            batcher.patience.settle()

    def _dispatch_again(self, touched: list[QueueWorker], now_s: float) -> None:
        """Dispatches repeated jobs, which go first. For one that runs alone, a worker is kept free once it is idle."""
        while self._again:
            worker = self._pick()
            group = None if worker is None else self._again.take(idle=worker.room() == IDLE)
            if worker is None or group is None:
                break
            jobs = without_expired(group.jobs, now_s)
            if jobs:
                worker.dispatch_alone(jobs[0], now_s) if group.alone else worker.dispatch(jobs, now_s)
                touched.append(worker)
        if not self._again.has_alone:
            self._reserved = None
        elif self._workers and self._reserved not in self._workers:
            self._reserved = self._pick() or self._workers[0]
            self._reserved.reserve()

    def _ahead_s(self) -> float:
        """Returns the longest time of a batch behind which a full one is sent."""
        return SOLE_AHEAD_S if len(self._workers) == 1 else AHEAD_S

    def _pick(self, ahead_s: float = AHEAD_S) -> QueueWorker | None:
        """Returns an idle worker, in turn, otherwise the busy one with the most room."""
        workers = self._workers
        count = len(workers)
        if count == 1:
            return workers[0] if workers[0].room(ahead_s) else None
        best, most = None, 0.0
        for offset in range(count):
            index = (self._turn + offset) % count
            room = workers[index].room(ahead_s)
            if room > most:
                best, most = workers[index], room
                if room == IDLE:
                    self._turn = index + 1
                    break
        return best


class TicketQueue(JobQueue):
    """A queue that takes a job only if a worker is idle for it (useJobTicket), else QueueFull with `refusal`."""

    def __init__(self, policy: Policy, refusal: str) -> None:
        super().__init__(policy)
        self._refusal = refusal

    def put(self, job: Job) -> None:
        if len(self) >= sum(worker.room() == IDLE for worker in self._workers):
            raise QueueFull(self._refusal)
        super().put(job)


#: Headers of a request: its level, and microseconds that it may wait.
PRIORITY: Final = "ts_request_priority"
TIMEOUT_US: Final = "ts_request_queue_timeout_us"


class PriorityJobFactory:
    """Makes a model's jobs. Headers without a numeric priority or timeout leave the model's defaults."""

    def __init__(self, priorities: Priorities) -> None:
        self._ranking = priorities

    def __call__(self, ledger: Ledger, inputs: Sequence[Input], *, headers: Pairs = (), **more: Any) -> PriorityJob:
        found = {name.lower(): value for name, value in headers}
        level = self._ranking.level(_number(found.get(PRIORITY)))
        wish_s = _number(found.get(TIMEOUT_US)) / 1e6
        return PriorityJob(ledger, inputs, headers=headers, **more).ranked(level, wish_s)


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() and len(text) < 20 else 0


class PriorityQueue(JobQueue):
    def __init__(self, policy: Policy, priorities: Priorities, batcher: PriorityBatcher | None = None) -> None:
        self._batcher_by_priority = PriorityBatcher(policy, priorities) if batcher is None else batcher
        super().__init__(policy, self._batcher_by_priority)

    def expire(self, now_s: float) -> None:
        super().expire(now_s)
        for job in self._batcher_by_priority.settle(now_s):
            expired(job, now_s)

    def _ahead_s(self) -> float:
        return AHEAD_S  # a request with a higher priority may still come

    def _dispatch(self) -> None:
        self.expire(time.monotonic())
        super()._dispatch()
