"""What a language model's requests count, under the names that vLLM's dashboards use (docs/metrics.md)."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from ts.context import Context
from ts.metrics.dimension import Dimension
from ts.metrics.metric_type_enum import MetricTypes
from ts.metrics.records import body, emit

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.25, 0.5, 1, 2.5, 5, 10, 40, 160)
_COUNTERS = {
    "vllm:prompt_tokens_total": "Tokens of prompts.",
    "vllm:generation_tokens_total": "Tokens of answers.",
    "vllm:prefix_cache_queries_total": "Tokens of prompts that were looked up in the cache of prefixes.",
    "vllm:prefix_cache_hits_total": "Tokens of prompts that the cache of prefixes had.",
}
_GAUGES = {
    "vllm:num_requests_running": "Requests that are computed.",
    "vllm:num_requests_waiting": "Requests that wait in the engine.",
    "vllm:kv_cache_usage_perc": "Share of the cache of keys and values in use.",
}
_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": "Time to the first piece of a streamed answer.",
    "vllm:request_time_per_output_token_seconds": "Mean time between the pieces of a streamed answer.",
    "vllm:e2e_request_latency_seconds": "Time of a request in the engine.",
}
_EVENT, _USAGE = b"data: {", b'"usage":'


class Tally:
    """The counts of all requests in a worker. `told`: the metrics that an engine tells by itself."""

    def __init__(self, told: Collection[str] = ()) -> None:
        self.told = told
        self._labels: list[Dimension] = []
        self._running = 0

    def begin(self, context: Context) -> None:
        if not self._labels:
            self._labels = [Dimension("model_name", str(context.model_name))]

    @contextmanager
    def request(self) -> Iterator[Count]:
        """Counts one request, which has begun."""
        self._running += 1
        self.gauge("vllm:num_requests_running", self._running)
        count = Count()
        try:
            yield count
        finally:
            self._running -= 1
            self.gauge("vllm:num_requests_running", self._running)
            self._tell(count)

    def gauge(self, name: str, value: float) -> None:
        if name not in self.told:
            self._emit(MetricTypes.GAUGE, name, value)

    def tell(self, name: str, value: float, change: float) -> None:
        """Takes the new value of a metric that the engine tells, and its change since the last one."""
        kind = MetricTypes.GAUGE if name in _GAUGES else MetricTypes.COUNTER
        self._emit(kind, name, value if kind is MetricTypes.GAUGE else change)

    def _emit(self, kind: MetricTypes, name: str, value: float) -> None:
        text = _GAUGES.get(name) or _COUNTERS[name]
        emit(body(name, "Count", value, self._labels, metric_type=kind, help=text))

    def _tell(self, count: Count) -> None:
        now_s = perf_counter()
        usage = count.usage()
        taken, given = usage.get("prompt_tokens", 0), usage.get("completion_tokens") or count.pieces
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        self._count("vllm:prompt_tokens_total", taken)
        self._count("vllm:generation_tokens_total", given)
        if cached is not None:
            self._count("vllm:prefix_cache_queries_total", taken)
            self._count("vllm:prefix_cache_hits_total", cached)
        self._observe("vllm:e2e_request_latency_seconds", now_s - count.begun_s)
        if count.first_s:
            self._observe("vllm:time_to_first_token_seconds", count.first_s - count.begun_s)
            if count.pieces > 1:
                between_s = (count.last_s - count.first_s) / (count.pieces - 1)
                self._observe("vllm:request_time_per_output_token_seconds", between_s)

    def _count(self, name: str, value: float) -> None:
        if value and name not in self.told:
            self._emit(MetricTypes.COUNTER, name, value)

    def _observe(self, name: str, value_s: float) -> None:
        kind, text = MetricTypes.HISTOGRAM, _HISTOGRAMS[name]
        emit(body(name, "s", round(value_s, 6), self._labels, metric_type=kind, help=text, buckets=_SECONDS))


class Count:
    """One request. `pieces`: the events of its stream, about one for each token."""

    def __init__(self) -> None:
        self.begun_s = perf_counter()
        self.first_s = self.last_s = 0.0
        self.pieces = 0
        self._last = b""

    def events(self, data: bytes) -> None:
        self.last_s = perf_counter()
        if not self.pieces:
            self.first_s = self.last_s
        self.pieces += data.count(_EVENT)
        if _USAGE in data:
            self._last = data

    def whole(self, data: bytes) -> None:
        self._last = data

    def usage(self) -> dict[str, Any]:
        """The engine's own count of tokens: OpenAI's `usage`, {} without one."""
        for event in reversed(self._last.split(b"\n\n")):
            if _USAGE in event:
                try:
                    found = json.loads(event.rpartition(b"\ndata: ")[2].removeprefix(b"data: ")).get("usage")
                except (ValueError, AttributeError):
                    return {}
                if isinstance(found, dict):
                    return found
        return {}
