"""What happens to requests, on its way to the metrics logs: the event loop appends small tuples, and the thread that
writes the logs makes lines of them, a few times a second.

Counters stand in the logs as increments. So under load, from EVENTS_MAX events of a period on, the rest of the period
is summed to one line for each metric and set of labels: the sums stay exact, and the cost is bounded.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from ts_frontend.telemetry.metrics_definitions import Definition, Definitions
from ts_frontend.telemetry.metrics_text import log_text

EVENTS_MAX = 64
#: After so many the thread offers the interpreter to the event loop, which it would else wait 5 ms for.
EVENTS_PER_TURN = 256
EVENTS_WAITING_MAX = 100_000

SERVER_LOG, MODEL_LOG = "TS_METRICS", "MODEL_METRICS"
REQUESTS, LATENCY, QUEUE_LATENCY = (
    "ts_inference_requests_total",
    "ts_inference_latency_microseconds",
    "ts_queue_latency_microseconds",
)
QUEUE_TIME, WORKER_THREAD_TIME, PREDICTION_TIME = "QueueTime", "WorkerThreadTime", "PredictionTime"


#: What an event is; plain numbers, because every request makes a few. Times in seconds.
#: ACCEPTED: source (model, version label). ANSWERED: the same, a: latency, b: time in the queue.
#: BATCH: source: model, a: time on the worker, b: time before that. HTTP: source: metric.
ACCEPTED, ANSWERED, BATCH, HTTP = range(4)

#: (what, source, a, b, `time.monotonic()` seconds, request ids)
Event: TypeAlias = "tuple[int, str | tuple[str, str], float, float, float, Sequence[str]]"
Feed: TypeAlias = "deque[Event]"


class Line(NamedTuple):
    """One line of a metrics log. `seconds`: since 1970."""

    seconds: float
    message: str

    def text(self) -> str:
        return self.message

    def parts(self) -> dict[str, object]:
        return {"message": self.message}


class _Sum:
    """Events of one kind and source: their number and sums, and the last of them."""

    __slots__ = ("a", "b", "count", "last")

    def __init__(self, event: Event) -> None:
        self.count, self.a, self.b, self.last = 1, event[2], event[3], event

    def add(self, event: Event) -> None:
        self.count += 1
        self.a += event[2]
        self.b += event[3]
        self.last = event


def _folded(feed: Feed, count: int) -> Iterable[_Sum]:
    """The next `count` events, summed."""
    sums: dict[object, _Sum] = {}
    for number in range(count):
        event = feed.popleft()
        key = event[0], event[1]
        known = sums.get(key)
        if known is None:
            sums[key] = _Sum(event)
        else:
            known.add(event)
        if number % EVENTS_PER_TURN == EVENTS_PER_TURN - 1:
            time.sleep(0)
    return sums.values()


class EventLog:
    """Makes the lines. `logged`: names of the metrics that go to the logs."""

    def __init__(self, definitions: Definitions, logged: Collection[str], host: str) -> None:
        self.feed: Feed = deque(maxlen=EVENTS_WAITING_MAX)
        self._definitions: Mapping[str, Definition] = {
            name: one for name, one in {**definitions.model, **definitions.server}.items() if name in logged
        }
        self._host = host

    def portions(self) -> list[tuple[str, list[Line]]]:
        """What has happened since the last call, as (name of the log, its lines). Called by the writing thread."""
        feed = self.feed
        count = len(feed)
        if not count:
            return []
        to_wall_s = time.time() - time.monotonic()
        single = min(count, EVENTS_MAX)
        sums = [*(_Sum(feed.popleft()) for _ in range(single)), *_folded(feed, count - single)]
        found = [entry for one in sums for entry in self._lines(one, one.last[4] + to_wall_s)]
        return [(log, [line for where, line in found if where == log]) for log in (SERVER_LOG, MODEL_LOG)]

    def _lines(self, one: _Sum, seconds: float) -> Iterator[tuple[str, Line]]:
        for name, value, labels in _values(one):
            definition = self._definitions.get(name)
            if definition is not None and len(labels) == len(definition.dimensions) - 1:
                pairs = dict(zip(definition.dimensions, labels, strict=False))
                log, ids = SERVER_LOG, ""
                if name == PREDICTION_TIME:
                    log, ids = MODEL_LOG, ",".join(one.last[5]) if one.count == 1 else ""
                yield log, Line(seconds, log_text(definition, value, pairs, self._host, seconds, ids))


def _values(one: _Sum) -> Iterator[tuple[str, float, tuple[str, ...]]]:
    """(metric, value, labels without the host): sums for counters, the last value for gauges."""
    what, source, a, b, _, _ = one.last
    labels = source if isinstance(source, tuple) else (source,)
    if what == ACCEPTED:
        yield REQUESTS, one.count, labels
    elif what == HTTP:
        yield labels[0], one.count, ("Host",)
    elif what == ANSWERED:
        yield LATENCY, microseconds(one.a), labels
        yield QUEUE_LATENCY, microseconds(one.b), labels
        yield QUEUE_TIME, int(b * 1000), ("Host",)
    else:
        yield WORKER_THREAD_TIME, int(b * 1000), ("Host",)
        yield PREDICTION_TIME, round(a * 1000, 2), (*labels, "Model")


def microseconds(seconds: float) -> float:
    """With three digits after the point, as TorchServe's nanosecond clock gives them."""
    return round(seconds * 1e6, 3)
