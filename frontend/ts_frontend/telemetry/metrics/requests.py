"""Recorders on the path of a request, one for each model and version label, and the lines of the metrics logs."""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from ts.protocol.text import printable
from ts_frontend.job import Job, JobState
from ts_frontend.telemetry.logging.writer import MAIN, Source
from ts_frontend.telemetry.metrics.families import (
    HOST_DIMENSION,
    NOTHING,
    TIMES_MAX,
    Definition,
    Definitions,
    MetricKind,
    Sample,
)

if TYPE_CHECKING:
    from ts_frontend.telemetry.metrics.registry import MetricsRegistry

_ANSWERED: Final = JobState.ANSWERED
DEFAULT_VERSION: Final = "default"
EVENTS_MAX: Final = 64
#: The most handler metrics that wait for the writing thread; further ones are dropped and counted.
RECORDS_MAX: Final = 10_000

SERVER_LOG: Final = "TS_METRICS"
MODEL_LOG: Final = "MODEL_METRICS"
REQUESTS: Final = "ts_inference_requests_total"
LATENCY: Final = "ts_inference_latency_microseconds"
QUEUE_LATENCY: Final = "ts_queue_latency_microseconds"
QUEUE_TIME: Final = "QueueTime"
WORKER_THREAD_TIME: Final = "WorkerThreadTime"
PREDICTION_TIME: Final = "PredictionTime"
STEPS_PER_OCTAVE: Final = 6
#: Upper ends of the buckets, 12 % apart: 10 µs to 11 minutes.
BOUNDS_S: Final = tuple(1e-5 * 2 ** (step / STEPS_PER_OCTAVE) for step in range(26 * STEPS_PER_OCTAVE + 1))


#: Kinds of events; plain numbers for speed. Times in seconds.
#: ACCEPTED: source (model, version label). ANSWERED: the same, a: latency, b: time in the queue.
#: BATCH: source: model, a: time on the worker, b: time before that. HTTP: source: metric.
ACCEPTED: Final = 0
ANSWERED: Final = 1
BATCH: Final = 2
HTTP: Final = 3

EventSource: TypeAlias = "str | tuple[str, str]"
#: (kind, source, a, b, `time.monotonic()` seconds, request ids)
Event: TypeAlias = "tuple[int, EventSource, float, float, float, Sequence[str]]"
Feed: TypeAlias = "deque[Event]"


def java_double(value: float) -> str:
    """`value` as Java's Double.toString writes it: 4.0, 1.0E7, 5.0E-4; infinities and NaN as Prometheus writes them."""
    value = float(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        return repr(value)
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    first, rest = digits[0], "".join(map(str, digits[1:])) or "0"
    return f"{'-' * sign}{first}.{rest}E{len(digits) - 1 + int(exponent)}"


def log_text(
    definition: Definition, value: float, labels: Mapping[str, str], host: str, seconds: float, request_ids: str = ""
) -> str:
    """A metric as the metrics logs have it. `labels` without the host; `seconds`: since 1970."""
    dimensions = ",".join(f"{name}:{text}" for name, text in labels.items())
    ids = f"requestID:{request_ids}," if request_ids else ""
    head = f"{definition.name}.{definition.unit}:{java_double(value)}|#{dimensions}"
    return f"{head}|#hostname:{host},{ids}timestamp:{int(seconds)}"


METRICS_PREFIX: Final = "[METRICS]"

#: `NAME.UNIT:VALUE|#DIM:VALUE,…[|#type:COUNTER][|#help:TEXT][|#buckets:0.1;1]|#hostname:HOST,EPOCH_S[,REQUEST_ID,…]`
_RECORD: Final = re.compile(
    r"(?P<name>[\w\s:]+)\.(?P<unit>[\w\s]+):(?P<value>[^|]+)\|#(?P<labels>[^|]*)(?:\|#type:(?P<kind>\w+))?"
    r"(?:\|#help:(?P<help>[^|]*))?(?:\|#buckets:(?P<buckets>[^|]*))?"
    r"\|#hostname:(?P<host>[^,|]*),(?:timestamp:)?(?P<seconds>\d{1,18})(?:,(?P<ids>.*))?"
)
#: The most buckets of a histogram that a model declares.
BOUNDS_MAX: Final = 100
_KINDS: Final = {kind.name: kind for kind in MetricKind}


@dataclass(frozen=True, slots=True)
class Record:
    """One value of one metric. `labels` in the order of the line; `request_ids`: joined by commas. `help`: the text of
    a metric that the model declares itself, None for one that metrics.yaml should list; `bounds`: of its histogram."""

    name: str
    unit: str
    value: float
    labels: dict[str, str]
    kind: MetricKind
    host: str
    seconds: int
    request_ids: str
    help: str | None = None
    bounds: tuple[float, ...] = ()

    def definition(self) -> Definition:
        """The metric's definition by the record itself."""
        return Definition(self.name, self.kind, self.unit, (*self.labels, HOST_DIMENSION))

    def values(self, definition: Definition) -> tuple[str, ...] | None:
        """Its label values in the definition's order: by name, or else by position; None if they don't match it."""
        names = definition.dimensions[:-1]
        if len(names) != len(self.labels):
            return None
        if self.labels.keys() == set(names):
            return (*(self.labels[name] for name in names), self.host)
        return (*self.labels.values(), self.host)

    def text(self, definition: Definition, values: tuple[str, ...]) -> str:
        """Its line in the metrics log, with that definition and the label values that `values` returned for it."""
        labels = dict(zip(definition.dimensions[:-1], values, strict=False))
        return log_text(definition, self.value, labels, self.host, self.seconds, self.request_ids)


def parse_record(line: str) -> Record | None:
    """The record in a line, with or without METRICS_PREFIX; None when it isn't one."""
    match = _RECORD.fullmatch(line.removeprefix(METRICS_PREFIX))
    if match is None:
        return None
    try:
        value = float(match["value"])
        texts = (match["buckets"] or "").split(";")[:BOUNDS_MAX]
        bounds = tuple(sorted(bound for bound in map(float, filter(None, texts)) if math.isfinite(bound)))
    except ValueError:
        return None
    kind = _KINDS.get((match["kind"] or "GAUGE").upper())
    if kind is None or (kind is MetricKind.COUNTER and (value < 0 or math.isnan(value))):
        return None
    labels = dict(part.partition(":")[::2] for part in match["labels"].split(",") if part)
    seconds = int(match["seconds"])
    ids = match["ids"] or ""
    return Record(match["name"], match["unit"], value, labels, kind, match["host"], seconds, ids, match["help"], bounds)


class MetricLine(NamedTuple):
    """One line of a metrics log. `seconds`: since 1970."""

    seconds: float
    message: str

    @property
    def source(self) -> str:
        return MAIN

    @property
    def level(self) -> int:
        return logging.INFO

    def text(self) -> str:
        return printable(self.message)

    def parts(self) -> dict[str, object]:
        return {"message": self.message}


class Sum:
    """Events of one kind and source: their number, their sums, and the last of the values. The thread of an event adds
    it here; it must look up `Tally.now` each time, and do nothing in between."""

    __slots__ = ("a", "b", "count", "last_a", "last_b")

    def __init__(self) -> None:
        self.count = 0
        self.a = self.b = self.last_a = self.last_b = 0.0


class Tally:
    """The current sum and the one before it: the writing thread takes the earlier one, a period after the event loop
    last used it, so that no lock is needed."""

    __slots__ = ("_before", "now", "released", "source", "what")

    def __init__(self, what: int, source: EventSource) -> None:
        self.what, self.source = what, source
        self.now = Sum()
        self._before: Sum | None = None
        self.released = False

    def take(self) -> Sum | None:
        """The completed sum, None when there is none. Calling it until `empty` returns everything."""
        complete, self._before = self._before, None
        if self.now.count:
            self._before, self.now = self.now, Sum()
        return complete

    @property
    def empty(self) -> bool:
        """Whether there is nothing to take, now or the next time."""
        return self._before is None and not self.now.count


class EventLog:
    """Makes the lines. `logged`: names of the metrics that go to the logs."""

    def __init__(self, definitions: Definitions, logged: Collection[str], host: str) -> None:
        self.feed: Feed = deque()
        #: Called with the source of the lines when there is something to write again.
        self.on_news: Callable[[Source], None] = lambda source: None
        self._tallies: dict[tuple[int, EventSource], Tally] = {}
        self._making = threading.Lock()
        self._records: deque[tuple[Record, Definition, tuple[str, ...]]] = deque()
        self._dropped = 0
        self._definitions: Mapping[str, Definition] = {
            name: one for name, one in {**definitions.model, **definitions.server}.items() if name in logged
        }
        self._host = host

    def add(self, event: Event) -> None:
        """Adds one event, for which `feed` has room."""
        self.feed.append(event)
        if len(self.feed) == 1:
            self.on_news(self.news)

    def tally(self, what: int, source: EventSource) -> Tally:
        """The tally for events that the feed has no room for."""
        with self._making:
            tally = self._tallies.setdefault((what, source), Tally(what, source))
            tally.released = False
        return tally

    def release(self, what: int, source: EventSource) -> None:
        """No more events of that source are added: its tally is removed once its sums are written."""
        with self._making:
            tally = self._tallies.get((what, source))
            if tally is not None:
                tally.released = True

    def _forget(self, tally: Tally) -> None:
        """Removes a released, empty tally, unless it is in use again. Called by the writing thread."""
        with self._making:
            if tally.released and tally.empty:
                self._tallies.pop((tally.what, tally.source), None)

    def record(self, record: Record, definition: Definition, values: tuple[str, ...]) -> None:
        """One value of a metric that a handler reported."""
        if len(self._records) < RECORDS_MAX:
            self._records.append((record, definition, values))
            if len(self._records) == 1:
                self.on_news(self.news)
        else:
            self._dropped += 1

    def portions(self) -> list[tuple[str, list[MetricLine]]]:
        """The new lines, as (log's name, its lines). Called by the writing thread; at the end, until it is empty."""
        wall_s = time.time()
        found = self._single(wall_s)
        for tally in list(self._tallies.values()):
            one = tally.take()
            if one is None:
                if tally.released:
                    self._forget(tally)
            else:
                values = _values(tally.what, tally.source, one.count, one.a, one.b, one.last_a, one.last_b)
                found += self._lines(values, wall_s, "")
        found += self._recorded(wall_s)
        return _by_log(found)

    def news(self) -> list[tuple[str, list[MetricLine]]]:
        """The same without the sums, whose parts may come until the period ends."""
        wall_s = time.time()
        return _by_log([*self._single(wall_s), *self._recorded(wall_s)])

    def _single(self, wall_s: float) -> list[tuple[str, MetricLine]]:
        found: list[tuple[str, MetricLine]] = []
        to_wall_s = wall_s - time.monotonic()
        for _ in range(len(self.feed)):
            what, source, a, b, at_s, ids = self.feed.popleft()
            values = _values(what, source, 1, a, b, a, b)
            found += self._lines(values, at_s + to_wall_s, ",".join(ids))
        return found

    def _recorded(self, wall_s: float) -> Iterator[tuple[str, MetricLine]]:
        for _ in range(len(self._records)):
            record, definition, values = self._records.popleft()
            yield MODEL_LOG, MetricLine(wall_s, record.text(definition, values))
        if self._dropped:
            count, self._dropped = self._dropped, 0
            logging.getLogger(__name__).warning(
                "%d metrics of handlers were dropped: they came faster than they could be written", count
            )

    def _lines(
        self, values: Iterable[tuple[str, float, tuple[str, ...]]], seconds: float, ids: str
    ) -> Iterator[tuple[str, MetricLine]]:
        for name, value, labels in values:
            definition = self._definitions.get(name)
            if definition is not None and len(labels) == len(definition.dimensions) - 1:
                pairs = dict(zip(definition.dimensions, labels, strict=False))
                for_model = name == PREDICTION_TIME
                text = log_text(definition, value, pairs, self._host, seconds, ids if for_model else "")
                yield MODEL_LOG if for_model else SERVER_LOG, MetricLine(seconds, text)


def _by_log(found: Sequence[tuple[str, MetricLine]]) -> list[tuple[str, list[MetricLine]]]:
    return [(log, [line for where, line in found if where == log]) for log in (SERVER_LOG, MODEL_LOG)]


def _values(
    what: int, source: EventSource, count: int, a: float, b: float, last_a: float, last_b: float
) -> Iterator[tuple[str, float, tuple[str, ...]]]:
    """(metric, value, labels without the host): sums for counters, the last value for gauges."""
    labels = source if isinstance(source, tuple) else (source,)
    if what == ACCEPTED:
        yield REQUESTS, count, labels
    elif what == HTTP:
        yield labels[0], count, ("Host",)
    elif what == ANSWERED:
        yield LATENCY, microseconds(a), labels
        yield QUEUE_LATENCY, microseconds(b), labels
        yield QUEUE_TIME, int(last_b * 1000), ("Host",)
    else:
        yield WORKER_THREAD_TIME, int(last_b * 1000), ("Host",)
        yield PREDICTION_TIME, round(last_a * 1000, 2), (*labels, "Model")


def microseconds(seconds: float) -> float:
    """Microseconds with three decimals, as TorchServe's nanosecond clock gives them."""
    return round(seconds * 1e6, 3)


class Unsummed:
    """The recorders with values to be added up, which happens when their series are read."""

    def __init__(self) -> None:
        self._recorders: dict[CountedRequests, None] = {}

    def add(self, recorder: CountedRequests) -> None:
        self._recorders[recorder] = None

    def sum_up(self) -> None:
        for recorder in self._recorders:
            recorder.sum_up()
        self._recorders.clear()


class CountedRequests:
    """Requests to one model, under one version label ("default" for calls that name none), as series for Prometheus;
    `latency_s` and `queue_s` are ours, in seconds. Times are kept and added up together, at the latest when there are
    TIMES_MAX."""

    def __init__(
        self,
        unsummed: Unsummed,
        requests: Sample,
        latency: Sample,
        queue: Sample,
        queue_time: Sample,
        latency_s: Sample,
        queue_s: Sample,
    ) -> None:
        self._requests, self._latency, self._queue = requests, latency, queue
        self._queue_time, self._latency_s, self._queue_s = queue_time, latency_s, queue_s
        self._unsummed = unsummed
        self._took: list[float] = []
        self._queued: list[float] = []

    def accepted(self) -> None:
        """Counts a request for the model, which may still be refused."""
        self._requests.add(1.0)

    def answered(self, queued_at_s: float, sent_at_s: float, now_s: float) -> None:
        """Counts a request that was queued, sent to a worker, and answered; `time.monotonic()` seconds."""
        took = self._took
        if not took:
            self._unsummed.add(self)
        took.append(now_s - queued_at_s)
        self._queued.append(sent_at_s - queued_at_s)
        if len(took) >= TIMES_MAX:
            self.sum_up()

    def sum_up(self) -> None:
        """Adds the kept times to the series."""
        took, queued, self._took, self._queued = self._took, self._queued, [], []
        self._queue_time.add_all([int(seconds * 1e3) for seconds in queued])
        self._latency.add_all([seconds * 1e6 for seconds in took])
        self._queue.add_all([seconds * 1e6 for seconds in queued])
        self._latency_s.add_all(took)
        self._queue_s.add_all(queued)


#: The recorder of a model that is gone.
UNSEEN: Final = CountedRequests(Unsummed(), *[NOTHING] * 6)


class LoggedRequests:
    """The same requests as lines of the metrics log, and in `counted` too."""

    __slots__ = ("_accepted", "_add", "_answered", "_counted", "_feed", "_source")

    def __init__(self, log: EventLog, source: tuple[str, str], counted: CountedRequests | None) -> None:
        self._feed, self._add, self._source, self._counted = log.feed, log.add, source, counted
        self._accepted, self._answered = log.tally(ACCEPTED, source), log.tally(ANSWERED, source)

    def accepted(self) -> None:
        if len(self._feed) < EVENTS_MAX:
            self._add((ACCEPTED, self._source, 0.0, 0.0, time.monotonic(), ()))
        else:
            self._accepted.now.count += 1
        if self._counted is not None:
            self._counted.accepted()

    def answered(self, queued_at_s: float, sent_at_s: float, now_s: float) -> None:
        if len(self._feed) < EVENTS_MAX:
            self._add((ANSWERED, self._source, now_s - queued_at_s, sent_at_s - queued_at_s, now_s, ()))
        else:
            queue_s = sent_at_s - queued_at_s
            total = self._answered.now
            total.count += 1
            total.a += now_s - queued_at_s
            total.b += queue_s
            total.last_b = queue_s
        if self._counted is not None:
            self._counted.answered(queued_at_s, sent_at_s, now_s)


RequestMetrics: TypeAlias = "CountedRequests | LoggedRequests"


class LatencyCounts:
    """A histogram of latencies: a count for each of BOUNDS_S, and one for those beyond. A model has one only while a
    console or `torchserve top` reads its latencies."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1


def quantiles_s(counts: Sequence[int], parts: Sequence[float]) -> list[float] | None:
    """Returns the latency in seconds below which each of `parts` (ascending, in (0, 1]) of the requests lie,
    interpolated within its bucket; None without any requests."""
    total = sum(counts)
    if not total:
        return None
    found: list[float] = []
    below = 0
    for index, count in enumerate(counts):
        while len(found) < len(parts) and below + count >= parts[len(found)] * total:
            low = BOUNDS_S[index - 1] if index else 0.0
            high = BOUNDS_S[min(index, len(BOUNDS_S) - 1)]
            share = (parts[len(found)] * total - below) / count if count else 0.0
            found.append(low + (high - low) * share)
        below += count
    return found


class ObservedRequests:
    """A model's recorder that counts the latencies as well."""

    __slots__ = ("_answered", "_counts", "accepted")

    def __init__(self, recorder: RequestMetrics, latencies: LatencyCounts) -> None:
        self.accepted: Callable[[], None] = recorder.accepted
        self._answered = recorder.answered
        self._counts = latencies.counts

    def answered(self, queued_at_s: float, sent_at_s: float, now_s: float) -> None:
        self._counts[bisect_left(BOUNDS_S, now_s - queued_at_s)] += 1
        self._answered(queued_at_s, sent_at_s, now_s)


class ModelMetrics:
    """Recorders of one model version, made when they are first needed: a metric without a value isn't shown."""

    def __init__(self, registry: MetricsRegistry, name: str, version: str) -> None:
        self._registry, self._name, self._version = registry, name, version
        self._unnamed: RequestMetrics | ObservedRequests | None = None
        self._named: RequestMetrics | ObservedRequests | None = None
        self._latencies: LatencyCounts | None = None
        self._closed = False
        self.batches = registry.batches(name, version)

    def close(self) -> None:
        """Ends the recording for a model that is gone, and removes its series."""
        self._closed = True
        self._unnamed = self._named = UNSEEN
        self._registry.forget(self._name, self._version)

    def observe(self, latencies: LatencyCounts | None) -> None:
        """Counts the latencies of further requests there too; None ends that."""
        if not self._closed:
            self._latencies = latencies
            self._unnamed = self._named = None

    @property
    def tokens(self) -> Mapping[str, tuple[float, int]]:
        return self._registry.tokens(self._name, self._version)

    def requests(self, version_named: bool) -> RequestMetrics | ObservedRequests:
        """The recorder for calls that named the model's version, or for those that didn't."""
        return (self._named if version_named else self._unnamed) or self._first(version_named)

    def _first(self, version_named: bool) -> RequestMetrics | ObservedRequests:
        label = self._version if version_named else DEFAULT_VERSION
        counted = self._registry.requests(self._name, self._version, label)
        recorder = counted if self._latencies is None else ObservedRequests(counted, self._latencies)
        if version_named:
            self._named = recorder
        else:
            self._unnamed = recorder
        return recorder


class BatchMetrics:
    """The batches of one model version's workers, and the loads of its model (`workers.in_flight.BatchRecorder`)."""

    def __init__(self, registry: MetricsRegistry, name: str, version: str) -> None:
        self._registry, self._name, self._version = registry, name, version
        self._everything = registry.everything
        self._feed, self._add = registry.event_log.feed, registry.event_log.add
        self._tally = registry.batch_tally(name, version)
        self._source = name
        self._samples: tuple[Sample, Sample] | None = None

    def answered(self, jobs: Sequence[Job], waited_s: float, worked_s: float, now_s: float) -> None:
        if jobs[0].state is not _ANSWERED:
            return
        if self._everything:
            waited, worked = self._samples or self._first()
            waited.add(int(waited_s * 1e3))
            worked.add(int(worked_s * 1e5) / 100)  # round() takes a quarter of a microsecond
        elif len(self._feed) >= EVENTS_MAX:
            total = self._tally.now
            total.count += 1
            total.last_a, total.last_b = worked_s, waited_s
        else:
            ids = (jobs[0].request_id,) if len(jobs) == 1 else [job.request_id for job in jobs]
            self._add((BATCH, self._source, worked_s, waited_s, now_s, ids))

    def _first(self) -> tuple[Sample, Sample]:
        self._samples = self._registry.batch_samples(self._name, self._version)
        return self._samples

    def loaded(self, worker_id: int, seconds: float) -> None:
        self._registry.worker_loaded(self._name, self._version, worker_id, seconds)
