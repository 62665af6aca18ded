"""The metrics of a server: every value is recorded here and goes to the outputs that `metrics_mode` names.

`prometheus`: all to the metrics API. `log`: all to the metrics logs. `legacy`: the three `ts_…` of inference to the
API, the rest to the logs. Only metrics that metrics.yaml lists are shown or logged. Our own families are on the API,
listed or not: in every mode those that are read where the requests are kept, in `prometheus` mode also those that every
request is counted for (OWN_…).
"""

from __future__ import annotations

import itertools
import logging
import platform
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import ts.version
from ts_frontend.config.table import ServerConfig
from ts_frontend.telemetry.logging.writer import Logs
from ts_frontend.telemetry.metrics import requests as events
from ts_frontend.telemetry.metrics.families import (
    NOTHING,
    Definition,
    Definitions,
    Family,
    Histogram,
    MetricKind,
    Sample,
    read_definitions,
)
from ts_frontend.telemetry.metrics.requests import (
    BATCH,
    EVENTS_MAX,
    HTTP,
    UNSEEN,
    BatchMetrics,
    CountedRequests,
    EventLog,
    EventSource,
    LoggedRequests,
    ModelMetrics,
    Record,
    RequestMetrics,
    Tally,
    Unsummed,
    log_text,
)
from ts_frontend.telemetry.metrics.text import Examples, exposition, openmetrics, prometheus_name

log: Final = logging.getLogger(__name__)

LEGACY: Final = frozenset({events.REQUESTS, events.LATENCY, events.QUEUE_LATENCY})
FAMILIES_MAX: Final = 1000
#: What a language model's worker tells of its tokens (`ts.language.tally`); their sums are kept in every mode.
PROMPT_TOKENS: Final = "vllm:prompt_tokens_total"
GENERATED_TOKENS: Final = "vllm:generation_tokens_total"
FIRST_TOKEN: Final = "vllm:time_to_first_token_seconds"
OF_TOKENS: Final = frozenset({PROMPT_TOKENS, GENERATED_TOKENS, FIRST_TOKEN})
#: The first line of the API's answer in modes that write metrics to logs.
ELSEWHERE: Final = (
    "# metrics_mode={mode}: TorchServe's metrics are in ts_metrics.log and model_metrics.log; "
    "metrics_mode=prometheus has them here\n"
)
WORKER_LOAD_TIME: Final = "WorkerLoadTime"

MODEL_LABELS: Final = ("model_name", "model_version", "hostname")
OWN_LATENCY: Final = Definition("ts_inference_latency_seconds", MetricKind.HISTOGRAM, "Seconds", MODEL_LABELS)
OWN_QUEUE: Final = Definition("ts_queue_latency_seconds", MetricKind.HISTOGRAM, "Seconds", MODEL_LABELS)
#: Measured here, but treated as a handler's metric: auto-detected when metrics.yaml doesn't list it.
_PREDICTION_TIME: Final = Definition(events.PREDICTION_TIME, MetricKind.GAUGE, "ms", ("ModelName", "Level", "Hostname"))
OWN_BOUNDS_S: Final[Sequence[float]] = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)


def _own_histogram() -> Sample:
    return Histogram(OWN_BOUNDS_S)


class _Holdings:
    """The series of one owner (MODEL_VERSION), to be removed with it. `users`: the number of its recorders, as a
    version and its replacement exist at the same time. `detected`: names of its handlers' metrics that metrics.yaml
    doesn't list. `tokens`: the sum and the number of the values of each of OF_TOKENS."""

    __slots__ = ("detected", "series", "tallies", "tokens", "users")

    def __init__(self) -> None:
        self.users = 0
        self.series: set[tuple[Family, tuple[str, ...]]] = set()
        self.tallies: set[tuple[int, EventSource]] = set()
        self.detected: set[str] = set()
        self.tokens: dict[str, tuple[float, int]] = {}


class MetricsRegistry:
    """All families. `host`: the value of host dimensions; `auto_detect`: unlisted metrics of handlers count too."""

    def __init__(self, definitions: Definitions, mode: str, host: str, *, auto_detect: bool = False) -> None:
        if auto_detect and events.PREDICTION_TIME not in definitions.model:
            definitions = replace(definitions, model={**definitions.model, events.PREDICTION_TIME: _PREDICTION_TIME})
        listed = {**definitions.server, **definitions.model}
        self.host = host
        self.mode = mode
        #: Every metric is on the API.
        self.everything = mode == "prometheus"
        self._definitions = definitions
        self._auto_detect = auto_detect
        self._detected: dict[str, Definition] = {}
        self._dropped: set[str] = set()
        self._holdings: dict[str, _Holdings] = {}
        self._exposed = frozenset({"prometheus": listed.keys(), "legacy": LEGACY.intersection(listed)}.get(mode, ()))
        self._families = {name: Family(one) for name, one in listed.items() if name in self._exposed}
        self._own = {one.name: Family(one, text, _own_histogram) for one, text in _OWN} if self.everything else {}
        self._gathered: list[Callable[[], Iterable[Family]]] = []
        self._always: list[Callable[[], Iterable[Family]]] = []
        self._gathered_names: frozenset[str] | None = None
        #: Adds the figures of other frontends.
        self.join: Callable[[Iterable[Family]], Iterable[Family]] | None = None
        self._http: dict[int, Sample] = {}
        self._unsummed = Unsummed()
        self._http_tallies: dict[int, Tally] = {}
        #: Returns the examples of each model version's requests, and starts to keep them.
        self.examples: Callable[[], Mapping[tuple[str, str], Examples]] = dict
        self.event_log = EventLog(definitions, listed.keys() - self._exposed, host)

    # --- reading

    def gather(self, families: Callable[[], Iterable[Family]], *, always: bool = False) -> None:
        """Adds families that are read at each scrape; shown in `prometheus` mode only, or `always`."""
        (self._always if always else self._gathered).append(families)
        self._gathered_names = None

    def text(self, names: Collection[str] = ()) -> str:
        """The metrics API's answer; in `log` mode only the families that are always shown, and a comment that names the
        logs. `names`: only those families or series."""
        text = exposition(self.families(), names)
        return text if self.everything else ELSEWHERE.format(mode=self.mode) + text

    def openmetrics(self, names: Collection[str] = ()) -> str:
        """The same as OpenMetrics, without that comment. From the first call on the latencies have examples."""
        found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        for (name, version), one in self.examples().items() if self.everything else ():
            labels = (name, version, self.host)
            found[OWN_LATENCY.name, labels] = ["" if it is None else it.text(it.took_s) for it in one.took]
            found[OWN_QUEUE.name, labels] = ["" if it is None else it.text(it.queued_s) for it in one.queued]
        return openmetrics(self.families(), names, found)

    def families(self) -> Iterable[Family]:
        """All families, with the figures of other frontends that were gathered for this answer."""
        return self._read() if self.join is None else self.join(self._read())

    def _read(self) -> Iterator[Family]:
        self._unsummed.sum_up()
        asked = (*self._gathered, *self._always) if self.everything else self._always
        yield from (*self._families.values(), *self._own.values())
        for one in asked:
            yield from one()

    def sums_s(self, name: str, version: str) -> tuple[float, float]:
        """Seconds of a version's answered requests: to the answer, and in the queue; 0 where they aren't counted."""
        self._unsummed.sum_up()
        whole, queue = (self._own_sample(one, name, version) for one in (OWN_LATENCY, OWN_QUEUE))
        return (whole.sum if isinstance(whole, Histogram) else 0.0, queue.sum if isinstance(queue, Histogram) else 0.0)

    # --- requests

    def model(self, name: str, version: str) -> ModelMetrics:
        """A recorder for the requests of one model version, until it is closed."""
        self._holdings.setdefault(owner_of(name, version), _Holdings()).users += 1
        return ModelMetrics(self, name, version)

    def tokens(self, name: str, version: str) -> Mapping[str, tuple[float, int]]:
        """The sum and the number of the values of each of OF_TOKENS that a language model has told."""
        found = self._holdings.get(owner_of(name, version))
        return {} if found is None else found.tokens

    def forget(self, name: str, version: str) -> None:
        """One recorder of a model version was closed: with the last of them its series are removed, as Prometheus
        expects of targets that are gone. Series that another version shares stay."""
        owner = owner_of(name, version)
        gone = self._holdings[owner]
        gone.users -= 1
        if gone.users:
            return
        del self._holdings[owner]
        self._unsummed.sum_up()
        left = self._holdings.values()
        for family, labels in gone.series:
            if not any((family, labels) in one.series for one in left):
                family.samples.pop(labels, None)
        for tally in gone.tallies:
            if not any(tally in one.tallies for one in left):
                self.event_log.release(*tally)
        for metric in gone.detected:
            if not any(metric in one.detected for one in left):
                self._detected.pop(metric, None)
                self._families.pop(metric, None)

    def http_answered(self, status: int) -> None:
        """An HTTP request was answered, on any listener."""
        kind = status // 100
        if self.everything:
            (self._http.get(kind) or self._http_sample(kind)).add(1.0)
        else:
            tally = self._http_tallies.get(kind) or self._http_tally(kind)
            if len(self.event_log.feed) < EVENTS_MAX:
                self.event_log.add((HTTP, tally.source, 0.0, 0.0, time.monotonic(), ()))
            else:
                tally.now.count += 1

    def _http_sample(self, kind: int) -> Sample:
        sample = self._http[kind] = self._sample(_http_name(kind), "Host")
        return sample

    def _http_tally(self, kind: int) -> Tally:
        tally = self._http_tallies[kind] = self.event_log.tally(HTTP, _http_name(kind))
        return tally

    def _sample(self, name: str, *labels: str) -> Sample:
        family = self._families.get(name)
        return family.sample((*labels, self.host)) if family is not None else NOTHING

    def requests(self, name: str, version: str, label: str) -> RequestMetrics:
        """The recorder for calls of a model `version`, labelled with the version if they named it."""
        holdings = self._holdings.get(owner_of(name, version))
        if holdings is None:
            return UNSEEN
        families = self._families
        counted = CountedRequests(
            self._unsummed,
            self._held(holdings, families.get(events.REQUESTS), name, label),
            self._held(holdings, families.get(events.LATENCY), name, label),
            self._held(holdings, families.get(events.QUEUE_LATENCY), name, label),
            self._sample(events.QUEUE_TIME, "Host"),
            self._held(holdings, self._own.get(OWN_LATENCY.name), name, version),
            self._held(holdings, self._own.get(OWN_QUEUE.name), name, version),
        )
        if self.everything:
            return counted
        source = (name, label)
        holdings.tallies |= {(events.ACCEPTED, source), (events.ANSWERED, source)}
        return LoggedRequests(self.event_log, source, counted if self._exposed else None)

    def _held(self, holdings: _Holdings, family: Family | None, *labels: str) -> Sample:
        """A series that is removed with its owner; `labels` without the host."""
        if family is None:
            return NOTHING
        sample = family.sample((*labels, self.host))
        if sample is not NOTHING:
            holdings.series.add((family, (*labels, self.host)))
        return sample

    def _own_sample(self, definition: Definition, name: str, version: str) -> Sample | None:
        family = self._own.get(definition.name)
        return None if family is None else family.samples.get((name, version, self.host))

    def batches(self, name: str, version: str) -> BatchMetrics:
        return BatchMetrics(self, name, version)

    def batch_samples(self, name: str, version: str) -> tuple[Sample, Sample]:
        """WorkerThreadTime and a model's PredictionTime."""
        holdings = self._holdings.get(owner_of(name, version))
        if holdings is None:
            return NOTHING, NOTHING
        predicted = self._held(holdings, self._families.get(events.PREDICTION_TIME), name, "Model")
        return self._sample(events.WORKER_THREAD_TIME, "Host"), predicted

    def batch_tally(self, name: str, version: str) -> Tally:
        """The tally for a model's batches that the feed has no room for."""
        self._holdings[owner_of(name, version)].tallies.add((BATCH, name))
        return self.event_log.tally(BATCH, name)

    def worker_loaded(self, name: str, version: str, worker_id: int, seconds: float) -> None:
        """A worker of a model version has loaded it, `seconds` after the worker was created."""
        holdings = self._holdings.get(owner_of(name, version))
        if holdings is None:
            return
        labels = (f"W-{worker_id}-{owner_of(name, version)}", "Host")
        self.server_value(WORKER_LOAD_TIME, int(seconds * 1000), *labels)
        family = self._families.get(WORKER_LOAD_TIME)
        if family is not None and (*labels, self.host) in family.samples:
            holdings.series.add((family, (*labels, self.host)))

    # --- everything that isn't a request

    def server_value(self, name: str, value: float, *labels: str) -> None:
        """One value of a metric of the server; `labels` without the host, as metrics.yaml orders them."""
        definition = self._definitions.server.get(name)
        if definition is None or len(labels) != len(definition.dimensions) - 1:
            return
        if name in self._exposed:
            self._sample(name, *labels).add(value)
        else:
            pairs = dict(zip(definition.dimensions, labels, strict=False))
            text = log_text(definition, value, pairs, self.host, time.time())
            logging.getLogger(events.SERVER_LOG).info("%s", text)

    def handler_value(self, record: Record, owner: str) -> None:
        """One value that a worker of `owner` (MODEL_VERSION) reported; one that metrics.yaml doesn't list is dropped,
        unless `auto_detect`, or the model declares it."""
        holdings = self._holdings.get(owner)
        if holdings is None:  # the last record of a worker whose model is gone
            return
        if record.name in OF_TOKENS:
            total, count = holdings.tokens.get(record.name, (0.0, 0))
            holdings.tokens[record.name] = total + record.value, count + 1
        definition = self._definitions.model.get(record.name) or self._detect(record)
        values = record.values(definition) if definition is not None else None
        if definition is None or values is None:
            self._drop(record, definition)
            return
        if record.name in self._detected:
            holdings.detected.add(record.name)
        if self.everything:
            family = self._families[record.name]
            family.sample(values).add(record.value)
            if values in family.samples:
                holdings.series.add((family, values))
        else:
            self.event_log.record(record, definition, values)

    def _detect(self, record: Record) -> Definition | None:
        if not self._auto_detect and record.help is None:
            return None
        known = self._detected.get(record.name)
        if known is None and len(self._detected) < FAMILIES_MAX and not self._taken(prometheus_name(record.name)):
            known = self._detected[record.name] = record.definition()
            if self.everything:
                new = partial(Histogram, record.bounds) if record.bounds else None
                self._families[record.name] = Family(known, record.help or "", new)
        return known

    def _taken(self, name: str) -> bool:
        """Whether a family of that name exists. Prometheus rejects a page that has one twice."""
        if self._gathered_names is None:
            gathered = itertools.chain.from_iterable(one() for one in (*self._gathered, *self._always))
            self._gathered_names = frozenset(family.definition.name for family in gathered)
        own = {definition.name for definition, _ in _OWN} | self._gathered_names
        return name in own or any(name == prometheus_name(one) for one in (*self._families, *self._detected))

    def _drop(self, record: Record, definition: Definition | None) -> None:
        if record.name in self._dropped or len(self._dropped) >= FAMILIES_MAX:
            return
        self._dropped.add(record.name)
        if definition is None:
            reason = "metrics.yaml doesn't list it under model_metrics (or set model_metrics_auto_detect=true)"
        else:
            reason = f"its dimensions are {list(record.labels)}, not {list(definition.dimensions[:-1])}"
        log.warning("Metric %s of a handler is dropped: %s", record.name, reason)


def owner_of(name: str, version: str) -> str:
    """The name by which a model version's workers report metrics."""
    return f"{name}_{version}"


def _http_name(kind: int) -> str:
    return {2: "Requests2XX", 4: "Requests4XX"}.get(kind, "Requests5XX")


_OWN: Final = (
    (OWN_LATENCY, "Time from a request's queueing to its answer"),
    (OWN_QUEUE, "Time that an answered request waited for a worker"),
)

#: The directory `system_metrics_cmd` runs in, as TorchServe's: a relative path in it starts with `ts/`.
PACKAGE_PARENT: Final = Path(ts.version.__file__).parents[1]
DEFAULT_FILE: Final = PACKAGE_PARENT / "ts" / "configs" / "metrics.yaml"
COMMAND_S_MAX: Final = 30.0


def open_metrics(config: ServerConfig, logs: Logs) -> MetricsRegistry:
    """An empty registry, joined to the logs. Raises ConfigError for a metrics_config that can't be used."""
    definitions = read_definitions(config.metrics_config or DEFAULT_FILE)
    registry = MetricsRegistry(
        definitions, config.metrics_mode, platform.node(), auto_detect=config.model_metrics_auto_detect
    )
    logs.every_period(registry.event_log.portions)
    registry.event_log.on_news = logs.soon
    return registry
