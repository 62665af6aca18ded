"""Turns of clients inside a model's queue: deficit round robin, by the worker time that their requests cost.

A client whose turn it is gets credit for some worker time, in proportion to its weight, and its requests are taken
while the credit lasts. A request costs what its client's requests took before; once it was measured, the difference is
given back or owed. Pure decisions: nothing here waits.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

from ts_frontend.job import Job
from ts_frontend.scheduling.batcher import Lane, Policy, Priorities, PriorityBatcher
from ts_frontend.scheduling.queues import PriorityQueue, SequenceJob
from ts_frontend.scheduling.sequences import Sequence, SequenceBatcher, SequenceLimits

#: The cost of a request of a model that has measured none, and the least one.
FIRST_S: Final = 0.001
LEAST_S: Final = 1e-6
#: How much the last measurement counts in an estimate.
NEWEST: Final = 0.2


class Workload:
    """A model's requests of all clients: `mean_s` is the time on a worker that one takes. It is a geometric mean, which
    a few long requests, and a long first one, don't raise much: it is also the credit of a turn, which should fit a
    usual request. With a smaller one, turns only come around more often."""

    __slots__ = ("mean_s",)

    def __init__(self) -> None:
        self.mean_s = FIRST_S

    def add(self, worked_s: float) -> None:
        self.mean_s *= (worked_s / self.mean_s) ** NEWEST


class Share:
    """A client's share of a model's workers. `credit_s`: the worker time that its requests may take now; negative after
    requests that took longer than estimated. `taken_s`: the time that they have taken, by its weight. `waiting`: its
    requests wait in the queue."""

    __slots__ = ("_own_s", "credit_s", "load", "taken_s", "waiting", "weight")

    def __init__(self, load: Workload, weight: float = 1.0) -> None:
        self.load, self.weight = load, weight
        self.credit_s, self.taken_s, self._own_s = 0.0, 0.0, 0.0
        self.waiting = 0

    @property
    def estimate_s(self) -> float:
        """The time on a worker that its next request will take."""
        return self._own_s or self.load.mean_s

    def settle(self, paid_s: float, worked_s: float) -> None:
        """A request took `worked_s` on a worker, and had cost `paid_s`."""
        worked_s = max(worked_s, LEAST_S)
        self.credit_s += paid_s - worked_s
        self.taken_s += (worked_s - paid_s) / self.weight
        if not self.waiting:
            self.credit_s = min(self.credit_s, 0.0)
        self._own_s += NEWEST * (worked_s - self._own_s) if self._own_s else worked_s
        self.load.add(worked_s)


class Ticket:
    """One request's place in the turns. `paid_s`: what its client has paid for it so far."""

    __slots__ = ("paid_s", "share")

    def __init__(self, share: Share) -> None:
        self.share, self.paid_s = share, 0.0


class FairLane(Lane):
    """Jobs of one level, whose clients take turns; those of one client are taken in arrival order. The credit of a turn
    is the same for a whole round, so that nobody's place in it counts."""

    def __init__(self, tickets: Mapping[int, Ticket]) -> None:
        super().__init__()
        self._turn_s, self._turns = FIRST_S, 0
        self._tickets = tickets
        #: The clients with waiting jobs; the first one has its turn.
        self._lines: OrderedDict[Share, OrderedDict[int, Job]] = OrderedDict()
        self._placed: dict[int, Ticket] = {}

    def add(self, job: Job, first: bool = False) -> None:
        super().add(job, first)
        ticket = self._placed[job.id] = self._tickets[job.id]
        share = ticket.share
        line = self._lines.get(share)
        if line is None:
            line = self._lines[share] = OrderedDict()
            share.credit_s = min(share.credit_s, 0.0) + self._turn_s * share.weight
        share.waiting += 1
        line[job.id] = job
        if first:
            line.move_to_end(job.id, last=False)

    def remove(self, job: Job) -> None:
        super().remove(job)
        share = self._placed.pop(job.id).share
        line = self._lines[share]
        del line[job.id]
        share.waiting -= 1
        if not line:
            del self._lines[share]
            share.credit_s = min(share.credit_s, 0.0)

    def take(self, job: Job) -> None:
        ticket = self._placed[job.id]
        share = ticket.share
        cost_s = share.estimate_s
        ticket.paid_s += cost_s
        share.credit_s -= cost_s
        self.remove(job)

    def next(self) -> Job:
        lines, passed = self._lines, 0
        while True:
            share, line = next(iter(lines.items()))
            missing_s = share.estimate_s - share.credit_s
            if missing_s > 0.0 and len(lines) == 1:  # nobody else could take its turn
                share.credit_s += missing_s
                missing_s = 0.0
            if missing_s <= 0.0:
                return next(iter(line.values()))
            share.credit_s += self._turn_s * share.weight
            lines.move_to_end(share)
            passed += 1
            self._turns += 1
            if self._turns >= len(lines):
                self._turns, self._turn_s = 0, share.load.mean_s
            if passed == len(lines):
                self._pass_rounds()
                passed = 0

    def _pass_rounds(self) -> None:
        """Gives all clients the credit of the rounds in which none of them has enough."""
        rounds = min(
            [math.floor((share.estimate_s - share.credit_s) / (self._turn_s * share.weight)) for share in self._lines]
        )
        if rounds > 0:
            for share in self._lines:
                share.credit_s += rounds * self._turn_s * share.weight


class FairBatcher(PriorityBatcher):
    """Jobs by Triton's levels, and within a level by the turns of their clients. `tickets`: those of jobs by id."""

    def __init__(self, policy: Policy, priorities: Priorities, tickets: Mapping[int, Ticket]) -> None:
        super().__init__(policy, priorities)
        self._tickets = tickets

    def _new_lane(self) -> Lane:
        return FairLane(self._tickets)


class FairQueue(PriorityQueue):
    """A queue in which clients take turns."""

    def __init__(self, policy: Policy, priorities: Priorities, tickets: Mapping[int, Ticket]) -> None:
        super().__init__(policy, priorities, FairBatcher(policy, priorities, tickets))


class FairSequences(SequenceBatcher[SequenceJob]):
    """Sequences whose clients take turns: next is one whose client has taken the least worker time so far. A client
    that had nothing to run has no turns to make up for. Taking a job costs O(sequences that are ready)."""

    def __init__(self, limits: SequenceLimits, tickets: Mapping[int, Ticket]) -> None:
        super().__init__(limits)
        self._tickets = tickets
        #: What the client of the last job had taken before it.
        self._clock_s = 0.0

    def _first(self, lane: OrderedDict[str, int]) -> str:
        return min(lane, key=self._rank)

    def _rank(self, name: str) -> float:
        job_id = next(iter(self._sequences[name].waiting))
        return max(self._tickets[job_id].share.taken_s, self._clock_s)

    def _send(self, sequence: Sequence[SequenceJob]) -> SequenceJob:
        job = super()._send(sequence)
        ticket = self._tickets[job.id]
        share, cost_s = ticket.share, ticket.share.estimate_s
        self._clock_s = max(share.taken_s, self._clock_s)
        share.taken_s = self._clock_s + cost_s / share.weight
        ticket.paid_s += cost_s
        return job
