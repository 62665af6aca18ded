"""What makes the spans of a server: implements `ts_frontend.telemetry.tracing.tracing.Tracing`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ts.protocol.frames import Input, Pairs
from ts_frontend.grpc import tracing as trace_grpc
from ts_frontend.grpc.call import Method
from ts_frontend.http import tracing as trace_http
from ts_frontend.http.request import AsgiApp
from ts_frontend.job import Job, Ledger
from ts_frontend.telemetry.metrics.definitions import Definition, MetricKind
from ts_frontend.telemetry.metrics.samples import Counter, Family
from ts_frontend.telemetry.tracing.export import Export
from ts_frontend.telemetry.tracing.sampling import Sampling
from ts_frontend.telemetry.tracing.spans import TracedLedger, current


class Traces:
    """Spans of calls, requests and jobs, sent by `export`."""

    def __init__(self, export: Export, sampling: Sampling) -> None:
        self._export = export
        self.sampling = sampling
        self._tracer = export.tracer

    def method(self, method: Method) -> Method:
        return trace_grpc.traced(method, self._tracer)

    def http(self, app: AsgiApp, paths: Sequence[str]) -> AsgiApp:
        return trace_http.traced(app, self._tracer, paths)

    def ledger(self, name: str, version: str) -> Ledger:
        return TracedLedger(self._export.ended, name, version)

    def jobs(self, new_job: Callable[..., Job]) -> Callable[..., Job]:
        def make(ledger: Ledger, inputs: Sequence[Input], *, headers: Pairs = (), **more: Any) -> Job:
            request = current.get()
            if request is None:
                return new_job(ledger, inputs, headers=headers, **more)
            if isinstance(ledger, TracedLedger):
                request.decide(self.sampling, ledger.model_name)
            return new_job(ledger, inputs, headers=request.carried(headers), **more)

        return make

    def families(self) -> list[Family]:
        definition = Definition("ts_trace_spans_total", MetricKind.COUNTER, "Count", ("outcome",))
        family = Family(definition, "Spans by what became of them")
        for outcome, count in self._export.counts().items():
            family.samples[(outcome,)] = Counter(count)
        return [family]

    async def close(self) -> None:
        await self._export.close()
