"""Which jobs go together, and when. Decides purely: time is an argument, nothing waits, nothing is sent."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol


class Waiting(Protocol):
    """What the batcher needs to know of a job. `alone`: never shares a batch."""

    id: int
    size_bytes: int
    queued_at_s: float
    deadline_s: float
    alone: bool


@dataclass(frozen=True, slots=True)
class Policy:
    """How a model batches. `delay_s` is 0 unless its user asked for waiting."""

    batch_size: int = 1
    delay_s: float = 0.0
    jobs_max: int = 100
    bytes_max: int = 1 << 30


class Full(Exception):
    """The queue has no room; the message says for what and what would change it."""


class Batcher:
    """A bounded queue in arrival order. O(1) for each job that is added, taken or removed."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.size_bytes = 0
        self._jobs: OrderedDict[int, Waiting] = OrderedDict()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Waiting, now_s: float) -> None:
        """Queues a job; Full when it would be one too many, or too many bytes."""
        policy = self.policy
        if len(self._jobs) >= policy.jobs_max:
            raise Full(f"{len(self._jobs)} requests are waiting and the queue takes {policy.jobs_max} (job_queue_size)")
        if self._jobs and self.size_bytes + job.size_bytes > policy.bytes_max:
            raise Full(
                f"{self.size_bytes} bytes are waiting; {job.size_bytes} more are over the queue's "
                f"{policy.bytes_max} (job_queue_bytes_max)"
            )
        job.queued_at_s = now_s
        self._jobs[job.id] = job
        self.size_bytes += job.size_bytes

    def restore(self, jobs: list[Waiting]) -> None:
        """Puts jobs back to the head in their order, whatever the limits: they were accepted before."""
        for job in reversed(jobs):
            self._jobs[job.id] = job
            self._jobs.move_to_end(job.id, last=False)
            self.size_bytes += job.size_bytes

    def remove(self, job: Waiting) -> bool:
        """Forgets a job; False when it isn't here."""
        if self._jobs.pop(job.id, None) is None:
            return False
        self.size_bytes -= job.size_bytes
        return True

    def due_s(self, now_s: float) -> float:
        """Seconds until a free worker should take a batch: 0 for now, inf when nothing waits."""
        if not self._jobs:
            return math.inf
        policy = self.policy
        if not policy.delay_s or len(self._jobs) >= policy.batch_size:
            return 0.0
        first = next(iter(self._jobs.values()))
        return 0.0 if first.alone else max(0.0, first.queued_at_s + policy.delay_s - now_s)

    def take(self) -> list[Waiting]:
        """The next batch: up to `batch_size` jobs in arrival order; one that is `alone` goes alone."""
        batch: list[Waiting] = []
        jobs = self._jobs
        while jobs and len(batch) < self.policy.batch_size:
            if batch and next(iter(jobs.values())).alone:
                break
            _, job = jobs.popitem(last=False)
            self.size_bytes -= job.size_bytes
            batch.append(job)
            if job.alone:
                break
        return batch

    def waiting(self) -> list[Waiting]:
        """All jobs that wait, in order."""
        return list(self._jobs.values())
