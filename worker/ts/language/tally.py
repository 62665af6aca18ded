"""What a language model's requests count, under the names that vLLM's dashboards use (docs/metrics.md)."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Collection, Iterator
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
#: Requests that an engine has and doesn't compute: the server counts them as those of its own queue, too.
WAITING = "vllm:num_requests_waiting"
_GAUGES = {
    "vllm:num_requests_running": "Requests that are computed.",
    WAITING: "Requests that wait in the engine.",
    "vllm:kv_cache_usage_perc": "Share of the cache of keys and values in use.",
}
_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": "Time to the first piece of a streamed answer.",
    "vllm:request_time_per_output_token_seconds": "Mean time between the pieces of a streamed answer.",
    "vllm:e2e_request_latency_seconds": "Time of a request in the engine.",
}
#: Events of a stream that may have no token: roles, ends and usage, of several choices. So many count at its end only,
#: since a counter can't go back.
EVENTS_BESIDE = 8
#: The time between two counts of a stream's tokens, and between two portions of records.
_TELL_S, _PORTION_S = 0.5, 0.25
_EVENT = b"data: {"
#: The members of an answer that have its number of tokens.
_COUNTS = (b'"usage":', b'"timings":')


class Tally:
    """The counts of all requests in a worker. `told`: the metrics that an engine tells by itself. Records go to the
    frontend in portions, and with the last request that runs: each alone would wake it once more for a request."""

    def __init__(self, told: Collection[str] = ()) -> None:
        self.told = told
        self._labels: list[Dimension] = []
        self._context: Context | None = None
        self._running = 0
        self._records: deque[str] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._due = False

    def begin(self, context: Context) -> None:
        """Must be called in the loop of the requests, before the first one."""
        if not self._labels:
            self._loop = asyncio.get_running_loop()
            self._labels = [Dimension("model_name", str(context.model_name))]
            self._context = context

    @contextmanager
    def request(self) -> Iterator[Count]:
        """Counts one request, which has begun."""
        self._running += 1
        self.gauge("vllm:num_requests_running", self._running)
        count = Count(self)
        try:
            yield count
        finally:
            self._running -= 1
            self.gauge("vllm:num_requests_running", self._running)
            count.end()
            if not self._running:
                self._write()

    def gauge(self, name: str, value: float) -> None:
        if name not in self.told:
            self._emit(MetricTypes.GAUGE, name, value)

    def tell(self, name: str, value: float, change: float) -> None:
        """Takes the new value of a metric that the engine tells, and its change since the last one."""
        kind = MetricTypes.GAUGE if name in _GAUGES else MetricTypes.COUNTER
        self._emit(kind, name, value if kind is MetricTypes.GAUGE else change)

    def _emit(self, kind: MetricTypes, name: str, value: float) -> None:
        text = _GAUGES.get(name) or _COUNTERS[name]
        if name == WAITING and self._context is not None:
            self._context._tell_waiting(int(value))
        self._keep(body(name, "Count", value, self._labels, metric_type=kind, help=text))

    def _keep(self, record: str) -> None:
        """Has the record written soon; any thread may call it."""
        self._records.append(record)
        if self._loop is None:
            self._write()
        elif not self._due:
            self._due = True
            self._loop.call_soon_threadsafe(self._loop.call_later, _PORTION_S, self._portion)

    def _portion(self) -> None:
        self._due = False
        self._write()

    def _write(self) -> None:
        emit(*(self._records.popleft() for _ in range(len(self._records))))

    def count(self, name: str, value: float) -> None:
        if value > 0 and name not in self.told:
            self._emit(MetricTypes.COUNTER, name, value)

    def observe(self, name: str, value_s: float) -> None:
        kind, text = MetricTypes.HISTOGRAM, _HISTOGRAMS[name]
        value_s = round(value_s, 6)
        self._keep(body(name, "s", value_s, self._labels, metric_type=kind, help=text, buckets=_SECONDS))


class Count:
    """One request. `pieces`: the events of its stream, about one for each token, which count while it runs. `usage`:
    gives its tokens if the answer doesn't."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self.usage: Callable[[], dict[str, Any]] | None = None
        self._begun_s = self._told_s = perf_counter()
        self._first_s = self._last_s = 0.0
        self._pieces = self._told = 0
        self._last = b""

    def events(self, data: bytes) -> None:
        pieces = data.count(_EVENT)
        if pieces:
            self._last_s = perf_counter()
            if not self._pieces:
                self._first_s = self._told_s = self._last_s
                self._tally.observe("vllm:time_to_first_token_seconds", self._first_s - self._begun_s)
            self._pieces += pieces
            if self._last_s - self._told_s >= _TELL_S:
                self._told_s = self._last_s
                self._tell_tokens(self._pieces - EVENTS_BESIDE)
        if any(name in data for name in _COUNTS):
            self._last = data

    def whole(self, data: bytes) -> None:
        self._last = data

    def _tell_tokens(self, given: int) -> None:
        self._tally.count("vllm:generation_tokens_total", given - self._told)
        self._told = max(given, self._told)

    def end(self) -> None:
        usage, tally = self._usage(), self._tally
        taken = usage.get("prompt_tokens", 0)
        self._tell_tokens(usage.get("completion_tokens") or self._pieces)
        tally.count("vllm:prompt_tokens_total", taken)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if cached is not None:
            tally.count("vllm:prefix_cache_queries_total", taken)
            tally.count("vllm:prefix_cache_hits_total", cached)
        tally.observe("vllm:e2e_request_latency_seconds", perf_counter() - self._begun_s)
        if self._pieces > 1:
            between_s = (self._last_s - self._first_s) / (self._pieces - 1)
            tally.observe("vllm:request_time_per_output_token_seconds", between_s)

    def _usage(self) -> dict[str, Any]:
        """The engine's own count of tokens, as OpenAI's `usage`; {} without one."""
        if self.usage is not None:
            return self.usage()
        for event in reversed(self._last.split(b"\n\n")):
            if any(name in event for name in _COUNTS):
                try:
                    found = json.loads(event.rpartition(b"\ndata: ")[2].removeprefix(b"data: "))
                    if isinstance(usage := found.get("usage"), dict):
                        return usage
                    if "timings" in found:
                        return _of_timings(found["timings"])
                except (ValueError, LookupError, TypeError, AttributeError):
                    return {}
        return {}


def _of_timings(told: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp's count at the end of a stream, also without `include_usage`."""
    cached = told["cache_n"]
    details = {"cached_tokens": cached}
    return {
        "prompt_tokens": cached + told["prompt_n"],
        "completion_tokens": told["predicted_n"],
        "prompt_tokens_details": details,
    }
