"""What is going on in the models served, read when somebody asks: it costs requests nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ts_frontend.job import FINAL, State
from ts_frontend.models.model import Model
from ts_frontend.telemetry.metrics import MODEL_LABELS
from ts_frontend.telemetry.metrics_definitions import Definition, Kind
from ts_frontend.telemetry.metrics_samples import Counter, Family, Gauge


def served_families(models: Iterable[Model], host: str) -> list[Family]:
    """Requests queued, running and ended, and workers that are ready, of every model version."""
    queued = _family("ts_queued_requests", Kind.GAUGE, "Requests that wait for a worker")
    running = _family("ts_running_requests", Kind.GAUGE, "Requests that a worker has")
    ended = _family("ts_ended_requests_total", Kind.COUNTER, "Requests by how they ended", "outcome")
    ready = _family("ts_ready_workers", Kind.GAUGE, "Workers that can take requests")
    for model in models:
        labels = (model.name, model.version, host)
        queued.samples[labels] = Gauge(model.ledger.queued)
        running.samples[labels] = Gauge(model.ledger.sent)
        ready.samples[labels] = Gauge(0 if model.pool.plan.inside else model.pool.ready_count)
        for state in State:
            if state in FINAL:
                ended.samples[(*labels, state.value)] = Counter(model.ledger.counts[state])
    return [queued, running, ended, ready]


def refused_calls(counts: Mapping[str, int], host: str) -> Family:
    """Calls without a good key, by the API that they were for."""
    return _by_api("ts_refused_calls_total", "Calls refused because of their key", counts, host)


def flooded_connections(counts: Mapping[str, int], host: str) -> Family:
    """Connections that the HTTP/2 engine closed, by API, because their clients cancelled too many calls."""
    sentence = "Connections closed because too many of their calls were cancelled"
    return _by_api("ts_flooded_connections_total", sentence, counts, host)


def _by_api(name: str, sentence: str, counts: Mapping[str, int], host: str) -> Family:
    family = Family(Definition(name, Kind.COUNTER, "Count", ("api", "hostname")), sentence)
    for api, count in counts.items():
        family.samples[(api, host)] = Counter(count)
    return family


def _family(name: str, kind: Kind, sentence: str, *more: str) -> Family:
    return Family(Definition(name, kind, "Count", (*MODEL_LABELS, *more)), sentence)
