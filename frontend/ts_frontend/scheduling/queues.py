"""The queue of one model version, from which its workers are served as soon as one is free; and that of a model with
sequences, where the requests of a sequence go to the worker that holds its state."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol, cast

from ts.protocol.frames import Chunk, Feed, Input, Pairs, Pieces, chunks_of
from ts_frontend.config.table import ServerConfig
from ts_frontend.errors import DeadlineExceeded, InvalidArgument, QueueFull, SequenceOver, ServeError
from ts_frontend.job import Job, JobState, Ledger, Whereabouts
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
from ts_frontend.scheduling.sequences import (
    SequenceBatcher,
    SequencedJob,
    SequenceLimits,
    SequenceLost,
    SequenceNotBegun,
)

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
