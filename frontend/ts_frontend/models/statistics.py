"""Statistics of a model version since it was loaded, read from its ledger and its batches."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ts_frontend.job import Job, JobState, Ledger
from ts_frontend.telemetry.metrics.families import TIMES_MAX
from ts_frontend.workers.in_flight import BatchRecorder, Spent

_ANSWERED = JobState.ANSWERED


#: Responses of one request up to this number are counted, each under its number.
RESPONSES_MAX = 1024
_KINDS = ("success", "fail", "empty", "cancel")


@dataclass(slots=True)
class Kinds:
    """Responses with one number: the count of each kind, and the seconds since the previous one (or the request)."""

    success: tuple[int, float] = (0, 0.0)
    fail: tuple[int, float] = (0, 0.0)
    empty: tuple[int, float] = (0, 0.0)
    cancel: tuple[int, float] = (0, 0.0)


class CountedResponses:
    """Adds up the responses of a decoupled model version."""

    __slots__ = ("_by_index",)

    def __init__(self) -> None:
        self._by_index: dict[int, Kinds] = {}

    def response(self, index: int, kind: str, seconds: float) -> None:
        """An `OnResponse` of `ts_frontend.workers.in_flight`."""
        if index >= RESPONSES_MAX or kind not in _KINDS:
            return
        entry = self._by_index.setdefault(index, Kinds())
        count, total_s = getattr(entry, kind)
        setattr(entry, kind, (count + 1, total_s + seconds))

    def read(self) -> dict[int, Kinds]:
        return {index: replace(kinds) for index, kinds in sorted(self._by_index.items())}


class Batches(NamedTuple):
    """The handler calls with batches of one size: their count, their seconds on the worker, and the seconds of reading
    and writing tensors in them."""

    calls: int
    seconds: float
    read_s: float
    written_s: float


@dataclass(frozen=True, slots=True)
class Statistics:
    """Sums since the model was loaded; times in seconds. `queue_s`: from acceptance to the handler's turn, of all
    answered requests; `handler_s`: of the handler calls, counted for each request of a batch; `read_s` and `written_s`:
    of reading and writing tensors, not part of `handler_s`; `batches`: by size; `responses`: of a decoupled model, by
    their number from 0. `last_at_s`: the time of the last request in seconds since 1970, 0 for none."""

    answered: int = 0
    answered_s: float = 0.0
    failed: int = 0
    failed_s: float = 0.0
    queue_s: float = 0.0
    handler_s: float = 0.0
    read_s: float = 0.0
    written_s: float = 0.0
    last_at_s: float = 0.0
    waiting: int = 0
    batches: Mapping[int, Batches] = field(default_factory=dict)
    responses: Mapping[int, Kinds] = field(default_factory=dict)

    @property
    def calls(self) -> int:
        return sum(batches.calls for batches in self.batches.values())

    @property
    def worked_s(self) -> float:
        """The seconds that answered requests spent on workers."""
        return self.handler_s + self.read_s + self.written_s


@dataclass(slots=True)
class _Seen:
    """The sums for a batch size as of the last read."""

    calls: float = 0
    answered: float = 0
    read_s: float = 0.0
    written_s: float = 0.0


class CountedBatches:
    """Adds up the batches of one model version's workers, and passes them on to `recorder`."""

    def __init__(self, recorder: BatchRecorder) -> None:
        self.responses = CountedResponses()
        self._recorder = recorder
        #: For each size: calls, their seconds, and the answered requests.
        self._sizes: dict[int, list[float]] = {}
        #: The seconds of batches of one answered request, which are added up together, at the latest when there are
        #: TIMES_MAX.
        self._lone: list[float] = []
        self._spent: dict[int, tuple[float, float]] = {}
        self._waited_s = self._handler_s = 0.0
        self._seen: dict[int, _Seen] = {}
        #: The sums for answered requests, as of the last read.
        self._read_s = self._written_s = 0.0

    def answered(self, jobs: Sequence[Job], waited_s: float, worked_s: float, now_s: float) -> None:
        if len(jobs) == 1 and jobs[0].state is _ANSWERED:
            lone = self._lone
            lone.append(worked_s)
            self._waited_s += waited_s
            if len(lone) >= TIMES_MAX:
                self._sum_up()
        else:
            self._add(len(jobs), 1, sum([job.state is _ANSWERED for job in jobs]), waited_s, worked_s)
        self._recorder.answered(jobs, waited_s, worked_s, now_s)

    def _add(self, size: int, calls: int, answered: int, waited_s: float, worked_s: float) -> None:
        """Adds batches of one size, each with the same part of answered requests."""
        entry = self._sizes.get(size) or self._sizes.setdefault(size, [0, 0.0, 0])
        entry[0] += calls
        entry[1] += worked_s
        entry[2] += answered
        self._waited_s += waited_s * answered / calls
        self._handler_s += worked_s * answered / calls

    def _sum_up(self) -> None:
        lone, self._lone = self._lone, []
        if lone:
            self._add(1, len(lone), len(lone), 0.0, sum(lone))

    def loaded(self, worker_id: int, seconds: float) -> None:
        self._recorder.loaded(worker_id, seconds)

    def spent(self, spent: Spent) -> None:
        """Keeps the time that an ended worker spent on reading and writing tensors."""
        self._spent = _added([self._spent, spent])

    def read(self, ledger: Ledger, working: Iterable[Spent] = ()) -> Statistics:
        """The sums, with those of the model version's ledger and of its running workers. The parts never exceed the
        whole, since clients subtract them: the handler's time is measured after its answers were sent, and is reduced
        where necessary, as are the times of reading and writing."""
        self._sum_up()
        queue_s = ledger.queued_s + self._waited_s
        last_at_s = time.time() - (time.monotonic() - ledger.last_s) if ledger.last_s else 0.0
        spent = _added([self._spent, *working])
        batches: dict[int, Batches] = {}
        for size, (calls, seconds, answered) in sorted(self._sizes.items()):
            parts = _at_most(spent.get(size, (0.0, 0.0)), seconds)
            batches[size] = Batches(int(calls), seconds, *parts)
            self._share(self._seen.setdefault(size, _Seen()), calls, answered, parts)
        worked_s = max(min(self._handler_s, ledger.answered_s - queue_s), 0.0)
        read_s, written_s = _at_most((self._read_s, self._written_s), worked_s)
        return Statistics(
            answered=ledger.answered,
            answered_s=ledger.answered_s,
            failed=ledger.failed,
            failed_s=ledger.failed_s,
            queue_s=queue_s,
            handler_s=worked_s - read_s - written_s,
            read_s=read_s,
            written_s=written_s,
            last_at_s=last_at_s,
            waiting=ledger.queued,
            batches=batches,
            responses=self.responses.read(),
        )

    def _share(self, seen: _Seen, calls: float, answered: float, parts: tuple[float, float]) -> None:
        """Adds the tensors read and written since the last call, by the share of answered requests since then. A
        call that failed thus takes nothing away: clients take the sums for counters, which never fall."""
        share = (answered - seen.answered) / (calls - seen.calls) if calls > seen.calls else answered / calls
        read_s, written_s = max(parts[0], seen.read_s), max(parts[1], seen.written_s)
        self._read_s += (read_s - seen.read_s) * share
        self._written_s += (written_s - seen.written_s) * share
        seen.calls, seen.answered, seen.read_s, seen.written_s = calls, answered, read_s, written_s


def _added(sums: Iterable[Spent]) -> dict[int, tuple[float, float]]:
    found: dict[int, tuple[float, float]] = {}
    for one in sums:
        for size, (read_s, written_s) in one.items():
            before = found.get(size, (0.0, 0.0))
            found[size] = before[0] + read_s, before[1] + written_s
    return found


def _at_most(parts: tuple[float, float], whole_s: float) -> tuple[float, float]:
    """Both parts, scaled by one factor when their sum exceeds the whole."""
    both_s = sum(parts)
    if both_s <= whole_s:
        return parts
    return parts[0] * whole_s / both_s, parts[1] * whole_s / both_s
