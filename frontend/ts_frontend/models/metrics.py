"""Metrics of the served models, read at each scrape, at no cost to requests."""

from __future__ import annotations

import logging
import sys
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import psutil

from ts_frontend.caching.cache import ModelCache
from ts_frontend.config.table import ServerConfig
from ts_frontend.job import FINAL, JobState
from ts_frontend.limits.limits import Limits
from ts_frontend.models.health import Health
from ts_frontend.models.model import Model, Registry
from ts_frontend.telemetry.metrics.families import Counter, Definition, Family, Gauge, Histogram, MetricKind
from ts_frontend.telemetry.metrics.registry import (
    COMMAND_S_MAX,
    MODEL_LABELS,
    OWN_BOUNDS_S,
    PACKAGE_PARENT,
    MetricsRegistry,
)
from ts_frontend.telemetry.metrics.system import GpuLoad, Gpus, RunCommand, SystemMetrics, command_line
from ts_frontend.telemetry.metrics.text import Examples
from ts_frontend.workers.launchers import tool_output
from ts_frontend.workers.memory import (
    FAILING,
    Demand,
    Memory,
    ResidentState,
    UnloadCause,
    WorkerMemory,
    pids_of,
    processes_memory,
)
from ts_frontend.workers.pool import Pool, Slot
from ts_frontend.workers.resources import Inventory
from ts_frontend.workers.worker import Worker

log = logging.getLogger(__name__)

#: nvidia-smi takes a second, longer without the driver's persistence mode.
SMI_S_MAX = 10.0
#: Forks take tens of milliseconds, large weights minutes.
COLD_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
GAUGE, COUNTER = MetricKind.GAUGE, MetricKind.COUNTER
#: Metrics of every model version: name, kind, help text, and a label besides the model's.
SERVED = (
    ("ts_queued_requests", GAUGE, "Requests that wait for a worker"),
    ("ts_queue_capacity", GAUGE, "Requests that may wait at once"),
    ("ts_running_requests", GAUGE, "Requests on a worker"),
    ("ts_concurrency", GAUGE, "Requests that the ready workers run side by side"),
    ("ts_ended_requests_total", COUNTER, "Ended requests by outcome", "outcome"),
    ("ts_refused_requests_total", COUNTER, "Requests that the model's queue did not accept", "reason"),
    ("ts_workers", GAUGE, "Workers of a model, ready or not"),
    ("ts_ready_workers", GAUGE, "Workers that can take requests"),
    ("ts_given_up_workers", GAUGE, "Workers that failed and are not started again"),
    ("ts_model_failing", GAUGE, "1 while a model has lost its workers, or never got them"),
    ("ts_worker_failures_total", COUNTER, "Workers that failed: died, hung, or did not load the model", "reason"),
    ("ts_worker_memory_bytes", GAUGE, "Resident memory of a worker's processes, by the worker", "worker_id", "device"),
    ("ts_repeated_requests_total", COUNTER, "Requests to idempotent models that ran again", "reason"),
    ("ts_quarantined_requests_total", COUNTER, "Requests that failed because two workers died with them"),
    ("ts_replaced_workers_total", COUNTER, "Workers that were replaced because of a limit", "reason"),
    ("ts_autoscaling_decisions_total", COUNTER, "Changes of the number of workers by autoscaling", "direction"),
    ("ts_wanted_workers", GAUGE, "Workers that autoscaling wants"),
    ("ts_workers_max", GAUGE, "Workers that autoscaling may start"),
    ("ts_cache_requests_total", COUNTER, "Requests that the cache answered (hit), and runs (miss)", "result"),
    ("ts_cache_bytes", GAUGE, "Memory of the answers that the cache keeps"),
    ("ts_cache_evictions_total", COUNTER, "Answers that were dropped to make room for others"),
)


class ServedModels:
    """Reads the counts of requests and workers of every model version."""

    def __init__(self, models: Iterable[Model], host: str) -> None:
        self._models, self._host = models, host
        self._memory = WorkerMemory()

    def families(self) -> list[Family]:
        found = {
            name: Family(Definition(name, kind, "Count", (*MODEL_LABELS, *more)), sentence)
            for name, kind, sentence, *more in SERVED
        }
        self._memory.look(worker for _, _, worker in self._workers())
        for model in self._models:
            for name, value, *more in _values(model):
                self._add(found[name], model, value, *more)
        for model, slot, worker in self._workers():
            if size_bytes := self._memory.of(worker):
                self._add(found["ts_worker_memory_bytes"], model, size_bytes, str(slot.id), str(slot.device))
        return list(found.values())

    def _add(self, family: Family, model: Model, value: float, *more: str) -> None:
        labels = (model.name, model.version, self._host, *more)
        family.samples[labels] = Gauge(value) if family.definition.kind is GAUGE else Counter(value)

    def _workers(self) -> Iterator[tuple[Model, Slot, Worker]]:
        for model in self._models:
            for slot in model.pool.slots:
                if slot.worker is not None:
                    yield model, slot, slot.worker


def _values(model: Model) -> Iterator[tuple[Any, ...]]:
    """Yields the name of each metric of a model, its value, and its label besides the model's."""
    pool, ledger, slots = model.pool, model.ledger, model.pool.slots
    yield "ts_queued_requests", model.queued
    yield "ts_queue_capacity", model.settings.job_queue_size
    yield "ts_running_requests", model.running
    if at_once := sum(slot.worker.concurrency for slot in slots if slot.worker is not None and slot.ready):
        yield "ts_concurrency", at_once
    for state in JobState:
        if state in FINAL:
            yield "ts_ended_requests_total", ledger.counts[state], state.value
    for reason, count in model.refused.items():
        yield "ts_refused_requests_total", count, reason
    yield "ts_workers", len(slots)
    yield "ts_ready_workers", 0 if pool.plan.in_process else pool.ready_count
    yield "ts_given_up_workers", sum(slot.gave_up for slot in slots)
    yield "ts_model_failing", model.failing
    for reason, count in pool.failures.items():
        yield "ts_worker_failures_total", count, reason
    for reason in pool.plan.limits.kinds:
        yield "ts_replaced_workers_total", pool.replaced.get(reason, 0), reason
    repeats = pool.plan.repeats
    if repeats is not None:
        yield "ts_repeated_requests_total", repeats.after_deaths, "worker_died"
        yield "ts_repeated_requests_total", repeats.after_failures, "batch_failed"
        yield "ts_quarantined_requests_total", repeats.quarantined
    scaler = model.scaler
    if scaler is not None and scaler.active:
        yield "ts_wanted_workers", len(slots) if scaler.last is None else scaler.last.workers
        yield "ts_workers_max", scaler.most
        yield "ts_autoscaling_decisions_total", scaler.ups, "up"
        yield "ts_autoscaling_decisions_total", scaler.downs, "down"
    cache = model.cache
    if cache is not None:
        yield "ts_cache_requests_total", cache.hits, "hit"
        yield "ts_cache_requests_total", cache.misses, "miss"
        yield "ts_cache_bytes", cache.shelf.used_bytes
        yield "ts_cache_evictions_total", cache.shelf.evicted


def examples_of(models: Iterable[Model]) -> dict[tuple[str, str], Examples]:
    """The examples of each model version's requests; a model keeps examples from its first scrape with examples on."""
    found = {}
    for model in models:
        if model.examples is None:
            model.examples = Examples(OWN_BOUNDS_S)
            model.ledger.on_answered = model.examples.add
        found[model.name, model.version] = model.examples
    return found


class ServerState:
    """Reads the state of the server: its health, and its process under the names of Prometheus' client libraries."""

    def __init__(self, health: Health, host: str) -> None:
        self._health, self._host = health, host
        self._process = psutil.Process()

    def families(self) -> list[Family]:
        process, health = self._process, self._health
        with process.oneshot():
            spent, memory, started_s = process.cpu_times(), process.memory_info(), process.create_time()
            files = process.num_fds()
        host: dict[str, str] = {"hostname": self._host}
        return [
            _one(
                GAUGE,
                "ts_server_ready",
                "1 while the server is ready, as its readiness probe says",
                health.ready,
                **host,
            ),
            _one(GAUGE, "ts_server_draining", "1 while the server shuts down", health.draining, **host),
            _one(
                COUNTER, "process_cpu_seconds_total", "CPU time of the server's own process", spent.user + spent.system
            ),
            _one(GAUGE, "process_resident_memory_bytes", "Resident memory of the server's own process", memory.rss),
            _one(GAUGE, "process_start_time_seconds", "When the server's process began, since 1970", started_s),
            _one(GAUGE, "process_open_fds", "Files and connections that the server's process has open", files),
        ]


class OnDemandMetrics:
    """Metrics of the models on demand, those without a request included."""

    def __init__(self, demand: Demand, host: str) -> None:
        self._demand, self._host = demand, host
        self._seconds = Histogram(COLD_BOUNDS_S)
        demand.on_loaded = self._seconds.add

    def families(self, models: Iterable[Model]) -> list[Family]:
        """Returns [] as long as no model is loaded on demand."""
        demand, host = self._demand, (self._host,)
        residents = [(model, model.resident) for model in models if model.resident is not None]
        if not residents and not self._seconds.sum:
            return []
        loads = {(one.name, one.version, self._host): resident.loads for one, resident in residents if resident.loads}
        took = _family(
            MetricKind.HISTOGRAM,
            "ts_cold_start_seconds",
            "Seconds from such a request to a ready worker",
            ("hostname",),
            {},
        )
        took.samples[host] = self._seconds
        found = Tally(resident.status for _, resident in residents)
        states = {(*host, state): found[state] for state in (*(one.value for one in ResidentState), FAILING)}
        unloads = {(*host, cause.value): demand.unloads[cause] for cause in UnloadCause}
        by_reason, by_state = ("hostname", "reason"), ("hostname", "state")
        return [
            _family(COUNTER, "ts_cold_starts_total", "Loads that a first request has begun", MODEL_LABELS, loads),
            took,
            _family(COUNTER, "ts_on_demand_unloads_total", "Models that were unloaded", by_reason, unloads),
            _family(GAUGE, "ts_on_demand_models", "Models on demand by their state", by_state, states),
            _one(
                GAUGE,
                "ts_on_demand_memory_bytes",
                "Memory of loaded models on demand",
                demand.held.host,
                hostname=host[0],
            ),
        ]


def _family(kind: MetricKind, name: str, sentence: str, labels: Sequence[str], values: Mapping[Any, float]) -> Family:
    """A family with these values, by the values of its labels."""
    family = Family(Definition(name, kind, "Count", tuple(labels)), sentence)
    for key, value in values.items():
        family.samples[key] = Gauge(value) if kind is GAUGE else Counter(value)
    return family


def _one(kind: MetricKind, name: str, sentence: str, value: float, **labels: str) -> Family:
    return _family(kind, name, sentence, tuple(labels), {tuple(labels.values()): value})


def _by(label: str, kind: MetricKind, name: str, sentence: str, values: Mapping[str, float], host: str) -> Family:
    return _family(kind, name, sentence, (label, "hostname"), {(one, host): value for one, value in values.items()})


def refused_calls(counts: Mapping[str, int], host: str) -> Family:
    return _by("api", COUNTER, "ts_refused_calls_total", "Calls refused because of their key", counts, host)


def client_families(limits: Limits, host: str) -> list[Family]:
    """What clients asked for and cost, by their names in limits.yaml; `other` are those without one."""
    return [
        _by("client", COUNTER, "ts_client_requests_total", "Requests of clients for models", limits.asked, host),
        _family(
            COUNTER,
            "ts_client_refused_requests_total",
            "Requests over a limit of their client",
            ("client", "limit", "hostname"),
            {(*key, host): count for key, count in limits.refused.items()},
        ),
        _family(
            COUNTER,
            "ts_client_worker_seconds_total",
            "Seconds on workers that requests of clients took",
            ("model_name", "client", "hostname"),
            {(*key, host): seconds for key, seconds in limits.worked_s.items()},
        ),
    ]


def shared_snapshot_family(troubles: int, host: str) -> Family:
    sentence = "Versions that aren't what the shared snapshot says, and 1 more while it can't be read or written"
    return _one(GAUGE, "ts_shared_snapshot_failures", sentence, troubles, hostname=host)


def flooded_connections(counts: Mapping[str, int], host: str) -> Family:
    sentence = "Connections that take no more requests because too many were cancelled"
    return _by("api", COUNTER, "ts_flooded_connections_total", sentence, counts, host)


def unread_answers(size: int, given_up: Mapping[str, int], host: str) -> list[Family]:
    waiting = "Bytes of answers that wait for clients that don't read"
    ended = "Answers given up unread, by the reason"
    return [
        _one(GAUGE, "ts_unread_answer_bytes", waiting, size, hostname=host),
        _by("reason", COUNTER, "ts_unread_answers_total", ended, given_up, host),
    ]


def certificate_ends(ends_s: Mapping[str, float], host: str) -> Family:
    """When certificates end, in seconds since 1970, by the setting that names their file."""
    sentence = "When a file's first certificate ends"
    return _by("setting", GAUGE, "ts_certificate_expiry_timestamp_seconds", sentence, ends_s, host)


LABELS = ("model", "version")
#: Triton's reasons of failed requests.
REASONS = {JobState.FAILED: "BACKEND", JobState.EXPIRED: "REJECTED", JobState.CANCELLED: "CANCELED"}


def compatible_families(models: Registry, sums: MetricsRegistry) -> list[Family]:
    """The counts by the names that dashboards of Triton and MLServer query, as far as they count the same."""

    cached = [(one, one.cache) for one in models if one.cache is not None]

    def of_cache(name: str, sentence: str, value: Callable[[ModelCache], float]) -> Family:
        samples = {(one.name, one.version): value(cache) for one, cache in cached}
        return _family(COUNTER, f"nv_cache_{name}_per_model", sentence, LABELS, samples)

    def each(name: str, sentence: str, value: Callable[[Model], float], kind: MetricKind = COUNTER) -> Family:
        return _family(kind, name, sentence, LABELS, {(one.name, one.version): value(one) for one in models})

    def microseconds(what: str, sentence: str, seconds: Callable[[Model], float]) -> Family:
        return each(f"nv_inference_{what}_duration_us", sentence, lambda one: int(seconds(one) * 1e6))

    answered, outside = "Requests that were answered", "their tensors, outside the handler"
    reasons = {
        (one.name, one.version, why): one.ledger.counts[state] for one in models for state, why in REASONS.items()
    }
    return [
        each("nv_inference_request_success", answered, lambda one: one.ledger.counts[JobState.ANSWERED]),
        _family(COUNTER, "nv_inference_request_failure", "Requests that failed", (*LABELS, "reason"), reasons),
        each("nv_inference_pending_request_count", "Requests that wait for a worker", lambda one: one.queued, GAUGE),
        each(
            "nv_inference_count",
            "Inferences, one for each answered request that ran",
            lambda one: one.statistics.answered - (0 if one.cache is None else one.cache.hits),
        ),
        each("nv_inference_exec_count", "Calls of the handler, one for each batch", lambda one: one.statistics.calls),
        microseconds("request", "Microseconds of answered requests", lambda one: sums.sums_s(one.name, one.version)[0]),
        microseconds(
            "queue", "Microseconds of answered requests in the queue", lambda one: sums.sums_s(one.name, one.version)[1]
        ),
        microseconds(
            "compute_infer", "Microseconds of answered requests in those", lambda one: one.statistics.handler_s
        ),
        microseconds("compute_input", f"Microseconds of reading {outside}", lambda one: one.statistics.read_s),
        microseconds("compute_output", f"Microseconds of writing {outside}", lambda one: one.statistics.written_s),
        of_cache("num_hits", "Requests that the cache answered", lambda cache: cache.hits),
        of_cache("num_misses", "Requests that ran, of models with a cache", lambda cache: cache.misses),
        of_cache("hit_duration", "Microseconds of requests that the cache answered", lambda cache: cache.hit_s * 1e6),
        of_cache(
            "miss_duration", "Microseconds of looking for other requests' answers", lambda cache: cache.miss_s * 1e6
        ),
        each("model_infer_request_success_total", answered, lambda one: one.ledger.counts[JobState.ANSWERED]),
        each(
            "model_infer_request_failure_total",
            "Requests that failed",
            lambda one: sum(one.ledger.counts[state] for state in REASONS),
        ),
    ]


def gpus_of(inventory: Inventory) -> Gpus:
    """The GPUs that workers may get and whose load the driver reports."""

    async def run(command: Sequence[str]) -> str | None:
        return await tool_output(list(command), SMI_S_MAX)

    return Gpus(inventory.count if inventory.kind == "cuda" else 0, run)


def measure_of(gpus: Gpus) -> Callable[[Sequence[Pool]], list[Memory]]:
    """Returns a function that measures the memory of each pool's processes, their GPU memory included. One query of the
    driver serves all pools. Its calls block."""
    told = False

    def measure(pools: Sequence[Pool]) -> list[Memory]:
        found = gpus.process_bytes() if any(pool.on_gpus for pool in pools) else {}
        on_host = processes_memory(pools)
        return [Memory(host.host, on_gpus(pool, found)) for pool, host in zip(pools, on_host, strict=True)]

    def on_gpus(pool: Pool, found: Mapping[int, int]) -> int:
        nonlocal told
        own = sum(found.get(pid, 0) for pid in pids_of(pool)) if pool.on_gpus else 0
        if pool.on_gpus and pool.ready_count and not own and not told:
            told = True
            log.warning(
                "The GPUs' driver reports no memory of the workers of %s, so that model_gpu_memory_max uses "
                "modelGpuMemory in model-config.yaml (the driver reports the processes %s)",
                pool.name,
                ", ".join(map(str, sorted(found))) or "of nobody",
            )
        return own

    return measure


def gpu_families(loads: Iterable[GpuLoad], host: str) -> list[Family]:
    rows = (
        ("ts_gpu_utilization_percent", "Share of time in which something ran on a GPU", "busy_percent"),
        ("ts_gpu_memory_used_bytes", "Memory of a GPU that is in use, by any process", "used_bytes"),
        ("ts_gpu_memory_total_bytes", "Memory of a GPU", "total_bytes"),
    )
    loads = list(loads)
    return [
        _by("device", GAUGE, name, sentence, {f"cuda:{load.index}": getattr(load, field) for load in loads}, host)
        for name, sentence, field in rows
    ]


def system_metrics(
    config: ServerConfig,
    registry: MetricsRegistry,
    gpus: Gpus,
    env: Mapping[str, str],
    pids: Callable[[], Iterable[int]],
) -> SystemMetrics | None:
    """The sampler of the machine's metrics, None when they are turned off. `env`: the metrics command's environment;
    `pids`: the workers' process ids."""
    if config.disable_system_metrics:
        return None
    command = _command(config.system_metrics_cmd, env) if config.system_metrics_cmd else None
    return SystemMetrics(registry, config.metric_time_interval, gpus, command=command, pids=pids)


def _command(words: str, env: Mapping[str, str]) -> RunCommand:
    argv = command_line(sys.executable, words)

    async def run(pids: str) -> str | None:
        return await tool_output(argv, COMMAND_S_MAX, given=pids + "\n", env=env, cwd=PACKAGE_PARENT)

    return run
