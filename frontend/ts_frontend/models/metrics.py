"""Metrics of the served models, read at each scrape, at no cost to requests."""

from __future__ import annotations

import logging
import sys
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import psutil

from ts_frontend.config.table import ServerConfig
from ts_frontend.job import FINAL, JobState
from ts_frontend.models.health import Health
from ts_frontend.models.model import Model
from ts_frontend.models.registry import Registry
from ts_frontend.telemetry.metrics.families import Counter, Definition, Family, Gauge, Histogram, MetricKind
from ts_frontend.telemetry.metrics.gpus import GpuLoad, Gpus
from ts_frontend.telemetry.metrics.registry import (
    COMMAND_S_MAX,
    MODEL_LABELS,
    OWN_BOUNDS_S,
    PACKAGE_PARENT,
    MetricsRegistry,
)
from ts_frontend.telemetry.metrics.system import RunCommand, SystemMetrics, command_line
from ts_frontend.telemetry.metrics.text import Examples
from ts_frontend.workers.demand import FAILING, Demand, ResidentState, UnloadCause
from ts_frontend.workers.devices import Inventory
from ts_frontend.workers.launchers import tool_output
from ts_frontend.workers.memory import Memory, WorkerMemory, pids_of, processes_memory
from ts_frontend.workers.pool import Pool, Slot
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
    yield "ts_queued_requests", ledger.queued
    yield "ts_queue_capacity", model.settings.job_queue_size
    yield "ts_running_requests", ledger.sent
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
        return [
            self._one(
                "ts_server_ready", GAUGE, "1 while the server is ready, as its readiness probe says", health.ready
            ),
            self._one("ts_server_draining", GAUGE, "1 while the server shuts down", health.draining),
            _bare(
                "process_cpu_seconds_total", COUNTER, "CPU time of the server's own process", spent.user + spent.system
            ),
            _bare("process_resident_memory_bytes", GAUGE, "Resident memory of the server's own process", memory.rss),
            _bare("process_start_time_seconds", GAUGE, "When the server's process began, since 1970", started_s),
            _bare("process_open_fds", GAUGE, "Files and connections that the server's process has open", files),
        ]

    def _one(self, name: str, kind: MetricKind, sentence: str, value: float) -> Family:
        family = _family_of(kind, name, sentence)
        family.samples[(self._host,)] = Gauge(value)
        return family


def _bare(name: str, kind: MetricKind, sentence: str, value: float) -> Family:
    family = Family(Definition(name, kind, "Count", ()), sentence)
    family.samples[()] = Gauge(value)
    return family


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
        cold = Family(
            Definition("ts_cold_starts_total", COUNTER, "Count", MODEL_LABELS), "Loads that a first request has begun"
        )
        for model, resident in residents:
            if resident.loads:
                cold.samples[model.name, model.version, self._host] = Counter(resident.loads)
        took = _family_of(
            MetricKind.HISTOGRAM, "ts_cold_start_seconds", "Seconds from such a request to a ready worker"
        )
        took.samples[host] = self._seconds
        ended = _family_of(MetricKind.COUNTER, "ts_on_demand_unloads_total", "Models that were unloaded", "reason")
        for cause in UnloadCause:
            ended.samples[(*host, cause.value)] = Counter(demand.unloads[cause])
        states = _family_of(MetricKind.GAUGE, "ts_on_demand_models", "Models on demand by their state", "state")
        found = Tally(resident.status for _, resident in residents)
        for state in (*(one.value for one in ResidentState), FAILING):
            states.samples[(*host, state)] = Gauge(found[state])
        memory = _family_of(MetricKind.GAUGE, "ts_on_demand_memory_bytes", "Memory of loaded models on demand")
        memory.samples[host] = Gauge(demand.held.host)
        return [cold, took, ended, states, memory]


def _family_of(kind: MetricKind, name: str, sentence: str, *more: str) -> Family:
    return Family(Definition(name, kind, "Count", ("hostname", *more)), sentence)


def refused_calls(counts: Mapping[str, int], host: str) -> Family:
    return _by_api("ts_refused_calls_total", "Calls refused because of their key", counts, host)


def shared_snapshot_family(troubles: int, host: str) -> Family:
    sentence = "Versions that aren't what the shared snapshot says, and 1 more while it can't be read or written"
    family = _family_of(GAUGE, "ts_shared_snapshot_failures", sentence)
    family.samples[(host,)] = Gauge(troubles)
    return family


def flooded_connections(counts: Mapping[str, int], host: str) -> Family:
    """Connections that take no more requests because their clients cancelled too many, by API."""
    sentence = "Connections that take no more requests because too many were cancelled"
    return _by_api("ts_flooded_connections_total", sentence, counts, host)


def unread_answers(size: int, given_up: Mapping[str, int], host: str) -> list[Family]:
    """The bytes of answers that wait for clients that don't read, and the answers that were given up, by reason."""
    waiting = _family_of(GAUGE, "ts_unread_answer_bytes", "Bytes of answers that wait for clients that don't read")
    waiting.samples[(host,)] = Gauge(size)
    name = "ts_unread_answers_total"
    ended = Family(Definition(name, COUNTER, "Count", ("reason", "hostname")), "Answers given up unread, by the reason")
    for reason, count in given_up.items():
        ended.samples[(reason, host)] = Counter(count)
    return [waiting, ended]


def certificate_ends(ends_s: Mapping[str, float], host: str) -> Family:
    """When certificates end, in seconds since 1970, by the setting that names their file."""
    name = "ts_certificate_expiry_timestamp_seconds"
    family = Family(Definition(name, GAUGE, "Seconds", ("setting", "hostname")), "When a file's first certificate ends")
    for setting, seconds in ends_s.items():
        family.samples[(setting, host)] = Gauge(seconds)
    return family


def _by_api(name: str, sentence: str, counts: Mapping[str, int], host: str) -> Family:
    family = Family(Definition(name, MetricKind.COUNTER, "Count", ("api", "hostname")), sentence)
    for api, count in counts.items():
        family.samples[(api, host)] = Counter(count)
    return family


LABELS = ("model", "version")
#: Triton's reasons of failed requests.
REASONS = {JobState.FAILED: "BACKEND", JobState.EXPIRED: "REJECTED", JobState.CANCELLED: "CANCELED"}


def compatible_families(models: Registry, sums: MetricsRegistry) -> list[Family]:
    """The counts by the metric names that other servers' dashboards query."""
    return [*_triton_families(models, sums), *_mlserver_families(models)]


def _triton_families(models: Iterable[Model], sums: MetricsRegistry) -> list[Family]:
    """Triton's `nv_inference_…` metrics, as far as this server counts the same."""
    success = _family("nv_inference_request_success", MetricKind.COUNTER, "Requests that were answered")
    failure = _family("nv_inference_request_failure", MetricKind.COUNTER, "Requests that failed", "reason")
    pending = _family("nv_inference_pending_request_count", MetricKind.GAUGE, "Requests that wait for a worker")
    whole = _family("nv_inference_request_duration_us", MetricKind.COUNTER, "Microseconds of answered requests")
    queue = _family(
        "nv_inference_queue_duration_us", MetricKind.COUNTER, "Microseconds of answered requests in the queue"
    )
    count = _family("nv_inference_count", MetricKind.COUNTER, "Inferences, one for each answered request")
    calls = _family("nv_inference_exec_count", MetricKind.COUNTER, "Calls of the handler, one for each batch")
    infer = _family(
        "nv_inference_compute_infer_duration_us", MetricKind.COUNTER, "Microseconds of answered requests in those"
    )
    read = _family(
        "nv_inference_compute_input_duration_us",
        MetricKind.COUNTER,
        "Microseconds of reading their tensors, outside the handler",
    )
    written = _family(
        "nv_inference_compute_output_duration_us",
        MetricKind.COUNTER,
        "Microseconds of writing their tensors, outside the handler",
    )
    for model in models:
        labels, counts = (model.name, model.version), model.ledger.counts
        statistics = model.statistics
        count.samples[labels], calls.samples[labels] = Counter(statistics.answered), Counter(statistics.calls)
        infer.samples[labels] = Counter(int(statistics.handler_s * 1e6))
        read.samples[labels] = Counter(int(statistics.read_s * 1e6))
        written.samples[labels] = Counter(int(statistics.written_s * 1e6))
        whole_s, queue_s = sums.sums_s(model.name, model.version)
        success.samples[labels] = Counter(counts[JobState.ANSWERED])
        pending.samples[labels] = Gauge(model.ledger.queued)
        whole.samples[labels], queue.samples[labels] = Counter(whole_s * 1e6), Counter(queue_s * 1e6)
        for state, reason in REASONS.items():
            failure.samples[(*labels, reason)] = Counter(counts[state])
    return [success, failure, pending, count, calls, whole, queue, infer, read, written]


def _mlserver_families(models: Iterable[Model]) -> list[Family]:
    success = _family("model_infer_request_success_total", MetricKind.COUNTER, "Requests that were answered")
    failure = _family("model_infer_request_failure_total", MetricKind.COUNTER, "Requests that failed")
    for model in models:
        labels, counts = (model.name, model.version), model.ledger.counts
        success.samples[labels] = Counter(counts[JobState.ANSWERED])
        failure.samples[labels] = Counter(sum(counts[state] for state in REASONS))
    return [success, failure]


def _family(name: str, kind: MetricKind, sentence: str, *more: str) -> Family:
    return Family(Definition(name, kind, "Count", (*LABELS, *more)), sentence)


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
    found = []
    for name, sentence, field in rows:
        family = Family(Definition(name, GAUGE, "Count", ("device", "hostname")), sentence)
        for load in loads:
            family.samples[(f"cuda:{load.index}", host)] = Gauge(getattr(load, field))
        found.append(family)
    return found


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
