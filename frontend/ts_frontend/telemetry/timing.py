"""The time of a request in parts, on demand: `x-torchrelay-timing: 1`, or `access_log_timing`.

`Asking` has the requests that are timed. It is consulted only after the first of them; the jobs of other requests carry
None.
"""

from __future__ import annotations

import time
from collections import deque
from contextvars import ContextVar
from typing import Final, NamedTuple

from ts.protocol.frames import Times
from ts_frontend.job import Job, Whereabouts

#: The header that a client sends, and the one that it gets.
ASK: Final = "x-torchrelay-timing"
ANSWER: Final = "server-timing"
#: The most jobs reported of a stream of requests or a workflow: the latest.
JOBS_TOLD_MAX: Final = 8


class JobParts(NamedTuple):
    """The parts of one job's time in seconds; None: not reached yet."""

    queue_s: float
    batch_wait_s: float
    cold_start_s: float
    transfer_s: float | None = None
    handler_s: float | None = None
    encode_s: float | None = None


class JobTimes:
    """The times of one job. `batches`: its model waits for batches to fill (`maxBatchDelay`)."""

    __slots__ = ("_arrived_s", "_batches", "_place", "_queued_s", "_sent_s", "_times", "model")

    def __init__(self, model: str, batches: bool) -> None:
        self.model, self._batches = model, batches
        self._queued_s = self._sent_s = self._arrived_s = 0.0
        self._place: Whereabouts | None = None
        self._times: Times | None = None

    def sent(self, job: Job, place: Whereabouts) -> None:
        self._queued_s, self._sent_s, self._place = job.queued_at_s, job.sent_at_s, place

    def measured(self, times: Times, now_s: float) -> None:
        self._times, self._arrived_s = times, now_s

    def parts(self) -> JobParts | None:
        """Returns the parts, None for a job that no worker has taken."""
        place, times = self._place, self._times
        if place is None:
            return None
        waited_s = self._sent_s - self._queued_s
        cold_s = min(max(place.ready_at_s - self._queued_s, 0.0), waited_s)
        filling_s = 0.0
        if self._batches and place.free_since_s is not None:
            filling_s = min(max(self._sent_s - max(place.free_since_s, self._queued_s), 0.0), waited_s - cold_s)
        queue_s = waited_s - cold_s - filling_s
        if times is None:
            return JobParts(queue_s, filling_s, cold_s)
        travelled_s = times.begun_s - self._sent_s + self._arrived_s - times.given_s
        handler_s, encode_s = times.ended_s - times.begun_s, times.given_s - times.ended_s
        return JobParts(queue_s, filling_s, cold_s, travelled_s, handler_s, encode_s)

    def entries(self) -> list[str]:
        parts, place = self.parts(), self._place
        if parts is None or place is None:
            return []
        found = [_took("queue", parts.queue_s), _took("batch-wait", parts.batch_wait_s)]
        found.append(f'batch;desc="{place.batch_size}"')
        for name, seconds in (("transfer", parts.transfer_s), ("handler", parts.handler_s), ("encode", parts.encode_s)):
            if seconds is not None:
                found.append(_took(name, seconds))
        found += [f'worker;desc="{place.worker_id}"', _took("cold-start", parts.cold_start_s)]
        return found


class RequestTimes:
    """The jobs of one request or call. `told`: the client asked for them; otherwise only the access log shows them."""

    __slots__ = ("_begun_s", "_jobs", "told")

    def __init__(self, *, told: bool) -> None:
        self._begun_s = time.monotonic()
        self.told = told
        self._jobs: deque[JobTimes] = deque(maxlen=JOBS_TOLD_MAX)

    def add(self, model: str, batches: bool) -> JobTimes:
        job = JobTimes(model, batches)
        self._jobs.append(job)
        return job

    def text(self) -> str:
        """Returns the value of a Server-Timing header for now: the parts known so far, and the time since the request
        came. With several jobs, each one's entries begin with its model."""
        entries: list[str] = []
        for job in self._jobs:
            if len(self._jobs) > 1:
                entries.append(f'model;desc="{job.model}"')
            entries += job.entries()
        return ", ".join([*entries, _took("total", time.monotonic() - self._begun_s)])


def _took(name: str, seconds: float) -> str:
    return f"{name};dur={max(seconds, 0.0) * 1000:.3f}"


class Asking:
    """The timed requests, each by its task and the tasks made in it. `ever`: there was one."""

    def __init__(self) -> None:
        self.ever = False
        self._current: ContextVar[RequestTimes | None] = ContextVar("asked", default=None)

    def begin(self, times: RequestTimes) -> RequestTimes:
        """Times the jobs that this task, and tasks made in it, submit from now on."""
        self.ever = True
        self._current.set(times)
        return times

    def end(self) -> None:
        """Times no further jobs of this task."""
        self._current.set(None)

    def job(self, model: str, batches: bool) -> JobTimes | None:
        """Returns the timer of a new job, None if its request isn't timed."""
        times = self._current.get()
        return None if times is None else times.add(model, batches)


asking: Final = Asking()
