"""What makes the spans of a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ts.protocol.frames import Input, Pairs
from ts_frontend.job import Job, Ledger
from ts_frontend.telemetry.metrics.definitions import Definition, MetricKind
from ts_frontend.telemetry.metrics.samples import Counter, Family
from ts_frontend.telemetry.tracing.export import Export
from ts_frontend.telemetry.tracing.sampling import Sampling
from ts_frontend.telemetry.tracing.spans import TracedLedger, current


class Traces:
    """Spans of calls, requests and jobs, sent by `export`. `sampling` says which requests to models get spans, `tracer`
    makes those of gRPC calls (`grpc/tracing.py`) and of HTTP requests (`http/tracing.py`)."""

    def __init__(self, export: Export, sampling: Sampling) -> None:
        self._export = export
        self.sampling = sampling
        self.tracer = export.tracer

    def ledger(self, name: str, version: str) -> Ledger:
        """For the jobs of one model version: their time in the queue and on a worker become spans."""
        return TracedLedger(self._export.ended, name, version)

    def jobs(self, new_job: Callable[..., Job]) -> Callable[..., Job]:
        """The same, but that handlers get the span's context in the header `traceparent`."""

        def make(ledger: Ledger, inputs: Sequence[Input], *, headers: Pairs = (), **more: Any) -> Job:
            request = current.get()
            if request is None:
                return new_job(ledger, inputs, headers=headers, **more)
            if isinstance(ledger, TracedLedger):
                request.decide(self.sampling, ledger.model_name)
            return new_job(ledger, inputs, headers=request.carried(headers), **more)

        return make

    def families(self) -> list[Family]:
        """What became of the spans, for the metrics."""
        definition = Definition("ts_trace_spans_total", MetricKind.COUNTER, "Count", ("outcome",))
        family = Family(definition, "Spans by what became of them")
        for outcome, count in self._export.counts().items():
            family.samples[(outcome,)] = Counter(count)
        return [family]

    async def close(self) -> None:
        """Sends what there is, for a few seconds at most."""
        await self._export.close()
