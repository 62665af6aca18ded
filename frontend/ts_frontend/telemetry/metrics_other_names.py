"""What Triton and MLServer call the same, for their dashboards: made when asked for, of what is counted anyway."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ts_frontend.job import State
from ts_frontend.models.model import Model
from ts_frontend.telemetry.metrics_definitions import Definition, Kind
from ts_frontend.telemetry.metrics_samples import Counter, Family, Gauge

LABELS = ("model", "version")
#: Triton's reasons of failed requests.
REASONS = {State.FAILED: "BACKEND", State.EXPIRED: "REJECTED", State.CANCELLED: "CANCELED"}


class Sums(Protocol):
    """Who adds up latencies (`ts_frontend.telemetry.metrics.MetricsRegistry`)."""

    def sums_s(self, name: str, version: str) -> tuple[float, float]:
        """Seconds of all answered requests of a model version: from queueing to the answer, and in the queue."""


def triton_families(models: Iterable[Model], sums: Sums) -> list[Family]:
    """Its `nv_inference_…` metrics, as far as something is counted that they mean."""
    success = _family("nv_inference_request_success", Kind.COUNTER, "Requests that were answered")
    failure = _family("nv_inference_request_failure", Kind.COUNTER, "Requests that failed", "reason")
    pending = _family("nv_inference_pending_request_count", Kind.GAUGE, "Requests that wait for a worker")
    whole = _family("nv_inference_request_duration_us", Kind.COUNTER, "Microseconds of answered requests")
    queue = _family("nv_inference_queue_duration_us", Kind.COUNTER, "Microseconds of answered requests in the queue")
    count = _family("nv_inference_count", Kind.COUNTER, "Inferences, one for each answered request")
    calls = _family("nv_inference_exec_count", Kind.COUNTER, "Calls of the handler, one for each batch")
    infer = _family(
        "nv_inference_compute_infer_duration_us", Kind.COUNTER, "Microseconds of answered requests in those"
    )
    for model in models:
        labels, counts = (model.name, model.version), model.ledger.counts
        statistics = model.statistics
        count.samples[labels], calls.samples[labels] = Counter(statistics.answered), Counter(statistics.calls)
        infer.samples[labels] = Counter(int(statistics.handler_s * 1e6))
        whole_s, queue_s = sums.sums_s(model.name, model.version)
        success.samples[labels] = Counter(counts[State.ANSWERED])
        pending.samples[labels] = Gauge(model.ledger.queued)
        whole.samples[labels], queue.samples[labels] = Counter(whole_s * 1e6), Counter(queue_s * 1e6)
        for state, reason in REASONS.items():
            failure.samples[(*labels, reason)] = Counter(counts[state])
    return [success, failure, pending, count, calls, whole, queue, infer]


def mlserver_families(models: Iterable[Model]) -> list[Family]:
    success = _family("model_infer_request_success_total", Kind.COUNTER, "Requests that were answered")
    failure = _family("model_infer_request_failure_total", Kind.COUNTER, "Requests that failed")
    for model in models:
        labels, counts = (model.name, model.version), model.ledger.counts
        success.samples[labels] = Counter(counts[State.ANSWERED])
        failure.samples[labels] = Counter(sum(counts[state] for state in REASONS))
    return [success, failure]


def _family(name: str, kind: Kind, sentence: str, *more: str) -> Family:
    return Family(Definition(name, kind, "Count", (*LABELS, *more)), sentence)
