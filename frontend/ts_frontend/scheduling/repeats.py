"""Repetition of requests, for a model whose handler may be called twice for a request (`idempotent`).

A request that a worker had begun when it died runs again, once, and alone on its worker: if that worker dies too, it
was this request and no neighbour of it. Requests of a batch that failed as a whole run again in halves, until the
culprit fails alone: a request of a batch of N runs log2(N) + 1 times at most. Pure decisions: nothing waits, nothing is
sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ts_frontend.job import Job


@dataclass(slots=True)
class Repeats:
    """The numbers of a model version's requests that were repeated and that were given up. The plan of an idempotent
    model's workers has one."""

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
    """The groups of one queue that wait for repetition, in order and before all other jobs. They were accepted
    before, so limits don't apply."""

    def __init__(self) -> None:
        self._groups: deque[Group] = deque()

    def __bool__(self) -> bool:
        return bool(self._groups)

    def __len__(self) -> int:
        return sum(len(group.jobs) for group in self._groups)

    @property
    def has_alone(self) -> bool:
        """Returns whether a group waits for an idle worker."""
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
