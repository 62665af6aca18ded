"""The rules of batches: their jobs, their time, and the repetition of their requests. Pure decisions: time is an
argument, nothing waits, nothing is sent.

For a model whose handler may be called twice for a request (`idempotent`), a request that a worker had begun when it
died runs again, once, and alone on its worker: if that worker dies too, it was this request and no neighbour of it.
Requests of a batch that failed as a whole run again in halves, until the culprit fails alone: a request of a batch of N
runs log2(N) + 1 times at most.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from ts_frontend.job import Job


@dataclass(slots=True)
class Repeats:
    """The numbers of a version's repeated and given-up requests. An idempotent model's plan has one."""

    after_deaths: int = 0
    after_failures: int = 0
    quarantined: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Requests that a worker gets together. `alone`: the worker runs no others meanwhile."""

    jobs: list[Job]
    alone: bool = False


def halves(jobs: Sequence[Job]) -> list[Group]:
    """Returns the requests of a batch that failed as a whole, in two groups."""
    middle = (len(jobs) + 1) // 2
    return [Group(list(half)) for half in (jobs[:middle], jobs[middle:]) if half]


def one_by_one(jobs: Sequence[Job]) -> list[Group]:
    """Returns a group for each request of a worker that died: any of them may have killed it."""
    return [Group([job], alone=True) for job in jobs]


class RepeatLane:
    """The groups of a queue that wait for repetition, before all other jobs. They were accepted: no limit applies."""

    def __init__(self) -> None:
        self._groups: deque[Group] = deque()

    def __bool__(self) -> bool:
        return bool(self._groups)

    def __len__(self) -> int:
        return sum(len(group.jobs) for group in self._groups)

    @property
    def has_alone(self) -> bool:
        return any(group.alone for group in self._groups)

    def add(self, groups: Sequence[Group]) -> None:
        self._groups.extend(group for group in groups if group.jobs)

    def remove(self, job: Job) -> bool:
        """Forgets a job; returns False when it isn't here."""
        for group in self._groups:
            if job in group.jobs:
                group.jobs.remove(job)
                if not group.jobs:
                    self._groups.remove(group)
                return True
        return False

    def take(self, idle: bool) -> Group | None:
        """Returns the next group for a worker; one that runs alone only for an `idle` worker."""
        for group in self._groups:
            if idle or not group.alone:
                self._groups.remove(group)
                return group
        return None

    def waiting(self) -> list[Job]:
        return [job for group in self._groups for job in group.jobs]


JobT = TypeVar("JobT", bound=Job)


@dataclass(frozen=True, slots=True)
class Policy:
    """A model's batching. `delay_s`: the most seconds that a batch waits for further requests, 0 unless configured.
    `lone_waits`: a batch that isn't full always waits for so long, although a worker is idle."""

    batch_size: int = 1
    delay_s: float = 0.0
    lone_waits: bool = False
    jobs_max: int = 100
    bytes_max: int = 1 << 30


#: The least time without a new request after which an idle worker takes a batch that isn't full, in seconds...
QUIET_S_MIN: Final = 0.0005
#: ... and its factors after a batch that has waited for it in vain, and after one that was taken too early.
SHORTER: Final = 0.8
LONGER: Final = 4.0


class Patience:
    """How long an idle worker waits for more requests of a batch: until none has come for some time. It is the whole
    delay at first, less after each batch for which it was in vain (all clients wait for their answers), and more again
    when a request comes before that batch's end and could have been in it."""

    def __init__(self) -> None:
        self._quiet_s = math.inf
        self._last_s = 0.0
        self._company = False  # the last batch had several jobs
        #: The last job of a batch that wasn't full, until it is done, and the time until which that batch could wait.
        self._taken: Job | None = None
        self._until_s = 0.0

    def came(self, now_s: float) -> None:
        """A request has been queued."""
        self._last_s = now_s
        taken = self._taken
        if taken is not None:
            if not taken.done and now_s < self._until_s:
                self._quiet_s *= LONGER
            self._taken = None

    def took(self, batch: Sequence[Job], delay_s: float, *, full: bool) -> None:
        """A worker has taken a batch, which could wait for `delay_s`."""
        self._company = len(batch) > 1
        if delay_s and self._company and not full:
            self._quiet_s = max(min(self._quiet_s, delay_s) * SHORTER, QUIET_S_MIN)
            self._taken, self._until_s = batch[-1], batch[0].queued_at_s + delay_s

    def end_s(self, waiting: int) -> float:
        """The time until which an idle worker waits for more. A lone request waits only after a batch of several."""
        return self._last_s + self._quiet_s if waiting > 1 or self._company else -math.inf

    def settle(self) -> None:
        """Forgets the batch that was taken if it is done."""
        if self._taken is not None and self._taken.done:
            self._taken = None


class Full(Exception):
    """The queue has no room; the message names the limit and the setting that raises it."""


class Batcher(Generic[JobT]):
    """A bounded queue in arrival order. O(1) for each job that is added, taken or removed."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.size_bytes = 0
        #: The waiting jobs by id, in arrival order.
        self.jobs: OrderedDict[int, JobT] = OrderedDict()
        self.patience = Patience()

    def __len__(self) -> int:
        return len(self.jobs)

    def add(self, job: JobT, now_s: float) -> None:
        """Queues a job. Raises Full if it exceeds the limit of jobs or bytes."""
        policy = self.policy
        if len(self.jobs) >= policy.jobs_max:
            raise Full(f"{len(self.jobs)} requests are waiting and the queue takes {policy.jobs_max} (job_queue_size)")
        if self.jobs and self.size_bytes + job.size_bytes > policy.bytes_max:
            raise Full(
                f"{self.size_bytes} bytes are waiting; {job.size_bytes} more are over the queue's "
                f"{policy.bytes_max} (job_queue_bytes_max)"
            )
        job.queued_at_s = now_s
        self.jobs[job.id] = job
        self.size_bytes += job.size_bytes
        if policy.delay_s:
            self.patience.came(now_s)

    def restore(self, jobs: list[JobT]) -> None:
        """Puts jobs back at the head in their order. Limits don't apply to jobs that were accepted before."""
        for job in reversed(jobs):
            self.jobs[job.id] = job
            self.jobs.move_to_end(job.id, last=False)
            self.size_bytes += job.size_bytes

    def remove(self, job: JobT) -> bool:
        """Forgets a job; returns False when it isn't here."""
        if self.jobs.pop(job.id, None) is None:
            return False
        self.size_bytes -= job.size_bytes
        return True

    def due_s(self, now_s: float, idle: bool = False) -> float:
        """Returns the seconds until a free worker should take a batch: 0 for now, inf when nothing waits.

        An `idle` worker takes a lone request at once if the previous one was alone too, and several as soon as more are
        no longer likely (`Patience`), because waiting would only cost time."""
        if not self.jobs:
            return math.inf
        policy = self.policy
        if not policy.delay_s or len(self.jobs) >= policy.batch_size:
            return 0.0
        first = next(iter(self.jobs.values()))
        if first.alone:
            return 0.0
        end_s = first.queued_at_s + policy.delay_s
        if idle and not policy.lone_waits:
            end_s = min(end_s, self.patience.end_s(len(self.jobs)))
        return max(0.0, end_s - now_s)

    def take(self) -> list[JobT]:
        """Returns the next batch: up to `batch_size` jobs in arrival order, or a single job that must run alone."""
        batch = self._next()
        if self.policy.delay_s:
            self.patience.took(batch, self.policy.delay_s, full=len(batch) >= self.policy.batch_size)
        return batch

    def _next(self) -> list[JobT]:
        jobs = self.jobs
        if self.policy.batch_size == 1 and jobs:
            _, job = jobs.popitem(last=False)
            self.size_bytes -= job.size_bytes
            return [job]
        batch: list[JobT] = []
        while jobs and len(batch) < self.policy.batch_size:
            if batch and next(iter(jobs.values())).alone:
                break
            _, job = jobs.popitem(last=False)
            self.size_bytes -= job.size_bytes
            batch.append(job)
            if job.alone:
                break
        return batch

    def waiting(self) -> list[JobT]:
        return list(self.jobs.values())


@dataclass(frozen=True, slots=True)
class WaitPolicy:
    """The queueing rule of one level. A request waits for `timeout_s` at most and is then refused, or with `delays`
    queued behind all others of its level. With `overridable` a request may give a shorter time. `jobs_max`: the
    largest number of waiting requests, 0 for any."""

    timeout_s: float = math.inf
    delays: bool = False
    overridable: bool = False
    jobs_max: int = 0

    def patience_s(self, wish_s: float) -> float:
        """Seconds that a request with this wish may wait; a wish has no effect on a level without a limit."""
        if self.overridable and wish_s and self.timeout_s != math.inf:
            return min(wish_s, self.timeout_s)
        return self.timeout_s


@dataclass(frozen=True, slots=True)
class Priorities:
    """Priority levels from 1 (first) to `levels`, which is 0 for a model without levels, whose requests all have
    level 0. `default`: the level of requests without a valid one."""

    levels: int = 0
    default: int = 0
    policy: WaitPolicy = WaitPolicy()
    policies: Mapping[int, WaitPolicy] = field(default_factory=dict)

    def level(self, priority: int) -> int:
        return priority if 0 < priority <= self.levels else self.default

    def policy_of(self, level: int) -> WaitPolicy:
        return self.policies.get(level, self.policy)

    @property
    def jobs_max(self) -> int:
        """Returns the number of jobs that may wait in all levels together, 0 for any number."""
        own = [policy.jobs_max for level, policy in self.policies.items() if 0 < level <= self.levels]
        others = max(self.levels, 1) - len(own)  # not a loop over the levels, of which a file may name billions
        if not all(own) or (others and not self.policy.jobs_max):
            return 0
        return sum(own) + others * self.policy.jobs_max


class PriorityJob(Job):
    """A request with a level. `wish_s`: its requested limit of waiting in seconds, 0 for none; `until_s`: the end of
    its time in the queue; `late`: that time is over, and the job keeps waiting."""

    __slots__ = ("late", "level", "until_s", "wish_s")
    late: bool
    level: int
    until_s: float
    wish_s: float

    def ranked(self, level: int, wish_s: float) -> PriorityJob:
        """Returns the new job itself, with its level and its wish: its factory calls it first."""
        self.level, self.wish_s = level, wish_s
        self.until_s, self.late = 0.0, False
        return self


class Lane:
    """The jobs of one level, which are taken in arrival order."""

    def __init__(self) -> None:
        self.jobs: OrderedDict[int, Job] = OrderedDict()

    def add(self, job: Job, first: bool = False) -> None:
        """`first`: before all others."""
        self.jobs[job.id] = job
        if first:
            self.jobs.move_to_end(job.id, last=False)

    def remove(self, job: Job) -> None:
        """Forgets a job that won't run."""
        del self.jobs[job.id]

    def take(self, job: Job) -> None:
        """Forgets a job that goes to a worker."""
        self.remove(job)

    def next(self) -> Job:
        """The job that is to be taken now; there is one."""
        return next(iter(self.jobs.values()))


class PriorityBatcher(Batcher[Job]):
    """Jobs by level, late ones last, in arrival order. Taking a job costs O(levels) more. Jobs without a level have the
    default one."""

    def __init__(self, policy: Policy, priorities: Priorities) -> None:
        super().__init__(policy)
        self._ranking = priorities
        self._lanes: dict[tuple[int, bool], Lane] = {}
        policies = (priorities.policy, *priorities.policies.values())
        self._timed = any(one.timeout_s != math.inf for one in policies)
        self._settles_s = math.inf  # no job that isn't late has an earlier `until_s`

    def add(self, job: Job, now_s: float) -> None:
        level = job.level if isinstance(job, PriorityJob) else self._ranking.default
        policy = self._ranking.policy_of(level)
        if policy.jobs_max and self._count(level) >= policy.jobs_max:
            raise Full(f"{policy.jobs_max} requests of priority {level} are waiting (max_queue_size)")
        super().add(job, now_s)
        if isinstance(job, PriorityJob):
            job.until_s, job.late = now_s + policy.patience_s(job.wish_s), False
            self._settles_s = min(self._settles_s, job.until_s)
        self._lane(job).add(job)

    def _count(self, level: int) -> int:
        lanes = (self._lanes.get((level, late)) for late in (False, True))
        return sum(len(lane.jobs) for lane in lanes if lane is not None)

    def _new_lane(self) -> Lane:
        return Lane()

    def _lane(self, job: Job) -> Lane:
        key = (job.level, job.late) if isinstance(job, PriorityJob) else (self._ranking.default, False)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = self._new_lane()
        return lane

    def restore(self, jobs: list[Job]) -> None:
        super().restore(jobs)
        for job in reversed(jobs):
            if isinstance(job, PriorityJob):
                self._settles_s = min(self._settles_s, math.inf if job.late else job.until_s)
            self._lane(job).add(job, True)

    def remove(self, job: Job) -> bool:
        if not super().remove(job):
            return False
        self._lane(job).remove(job)
        return True

    def _next(self) -> list[Job]:
        batch: list[Job] = []
        for key in sorted(self._lanes):
            lane = self._lanes[key]
            while lane.jobs and len(batch) < self.policy.batch_size:
                job = lane.next()
                if batch and job.alone:
                    return batch
                super().remove(job)
                lane.take(job)
                batch.append(job)
                if job.alone:
                    return batch
        return batch

    def settle(self, now_s: float) -> list[PriorityJob]:
        """Removes and returns the jobs whose time is over; on a level with `delays` they wait behind all others."""
        if not self._timed or now_s < self._settles_s:
            return []
        waiting = [job for (_, late), lane in self._lanes.items() if not late for job in lane.jobs.values()]
        timed = [job for job in waiting if isinstance(job, PriorityJob)]
        over = [job for job in timed if job.until_s <= now_s]
        self._settles_s = min((job.until_s for job in timed if job.until_s > now_s), default=math.inf)
        refused: list[PriorityJob] = []
        for job in over:
            if self._ranking.policy_of(job.level).delays:
                self._lane(job).remove(job)
                job.late = True
                self._lane(job).add(job)
            else:
                self.remove(job)
                refused.append(job)
        return refused
