"""Divides a model's calls without a version between two versions, and watches how they end; what has become of the
calls and copies: their numbers, their curves over time, and the last differences."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
import uuid
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from ts.protocol.frames import COMPARISON, Input, Pairs
from ts_frontend.caching.cache import CACHE_HEADER, HIT
from ts_frontend.errors import Draining, NoWorker, QueueFull, SequenceOver, ServeError
from ts_frontend.job import Job, JobState
from ts_frontend.models.model import Model
from ts_frontend.rollouts.rule import Answered, Judge, Rule, difference
from ts_frontend.scheduling.queues import SequenceQueue
from ts_frontend.tasks import watched
from ts_frontend.telemetry.metrics.requests import BOUNDS_S, quantiles_s

#: Outcomes of requests, by version, in metrics.
ANSWERED: Final = "answered"
#: What became of the copies: same, different, failed, dropped, and uncompared (streams, large answers); the author's
#: comparison has failed.
SAME, DIFFERENT, FAILED, DROPPED, UNCOMPARED = "same", "different", "failed", "dropped", "uncompared"
COMPARISON_FAILED: Final = "comparison failed"
DIFFERENCES_KEPT_MAX: Final = 20
#: The characters of a difference's reason and of its request's id.
TOLD_MAX: Final = 300
#: The most points of the curves, and the seconds between the first ones. When there are more, they are joined in pairs.
POINTS_MAX, POINT_S = 100, 1.0
#: The numbers of a point, in order; `time`: the begin of its interval, in seconds since the epoch.
COLUMNS: Final = (
    *("time", "percent"),
    *(f"{version}_{name}" for version in ("old", "new") for name in ("answered", "failed", "p50_ms", "p99_ms")),
)


class _Ended:
    """A version's requests that ended in an interval: the failed ones, and the latencies of the answered ones."""

    __slots__ = ("_failed", "_latencies", "_numbers")

    def __init__(self) -> None:
        self._failed = 0
        self._latencies: Counter[int] = Counter()  # by their place in BOUNDS_S
        self._numbers: tuple[float | None, ...] = ()

    def add(self, failed: bool, seconds: float) -> None:
        self._numbers = ()
        if failed:
            self._failed += 1
        else:
            self._latencies[bisect_left(BOUNDS_S, seconds)] += 1

    def join(self, other: _Ended) -> None:
        self._numbers = ()
        self._failed += other._failed
        self._latencies.update(other._latencies)

    def numbers(self) -> tuple[float | None, ...]:
        """Those of COLUMNS. They are kept, since they change at the last point only."""
        if not self._numbers:
            counts = [0] * (len(BOUNDS_S) + 1)
            for place, count in self._latencies.items():
                counts[place] = count
            found = quantiles_s(counts, (0.5, 0.99))
            p50_ms, p99_ms = (None, None) if found is None else (round(one * 1000, 3) for one in found)
            self._numbers = self._latencies.total(), self._failed, p50_ms, p99_ms
        return self._numbers


@dataclass(slots=True)
class _Point:
    """The requests of an interval, by version. `percent`: the new version's share at its end."""

    place: int
    percent: float
    ended: dict[str, _Ended] = field(default_factory=lambda: defaultdict(_Ended))

    def join(self, later: _Point) -> None:
        self.percent = later.percent
        for version, ended in later.ended.items():
            self.ended[version].join(ended)


class Record:
    """`counts`: requests by version and outcome, `copies`: by result."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.copies: Counter[str] = Counter()
        self.differences: deque[dict[str, str]] = deque(maxlen=DIFFERENCES_KEPT_MAX)
        self._points: list[_Point] = []
        self._every_s = POINT_S

    def ended(self, version: str, failed: bool, seconds: float, *, percent: float, at_s: float) -> None:
        """Counts a request. `percent`: the new version's share; `at_s`: seconds since the epoch."""
        self.counts[version, FAILED if failed else ANSWERED] += 1
        points, place = self._points, int(at_s // self._every_s)
        if not points or place > points[-1].place:
            points.append(_Point(place, percent))
            if len(points) > POINTS_MAX:
                self._join()
        points[-1].percent = percent
        points[-1].ended[version].add(failed, seconds)

    def _join(self) -> None:
        """Doubles the interval until there are at most POINTS_MAX points."""
        points = self._points
        while len(points) > POINTS_MAX:
            self._every_s *= 2
            joined: list[_Point] = []
            for point in points:
                point.place //= 2
                if joined and joined[-1].place == point.place:
                    joined[-1].join(point)
                else:
                    joined.append(point)
            points[:] = joined

    def history(self, old: str, new: str) -> dict[str, Any]:
        """The curves of two versions: a row for each interval in which requests have ended."""
        rows = [
            (point.place * self._every_s, point.percent, *point.ended[old].numbers(), *point.ended[new].numbers())
            for point in self._points
        ]
        return {"seconds": self._every_s, "columns": COLUMNS, "rows": rows}

    def differs(self, request_id: str, why: str, answers: Sequence[str]) -> None:
        """Keeps a difference. `answers`: the old version's and the new one's, as they are shown."""
        old, new = answers
        self.differences.append(
            {
                "time": shown_time(time.time()),
                "requestId": request_id[:TOLD_MAX],
                "difference": why[:TOLD_MAX],
                "old": old,
                "new": new,
            }
        )


def shown_time(at_s: float) -> str:
    """Local time, of seconds since the epoch."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at_s))


#: The header, and the metadata, with the version that has answered.
VERSION_HEADER: Final = "x-model-version"
#: Larger requests and answers aren't kept for a comparison.
COMPARED_BYTES_MAX: Final = 1 << 20
#: The longest time of an author's comparison, the wait for its worker included.
COMPARISON_S_MAX: Final = 1.0
#: What the new version doesn't take at once.
_REFUSED: Final = (NoWorker, QueueFull, Draining)
_PLACES: Final = (1 << 64) / 100


class _Copied(NamedTuple):
    """What a copy of a request needs."""

    inputs: Sequence[Input]
    headers: Pairs
    request_id: str


class Divider:
    """`old`: the default version; `new`: the one that gets `percent` of the calls, and with `shadows` copies of the
    old version's. `percent` and `shadows` may change at any time."""

    def __init__(self, old: Model, new: Model, rule: Rule, judge: Judge, record: Record) -> None:
        self.old, self.new = old, new
        self.percent, self.shadows = 0.0, False
        #: Whether both versions take the same requests; nothing is sent to the new one before that is known.
        self.fits = False
        self.judge, self._record = judge, record
        self._measures = rule.measures
        self._function = rule.function
        self._sticky = rule.sticky
        self._salt = f"{new.name}\0{new.version}\0"  # other callers are the first to get the next version
        self._live: dict[int, _Copied | None] = {}
        self._copying = 0
        self._default: Model | None = None
        self._before = {model: model.ledger.on_left for model in (old, new)}
        for model, before in self._before.items():
            model.ledger.on_left = self._watch(model, before)

    def stand_before(self, default: Model) -> None:
        """Gets the calls that name no version in place of the default version."""
        if self._default is not default:
            self._leave()
            self._default, default.rollout = default, self.submit

    def _leave(self) -> None:
        if self._default is not None:
            self._default.rollout = None

    def close(self) -> None:
        """Leaves both versions as they were; requests in progress go on."""
        self._leave()
        for model, before in self._before.items():
            model.ledger.on_left = before

    # --- requests

    def submit(
        self, inputs: Sequence[Input], *, headers: Pairs, request_id: str | None, new_job: Any = None, **more: Any
    ) -> Job:
        """Accepts a request as `Model.submit`, which calls it for those that name no version. One that the new version
        can't take at once goes to the old one."""
        request_id = request_id or str(uuid.uuid4())
        more |= {"headers": headers, "request_id": request_id, "new_job": new_job, "routed": True}
        sequence_id = self._sequence_id(headers)
        if self._takes(headers, request_id, sequence_id, new_job is not None):
            try:
                return self._accepted(self.new, self.new.submit(inputs, **more), None)
            except _REFUSED:
                if sequence_id and _holds(self.new, sequence_id):
                    raise
                self._count(self.new, True, 0.0, time.monotonic())
        try:
            job = self.old.submit(inputs, **more)
        except (NoWorker, QueueFull):
            self._count(self.old, True, 0.0, time.monotonic())
            raise
        copied = None
        if self.shadows and self.fits and job.size_bytes <= COMPARED_BYTES_MAX and new_job is None:
            copied = _Copied(inputs, headers, request_id)
        return self._accepted(self.old, job, copied)

    def _takes(self, headers: Pairs, request_id: str, sequence_id: str, fed: bool) -> bool:
        """Whether the new version gets a request."""
        new = self.new
        if sequence_id:
            if _holds(new, sequence_id):
                return True
            if _holds(self.old, sequence_id):
                return False
        if not self.percent or not self.fits or not new.ready or (fed and not new.takes_streams):
            return False
        return self._place(headers, sequence_id or request_id) < self.percent

    def _place(self, headers: Pairs, request_id: str) -> float:
        """A caller's place from 0 to 100, always the same one."""
        caller = request_id
        if self._sticky:
            caller = next((value for name, value in headers if name.lower() == self._sticky), caller)
        found = hashlib.blake2b((self._salt + caller).encode("utf-8", "replace"), digest_size=8).digest()
        return int.from_bytes(found, "big") / _PLACES

    def _sequence_id(self, headers: Pairs) -> str:
        queue = self.old.queue
        if not isinstance(queue, SequenceQueue):
            return ""
        return next((value for name, value in headers if name.lower() == queue.keys.id), "")

    def _accepted(self, model: Model, job: Job, copied: _Copied | None) -> Job:
        told = (VERSION_HEADER, model.version)
        if job.done:  # the cache had its answer
            job.headers = (*job.headers, told)
        else:
            job.told = (*job.told, told)
            self._live[job.id] = copied
        return job

    # --- their ends

    def _watch(self, model: Model, before: Callable[[Job], None] | None) -> Callable[[Job], None]:
        live = self._live

        def left(job: Job) -> None:
            if before is not None:
                before(job)
            if job.id in live:
                self._left(model, job, live.pop(job.id))

        return left

    def _left(self, model: Model, job: Job, copied: _Copied | None) -> None:
        failed = _failed(job)
        if failed is None or (CACHE_HEADER, HIT) in job.headers:
            return
        now_s = time.monotonic()
        self._count(model, failed, now_s - job.queued_at_s, now_s)
        if copied is not None and not failed:
            self._copy(copied, job)

    def _count(self, model: Model, failed: bool, seconds: float, now_s: float) -> None:
        self._record.ended(model.version, failed, seconds, percent=self.percent, at_s=time.time())
        self.judge.observe(model is self.new, failed, seconds, now_s)

    # --- copies

    def _copy(self, copied: _Copied, job: Job) -> None:
        """Gives the new version a copy of a request that was answered, if one of its workers has nothing to do."""
        pieces = job.untaken
        if pieces is None or job.received_bytes > COMPARED_BYTES_MAX:
            self._record.copies[UNCOMPARED] += 1
            return
        if self._busy(self._copying):
            self._record.copies[DROPPED] += 1
            return
        self._copying += 1
        old = Answered(job.status, [bytes(piece) for piece in pieces], job.headers)
        watched(self._compare(copied, old), "The comparison of two versions' answers")

    def _busy(self, copying: int) -> bool:
        """Whether the new version has more to do than `copying` copies and their comparisons."""
        new = self.new
        return not new.ready or len(new.queue) > 0 or max(copying, new.ledger.sent) >= new.pool.ready_count

    async def _compare(self, copied: _Copied, old: Answered) -> None:
        try:
            self._record.copies[await self._result(copied, old)] += 1
        except _REFUSED:
            self._record.copies[DROPPED] += 1
        finally:
            self._copying -= 1

    async def _result(self, copied: _Copied, old: Answered) -> str:
        """What becomes of a copy. Raises one of _REFUSED if the new version can't take it."""
        try:
            job = self._ask(copied.inputs, copied.headers, copied.request_id)
            new = Answered(200, await job.pieces())
            new = new._replace(status=job.status, headers=job.headers)
        except _REFUSED:
            raise
        except ServeError as error:
            self.judge.compared(True)
            self._keep(copied, f"the new version failed: {error.message}", old, Answered(500, ()))
            return FAILED
        if job.received_bytes > COMPARED_BYTES_MAX:
            return UNCOMPARED
        form = copied.inputs[0].content_type if copied.inputs else ""
        if self._function and old.status == new.status and old.whole != new.whole:
            if self._busy(self._copying - 1):
                return DROPPED
            why, failed = await self._by_function(form, copied.request_id, old, new)
            if failed:
                self._keep(copied, f"the comparison failed: {failed}", old, new)
                return COMPARISON_FAILED
        else:
            why = await asyncio.to_thread(difference, form, old, new, self._measures)
        self.judge.compared(bool(why))
        if why:
            self._keep(copied, why, old, new)
        return DIFFERENT if why else SAME

    async def _by_function(self, form: str, request_id: str, old: Answered, new: Answered) -> tuple[str, str]:
        """Why the answers differ by the author's comparison, and why that has failed, each "" if it isn't so. A worker
        of the new version runs it. Raises as `_result`."""
        answers = {"old": old, "new": new}
        lengths = ((name, one.json_length) for name, one in answers.items())
        try:
            job = self._ask(
                [Input(name, COMPARISON, one.whole) for name, one in answers.items()],
                (("function", self._function), ("form", form), *lengths),
                request_id,
                deadline_s=time.monotonic() + COMPARISON_S_MAX,
                alone=True,
            )
            told = json.loads(b"".join(await job.pieces()))
        except _REFUSED:
            raise
        except ServeError as error:
            return "", error.message
        return told.get("differs", ""), told.get("failed", "")

    def _ask(self, inputs: Sequence[Input], headers: Pairs, request_id: str, **more: Any) -> Job:
        return self.new.submit(inputs, headers=headers, request_id=request_id, counted=False, routed=True, **more)

    def _keep(self, copied: _Copied, why: str, old: Answered, new: Answered) -> None:
        self._record.differs(copied.request_id, why, (old.shown, new.shown))


def open_sequences(model: Model) -> int:
    return model.queue.sequences if isinstance(model.queue, SequenceQueue) else 0


def _holds(model: Model, sequence_id: str) -> bool:
    return isinstance(model.queue, SequenceQueue) and model.queue.holds(sequence_id)


def _failed(job: Job) -> bool | None:
    """Whether the version is at fault for a request's end; None if the end says nothing about it."""
    if job.state is JobState.ANSWERED:
        return job.status >= 500
    failure = job.failure
    if job.state is JobState.CANCELLED or failure is None:
        return None
    error = failure.error()
    if isinstance(error, (Draining, SequenceOver)) or error.http_status < 500 and job.state is JobState.FAILED:
        return None
    return True
