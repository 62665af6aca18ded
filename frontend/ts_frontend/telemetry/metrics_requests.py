"""What the path of a request calls: one recorder for each model and version label, one for the batches of a model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from ts_frontend.job import Job
from ts_frontend.telemetry.metrics_events import ACCEPTED, ANSWERED, EVENTS_MAX, EventLog
from ts_frontend.telemetry.metrics_samples import NOTHING, Sample


class Requests(Protocol):
    """Requests to one model, under one version label ("default" for calls that name none)."""

    def accepted(self) -> None:
        """A request for the model has come, and may still be refused."""

    def answered(self, queued_at_s: float, sent_at_s: float, now_s: float) -> None:
        """It was queued, sent to a worker, and answered; `time.monotonic()` seconds."""


class CountedRequests:
    """Requests as series for Prometheus; `latency_s` and `queue_s` are ours, in seconds."""

    __slots__ = ("_latency", "_latency_s", "_queue", "_queue_s", "_queue_time", "_requests")

    def __init__(
        self,
        requests: Sample,
        latency: Sample,
        queue: Sample,
        queue_time: Sample,
        latency_s: Sample,
        queue_s: Sample,
    ) -> None:
        self._requests, self._latency, self._queue = requests, latency, queue
        self._queue_time, self._latency_s, self._queue_s = queue_time, latency_s, queue_s

    def accepted(self) -> None:
        self._requests.add(1.0)

    def answered(self, queued_at_s: float, sent_at_s: float, now_s: float) -> None:
        latency_s = now_s - queued_at_s
        queue_s = sent_at_s - queued_at_s
        self._latency.add(latency_s * 1e6)
        self._queue.add(queue_s * 1e6)
        self._queue_time.add(int(queue_s * 1e3))
        self._latency_s.add(latency_s)
        self._queue_s.add(queue_s)


#: Of a model that is gone.
UNSEEN = CountedRequests(*[NOTHING] * 6)


class LoggedRequests:
    """Requests for the metrics log, and for `counted` as well."""

    __slots__ = ("_accepted", "_answered", "_counted", "_feed", "_source")

    def __init__(self, log: EventLog, source: tuple[str, str], counted: Requests | None) -> None:
        self._feed, self._source, self._counted = log.feed, source, counted
        self._accepted, self._answered = log.tally(ACCEPTED, source), log.tally(ANSWERED, source)

    def accepted(self) -> None:
        if len(self._feed) < EVENTS_MAX:
            self._feed.append((ACCEPTED, self._source, 0.0, 0.0, time.monotonic(), ()))
        else:
            self._accepted.now.count += 1
        if self._counted is not None:
            self._counted.accepted()

    def answered(self, queued_at_s: float, sent_at_s: float, now_s: float) -> None:
        if len(self._feed) < EVENTS_MAX:
            self._feed.append((ANSWERED, self._source, now_s - queued_at_s, sent_at_s - queued_at_s, now_s, ()))
        else:
            queue_s = sent_at_s - queued_at_s
            total = self._answered.now
            total.count += 1
            total.a += now_s - queued_at_s
            total.b += queue_s
            total.last_b = queue_s
        if self._counted is not None:
            self._counted.answered(queued_at_s, sent_at_s, now_s)


class Batches(Protocol):
    """Batches of one model's workers, and the loads of their models."""

    def answered(self, jobs: Sequence[Job], waited_s: float, worked_s: float, now_s: float) -> None:
        """A batch is complete: it was on its way or behind another for `waited_s`, then on the worker."""

    def loaded(self, worker_id: int, seconds: float) -> None:
        """A worker has loaded the model, so long after it was created."""
