"""Metrics of the served models, read at each scrape, at no cost to requests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping

from ts_frontend.config.table import ServerConfig
from ts_frontend.job import FINAL, JobState
from ts_frontend.models.model import Model
from ts_frontend.models.registry import Registry
from ts_frontend.telemetry.metrics.families import Counter, Definition, Family, Gauge, MetricKind
from ts_frontend.telemetry.metrics.registry import COMMAND_S_MAX, MODEL_LABELS, PACKAGE_PARENT, MetricsRegistry
from ts_frontend.telemetry.metrics.system import RunCommand, SystemMetrics, command_line
from ts_frontend.workers.launchers import tool_output


def served_families(models: Iterable[Model], host: str) -> list[Family]:
    """Requests queued, running, ended and repeated, and workers ready and replaced, of every model version."""
    queued = _served_family("ts_queued_requests", MetricKind.GAUGE, "Requests that wait for a worker")
    running = _served_family("ts_running_requests", MetricKind.GAUGE, "Requests that a worker has")
    ended = _served_family("ts_ended_requests_total", MetricKind.COUNTER, "Requests by how they ended", "outcome")
    ready = _served_family("ts_ready_workers", MetricKind.GAUGE, "Workers that can take requests")
    again = _served_family(
        "ts_repeated_requests_total",
        MetricKind.COUNTER,
        "Requests that idempotent models were given once more",
        "reason",
    )
    refused = _served_family(
        "ts_quarantined_requests_total", MetricKind.COUNTER, "Requests that two workers died with, and no third one got"
    )
    replaced = _served_family(
        "ts_replaced_workers_total", MetricKind.COUNTER, "Workers that were replaced because of a limit", "reason"
    )
    scaled = _served_family(
        "ts_autoscaling_decisions_total",
        MetricKind.COUNTER,
        "Changes of the number of workers by autoscaling",
        "direction",
    )
    wanted = _served_family("ts_wanted_workers", MetricKind.GAUGE, "Workers that autoscaling wants")
    for model in models:
        labels = (model.name, model.version, host)
        if model.scaler is not None and model.scaler.active:
            last = model.scaler.last
            wanted.samples[labels] = Gauge(len(model.pool.slots) if last is None else last.workers)
            scaled.samples[(*labels, "up")] = Counter(model.scaler.ups)
            scaled.samples[(*labels, "down")] = Counter(model.scaler.downs)
        for reason, count in model.pool.replaced.items():
            replaced.samples[(*labels, reason)] = Counter(count)
        queued.samples[labels] = Gauge(model.ledger.queued)
        running.samples[labels] = Gauge(model.ledger.sent)
        ready.samples[labels] = Gauge(0 if model.pool.plan.in_process else model.pool.ready_count)
        for state in JobState:
            if state in FINAL:
                ended.samples[(*labels, state.value)] = Counter(model.ledger.counts[state])
        repeats = model.pool.plan.repeats
        if repeats is not None:
            again.samples[(*labels, "worker_died")] = Counter(repeats.after_deaths)
            again.samples[(*labels, "batch_failed")] = Counter(repeats.after_failures)
            refused.samples[labels] = Counter(repeats.quarantined)
    return [queued, running, ended, ready, again, refused, replaced, scaled, wanted]


def refused_calls(counts: Mapping[str, int], host: str) -> Family:
    """Calls without a good key, by the API that they were for."""
    return _by_api("ts_refused_calls_total", "Calls refused because of their key", counts, host)


def shared_snapshot_family(troubles: int, host: str) -> Family:
    """What of a shared snapshot this server can't follow."""
    sentence = "Versions that aren't what the shared snapshot says, and 1 more while it can't be read or written"
    family = Family(Definition("ts_shared_snapshot_failures", MetricKind.GAUGE, "Count", ("hostname",)), sentence)
    family.samples[(host,)] = Gauge(troubles)
    return family


def flooded_connections(counts: Mapping[str, int], host: str) -> Family:
    """Connections that the HTTP/2 engine closed, by API, because their clients cancelled too many calls."""
    sentence = "Connections closed because too many of their calls were cancelled"
    return _by_api("ts_flooded_connections_total", sentence, counts, host)


def _by_api(name: str, sentence: str, counts: Mapping[str, int], host: str) -> Family:
    family = Family(Definition(name, MetricKind.COUNTER, "Count", ("api", "hostname")), sentence)
    for api, count in counts.items():
        family.samples[(api, host)] = Counter(count)
    return family


def _served_family(name: str, kind: MetricKind, sentence: str, *more: str) -> Family:
    return Family(Definition(name, kind, "Count", (*MODEL_LABELS, *more)), sentence)


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
        "nv_inference_compute_input_duration_us", MetricKind.COUNTER, "Microseconds of reading their tensors, beside it"
    )
    written = _family(
        "nv_inference_compute_output_duration_us",
        MetricKind.COUNTER,
        "Microseconds of writing their tensors, beside it",
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


def system_metrics(
    config: ServerConfig,
    registry: MetricsRegistry,
    gpu_count: int,
    env: Mapping[str, str],
    pids: Callable[[], Iterable[int]],
) -> SystemMetrics | None:
    """The sampler of the machine's metrics, None when they are turned off. `env`: the metrics command's environment;
    `pids`: the workers' process ids."""
    if config.disable_system_metrics:
        return None
    command = _command(config.system_metrics_cmd, env) if config.system_metrics_cmd else None
    return SystemMetrics(registry, config.metric_time_interval, gpu_count, command=command, pids=pids)


def _command(words: str, env: Mapping[str, str]) -> RunCommand:
    argv = command_line(sys.executable, words)

    async def run(pids: str) -> str | None:
        return await tool_output(argv, COMMAND_S_MAX, given=pids + "\n", env=env, cwd=PACKAGE_PARENT)

    return run
