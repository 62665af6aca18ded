"""The sequences of one model: the worker and the time for each request. Pure decisions, as in the batcher."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from ts_frontend.job import Job
from ts_frontend.scheduling.batcher import Full, Patience


class SequencedJob(Job):
    """A job of a sequence. `sequence_id`: "" for none. `starts`, `ends`: marked as its first or last request."""

    __slots__ = ("ends", "sequence_id", "starts")
    ends: bool
    starts: bool

    def in_sequence(self, sequence_id: str, starts: bool, ends: bool) -> None:
        """Names the sequence of the new job: its factory calls it first."""
        self.sequence_id, self.starts, self.ends = sequence_id, starts, ends


SequencedT = TypeVar("SequencedT", bound=SequencedJob)


@dataclass(frozen=True, slots=True)
class SequenceLimits:
    """The limits of a model's sequences. `idle_s`: seconds without requests after which a sequence ends, 0 for at
    once. `worker_max`: the most sequences that a worker holds, further ones wait (0: any number). `told_start`: only
    a request marked as the first begins a sequence."""

    sequences_max: int = 1
    worker_max: int = 0
    told_start: bool = False
    jobs_max: int = 1
    idle_s: float = 0.0
    life_s: float = math.inf
    batch_size: int = 1
    delay_s: float = 0.0
    lone_waits: bool = False
    jobs_alone_max: int = 100
    overlap: bool = False


class SequenceNotBegun(Exception):
    """The sequence hasn't begun, and the request isn't marked as its first, as this model requires."""


class SequenceLost(Exception):
    """The sequence is over, and its state is lost."""


class Sequence(Generic[SequencedT]):
    """`out`: its requests on the worker. `blocked_by`: the request that the next one waits for. `runs`: the number
    of requests that the worker has taken. `closed`: the reason why it accepts no more, "" while it does."""

    __slots__ = ("blocked_by", "closed", "id", "lost", "out", "runs", "waiting", "worker")

    def __init__(self, id: str) -> None:
        self.id = id
        self.waiting: OrderedDict[int, SequencedT] = OrderedDict()
        self.out: dict[int, SequencedT] = {}
        self.worker: Hashable | None = None
        self.blocked_by: int | None = None
        self.runs = 0
        self.closed = ""
        self.lost = False


#: Why a sequence is closed between its last request and that one's answer.
LAST_HAS_COME: Final = "its last request has come"
#: The number of ended sequences that are remembered; the oldest are forgotten.
OVER_MAX: Final = 4096


class SequenceBatcher(Generic[SequencedT]):
    """All sequences of a model. O(1) for each job that is added, taken, settled or removed."""

    def __init__(self, limits: SequenceLimits) -> None:
        self.limits = limits
        self._sequences: dict[str, Sequence[SequencedT]] = {}
        self._alone: OrderedDict[int, SequencedT] = OrderedDict()
        self._count = 0
        self._turn = itertools.count().__next__
        self._ready: dict[Hashable | None, OrderedDict[str, int]] = {}
        self._bound: dict[Hashable, set[str]] = {}
        self._idle: OrderedDict[str, float] = OrderedDict()
        self._aging: OrderedDict[str, float] = OrderedDict()
        self._over: OrderedDict[str, str] = OrderedDict()
        self.patience = Patience()

    def __len__(self) -> int:
        return self._count

    @property
    def sequences(self) -> int:
        return len(self._sequences)

    def holds(self, sequence_id: str) -> bool:
        """Whether a sequence is open here, or its state was lost here."""
        return sequence_id in self._sequences or sequence_id in self._over

    def sequences_of(self, worker: Hashable) -> int:
        return len(self._bound.get(worker, ()))

    def waiting(self) -> list[SequencedT]:
        out: list[SequencedT] = list(self._alone.values())
        for sequence in self._sequences.values():
            out += sequence.waiting.values()
        return out

    # --- jobs come and go

    def add(self, job: SequencedT, now_s: float) -> None:
        """Queues a job. Raises Full if there is no room for it or its sequence, or the sequence accepts no more;
        SequenceLost if its sequence is over; SequenceNotBegun."""
        self.expire(now_s)
        if not job.sequence_id:
            if len(self._alone) >= self.limits.jobs_alone_max:
                raise Full(f"{len(self._alone)} requests are waiting and the queue takes {self.limits.jobs_alone_max}")
            job.queued_at_s = now_s
            self._alone[job.id] = job
            self._count += 1
            return
        self._check_over(job)
        sequence = self._sequences.get(job.sequence_id) or self._open(job, now_s)
        if job.starts and sequence.closed == LAST_HAS_COME:  # the id's next sequence, which waits for the end of this
            sequence.closed = ""
            self._age(sequence, now_s)
        if sequence.closed:
            raise Full(f"sequence {sequence.id} takes no more requests: {sequence.closed}")
        if len(sequence.waiting) >= self.limits.jobs_max:
            raise Full(
                f"{len(sequence.waiting)} requests of sequence {sequence.id} are waiting, and it may have "
                f"{self.limits.jobs_max} (maxSequenceJobQueueSize)"
            )
        job.queued_at_s = now_s
        self.patience.came(now_s)
        sequence.waiting[job.id] = job
        self._count += 1
        self._idle.pop(sequence.id, None)
        if job.ends:
            sequence.closed = LAST_HAS_COME
        self._refresh(sequence)

    def _check_over(self, job: SequencedT) -> None:
        """Raises SequenceLost for a request of a sequence that is over: without its state, answers would be wrong."""
        if job.starts:
            self._over.pop(job.sequence_id, None)
        elif job.sequence_id in self._over:
            why = self._over[job.sequence_id]
            raise SequenceLost(f"Sequence {job.sequence_id} is over, {why}: start it again")

    def _open(self, job: SequencedT, now_s: float) -> Sequence[SequencedT]:
        if self.limits.told_start and not job.starts:
            raise SequenceNotBegun(
                f"sequence {job.sequence_id} has not begun: its first request has to say that it starts it"
            )
        if len(self._sequences) >= self.limits.sequences_max:
            raise Full(
                f"{len(self._sequences)} sequences are open and the model takes {self.limits.sequences_max} "
                f"(maxNumSequence)"
            )
        sequence = self._sequences[job.sequence_id] = Sequence(job.sequence_id)
        self._age(sequence, now_s)
        return sequence

    def _age(self, sequence: Sequence[SequencedT], now_s: float) -> None:
        """Begins the life of a sequence."""
        if self.limits.life_s != math.inf:
            self._aging[sequence.id] = now_s + self.limits.life_s
            self._aging.move_to_end(sequence.id)

    def remove(self, job: SequencedT, now_s: float = 0.0) -> bool:
        """Forgets a waiting job; returns False when it isn't here."""
        sequence = self._sequences.get(job.sequence_id)
        home = self._alone if sequence is None else sequence.waiting
        if home.pop(job.id, None) is None:
            return False
        self._count -= 1
        if sequence is not None:
            self._refresh(sequence)
            self._rest(sequence, now_s)
        return True

    def restore(self, jobs: list[SequencedT]) -> list[SequencedT]:
        """Puts back the jobs that a worker received but didn't start. Returns those whose state it took with it."""
        gone = []
        for job in reversed(jobs):
            sequence = self._sequences.get(job.sequence_id)
            if not job.sequence_id:
                self._alone[job.id] = job
                self._alone.move_to_end(job.id, last=False)
                self._count += 1
            elif sequence is None or (sequence.lost and sequence.runs > 1):
                gone.append(job)
            else:
                self._restore(sequence, job)
        return gone

    def _restore(self, sequence: Sequence[SequencedT], job: SequencedT) -> None:
        sequence.out.pop(job.id, None)
        if sequence.blocked_by == job.id:
            sequence.blocked_by = None
        sequence.waiting[job.id] = job
        sequence.waiting.move_to_end(job.id, last=False)
        self._count += 1
        sequence.runs -= 1
        if not sequence.runs:
            self._unbind(sequence)
            self._over.pop(sequence.id, None)
            sequence.lost = False
            sequence.closed = LAST_HAS_COME if job.ends else ""
        self._refresh(sequence)

    # --- giving them to workers

    def due_s(self, now_s: float, idle: bool = False) -> float:
        """Seconds until a free worker should look for work: 0 for now, inf for nothing. As `Batcher.due_s`."""
        if self._alone:
            return 0.0
        ready = [next(iter(lane)) for lane in self._ready.values() if lane]
        if not ready:
            return math.inf
        limits = self.limits
        if not limits.delay_s or any(len(lane) >= limits.batch_size for lane in self._ready.values()):
            return 0.0
        end_s = min(next(iter(self._sequences[name].waiting.values())).queued_at_s for name in ready) + limits.delay_s
        if idle and not limits.lone_waits:
            end_s = min(end_s, self.patience.end_s(sum(map(len, self._ready.values()))))
        return max(0.0, end_s - now_s)

    def has_work(self, worker: Hashable) -> bool:
        return bool(self._alone or self._ready.get(worker) or (self._ready.get(None) and self._has_place(worker)))

    def _has_place(self, worker: Hashable) -> bool:
        return not self.limits.worker_max or self.sequences_of(worker) < self.limits.worker_max

    def take(self, worker: Hashable, workers_free: int = 1) -> list[SequencedT]:
        """The next batch for a worker, each job of another sequence, in the order in which they became ready. It
        takes no more than its share, among `workers_free`, of the sequences without a worker."""
        if self._alone:
            _, job = self._alone.popitem(last=False)
            self._count -= 1
            return [job]
        batch: list[SequencedT] = []
        share = -(-len(self._ready.get(None, ())) // workers_free)
        while len(batch) < self.limits.batch_size:
            sequence = self._next(worker, share > 0)
            if sequence is None:
                break
            if sequence.worker is None:
                share -= 1
                sequence.worker = worker
                self._bound.setdefault(worker, set()).add(sequence.id)
            batch.append(self._send(sequence))
        self.patience.took(batch, self.limits.delay_s, full=len(batch) >= self.limits.batch_size)
        return batch

    def _next(self, worker: Hashable, unbound_too: bool) -> Sequence[SequencedT] | None:
        """Returns the sequence that has been ready for the longest time, among those of the lowest rank that this
        worker may take from."""
        heads = []
        for owner in (worker, None) if unbound_too and self._has_place(worker) else (worker,):
            lane = self._ready.get(owner)
            if lane:
                name = self._first(lane)
                heads.append((self._rank(name), lane[name], name, lane))
        if not heads:
            return None
        _, _, name, lane = min(heads, key=lambda head: head[:2])
        del lane[name]
        return self._sequences[name]

    def _first(self, lane: OrderedDict[str, int]) -> str:
        """The next sequence of those that are ready for one worker, or for any."""
        return next(iter(lane))

    def _rank(self, name: str) -> float:
        return 0.0

    def _send(self, sequence: Sequence[SequencedT]) -> SequencedT:
        _, job = sequence.waiting.popitem(last=False)
        self._count -= 1
        sequence.out[job.id] = job
        sequence.blocked_by = job.id
        sequence.runs += 1
        return job

    # --- answers

    def begun(self, job: SequencedT) -> None:
        """Notes a job's first answer, after which the sequence's next job may run at the same time (`overlap`)."""
        sequence = self._sequences.get(job.sequence_id)
        if self.limits.overlap and sequence is not None and sequence.blocked_by == job.id:
            sequence.blocked_by = None
            self._refresh(sequence)

    def settled(self, job: SequencedT, now_s: float) -> None:
        sequence = self._sequences.get(job.sequence_id)
        if sequence is None or sequence.out.pop(job.id, None) is None:
            return
        if sequence.blocked_by == job.id:
            sequence.blocked_by = None
        self._refresh(sequence)
        self._rest(sequence, now_s)

    def end(self, sequence_id: str, now_s: float) -> list[SequencedT]:
        """Ends a sequence at its handler's request. Returns the jobs that still waited for it."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return []
        sequence.closed = "its handler has ended it"
        return self._strand(sequence, now_s)

    def lose(self, worker: Hashable, now_s: float) -> list[SequencedT]:
        """Ends the sequences of a worker that accepts no more jobs. Returns the jobs that waited for it."""
        stranded: list[SequencedT] = []
        for name in sorted(self._bound.pop(worker, ())):
            sequence = self._sequences[name]
            sequence.lost = True
            sequence.closed = "the worker that held it has ended"
            self._remember(sequence, sequence.closed)
            stranded += self._strand(sequence, now_s)
        self._ready.pop(worker, None)
        return stranded

    def _remember(self, sequence: Sequence[SequencedT], why: str) -> None:
        """Remembers that a sequence is over. With `told_start` only lost sequences are remembered, because any other
        one that isn't open hasn't begun."""
        if sequence.runs and (sequence.lost or not self.limits.told_start):
            self._over[sequence.id] = why
            self._over.move_to_end(sequence.id)
            if len(self._over) > OVER_MAX:
                self._over.popitem(last=False)

    def _strand(self, sequence: Sequence[SequencedT], now_s: float) -> list[SequencedT]:
        stranded = list(sequence.waiting.values())
        sequence.waiting.clear()
        self._count -= len(stranded)
        self._refresh(sequence)
        self._rest(sequence, now_s)
        return stranded

    # --- time

    def expire(self, now_s: float) -> None:
        """Ends the sequences that have been idle for too long; closes those that are too old."""
        while self._aging and next(iter(self._aging.values())) <= now_s:
            name, _ = self._aging.popitem(last=False)
            sequence = self._sequences[name]
            sequence.closed = sequence.closed or "it is older than sequenceTimeoutMSec"
            self._rest(sequence, now_s)
        while self._idle and next(iter(self._idle.values())) <= now_s:
            name, _ = self._idle.popitem(last=False)
            self._forget(self._sequences[name])  # and not remembered: its id begins it again, as in TorchServe

    def next_end_s(self) -> float:
        """Returns the time of the next possible expiry (`time.monotonic()` seconds), inf for never."""
        ends = [next(iter(lane.values())) for lane in (self._idle, self._aging) if lane]
        return min(ends, default=math.inf)

    # --- bookkeeping

    def _refresh(self, sequence: Sequence[SequencedT]) -> None:
        """Lists a sequence as ready if its next job can run, and only then."""
        if not sequence.waiting or sequence.blocked_by is not None:
            self._ready.get(sequence.worker, OrderedDict()).pop(sequence.id, None)
            return
        lane = self._ready.setdefault(sequence.worker, OrderedDict())
        if sequence.id not in lane:
            lane[sequence.id] = self._turn()

    def _rest(self, sequence: Sequence[SequencedT], now_s: float) -> None:
        """Ends a sequence without waiting or running jobs, or lists it as idle."""
        if sequence.waiting or sequence.out:
            return
        if sequence.closed or not sequence.runs or not self.limits.idle_s:
            if sequence.closed:
                self._remember(sequence, sequence.closed)
            self._forget(sequence)
        else:
            self._idle[sequence.id] = now_s + self.limits.idle_s
            self._idle.move_to_end(sequence.id)

    def _unbind(self, sequence: Sequence[SequencedT]) -> None:
        self._ready.get(sequence.worker, OrderedDict()).pop(sequence.id, None)
        self._bound.get(sequence.worker, set()).discard(sequence.id)
        sequence.worker = None

    def _forget(self, sequence: Sequence[SequencedT]) -> None:
        self._unbind(sequence)
        self._ready.get(None, OrderedDict()).pop(sequence.id, None)
        self._idle.pop(sequence.id, None)
        self._aging.pop(sequence.id, None)
        del self._sequences[sequence.id]
