"""Spans of requests: one for each call or HTTP request, which continues the client's trace, and below it the time in
the queue and on a worker. Only imported when traces are on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar, Token
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Span, SpanContext, SpanKind, Status, StatusCode, Tracer, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ts.protocol.frames import Input, Pairs
from ts_frontend.job import Job, JobState, Ledger
from ts_frontend.telemetry.metrics.families import Counter, Definition, Family, MetricKind
from ts_frontend.telemetry.tracing.export import Export
from ts_frontend.telemetry.tracing.settings import Sampling

MODEL_NAME, MODEL_VERSION, REQUEST_ID = "model.name", "model.version", "request.id"
_PARENT = "traceparent"
_PROPAGATOR = TraceContextTextMapPropagator()


class RequestSpan:
    """A call or HTTP request that has a span, recorded or not."""

    __slots__ = ("about", "begun_ns", "begun_s", "continued", "decided", "recording", "span")

    def __init__(
        self, tracer: Tracer, name: str, parent: str | None, state: str | None, attributes: dict[str, Any]
    ) -> None:
        context = Context()
        if parent is not None:
            carrier = {_PARENT: parent} if state is None else {_PARENT: parent, "tracestate": state}
            context = _PROPAGATOR.extract(carrier, context)
        self.begun_ns, self.begun_s = time.time_ns(), time.monotonic()
        self.span: Span = tracer.start_span(name, context, SpanKind.SERVER, attributes, start_time=self.begun_ns)
        self.recording = self.span.is_recording()
        self.continued, self.decided = get_current_span(context).get_span_context().is_valid, False
        #: Attributes collected while the request runs.
        self.about: dict[str, Any] = {}

    def at_ns(self, monotonic_s: float) -> int:
        """A monotonic time as nanoseconds since 1970."""
        return self.begun_ns + int((monotonic_s - self.begun_s) * 1e9)

    def decide(self, sampling: Sampling, model: str) -> None:
        """Applies the model's trace settings once the request's first model is known: they may drop the request."""
        if self.recording and not self.decided:
            self.decided = True
            self.recording = sampling.wanted(model, self.continued)

    def end(self, fault: str, attributes: dict[str, Any]) -> None:
        """Ends the span. `fault`: the error type of a server error, else ""."""
        if not self.recording:
            return
        if fault:
            attributes["error.type"] = fault
            self.span.set_status(Status(StatusCode.ERROR))
        self.span.set_attributes({**self.about, **attributes})
        self.span.end()

    def carried(self, headers: Pairs) -> Pairs:
        """The headers, with this span as the parent of a handler's own spans."""
        found = self.span.get_span_context()
        flags = int(found.trace_flags) if self.recording else 0
        value = f"00-{found.trace_id:032x}-{found.span_id:016x}-{flags:02x}"
        return [*(pair for pair in headers if pair[0] != _PARENT), (_PARENT, value)]


#: The request that is being answered, in its task and in those made for it.
current: ContextVar[RequestSpan | None] = ContextVar("current", default=None)


def leave(token: Token[RequestSpan | None]) -> None:
    with suppress(ValueError):  # a stream that was left is closed in another task
        current.reset(token)


class JobSpans:
    """The spans of a model's jobs: each job that ends gets some, below that of its request."""

    def __init__(self, ended: Callable[[ReadableSpan], None], name: str, version: str) -> None:
        self._ended = ended
        self._model = {MODEL_NAME: name, MODEL_VERSION: version}
        self._requests: dict[int, RequestSpan] = {}
        self._ids = RandomIdGenerator()

    def entered(self, job: Job) -> None:
        """As `Ledger.on_entered`."""
        request = current.get()
        if request is not None and request.recording:
            self._requests[job.id] = request
            request.about |= {**self._model, REQUEST_ID: job.request_id}

    def left(self, job: Job) -> None:
        """As `Ledger.on_left`."""
        ended = self._requests.pop(job.id, None)
        if ended is not None and job.queued_at_s:
            self._record(ended, job, job.state)

    def _record(self, request: RequestSpan, job: Job, state: JobState) -> None:
        """Records the job's spans once it has ended: a running request costs only one table lookup."""
        now_s = time.monotonic()
        about = {**self._model, REQUEST_ID: job.request_id}
        self._child(request, "queue", job.queued_at_s, job.sent_at_s or now_s, about, StatusCode.UNSET)
        if job.sent_at_s:
            status = StatusCode.ERROR if state is JobState.FAILED else StatusCode.UNSET
            self._child(request, "inference", job.sent_at_s, now_s, {**about, "outcome": state.value}, status)

    def _child(
        self, request: RequestSpan, name: str, from_s: float, to_s: float, about: dict[str, str], status: StatusCode
    ) -> None:
        """Makes a span that has already ended: a quarter of the cost of starting and ending one."""
        above = request.span.get_span_context()
        own = SpanContext(above.trace_id, self._ids.generate_span_id(), False, above.trace_flags, above.trace_state)
        span = request.span
        assert isinstance(span, ReadableSpan)
        self._ended(
            ReadableSpan(
                name,
                own,
                above,
                span.resource,
                about,
                status=Status(status),
                start_time=request.at_ns(from_s),
                end_time=request.at_ns(to_s),
                instrumentation_scope=span.instrumentation_scope,
            )
        )


class Traces:
    """Spans of calls, requests and jobs, sent by `export`. `sampling` says which requests to models get spans, `tracer`
    makes those of gRPC calls (`grpc/tracing.py`) and of HTTP requests (`http/tracing.py`)."""

    def __init__(self, export: Export, sampling: Sampling) -> None:
        self._export = export
        self.sampling = sampling
        self.tracer = export.tracer

    def ledger(self, name: str, version: str) -> Ledger:
        """The ledger for the jobs of one model version: their times in the queue and on a worker become spans."""
        spans, ledger = JobSpans(self._export.ended, name, version), Ledger()
        ledger.on_entered, ledger.on_left = spans.entered, spans.left
        return ledger

    def jobs(self, new_job: Callable[..., Job], model: str) -> Callable[..., Job]:
        """As `new_job`, but the model's handlers get the span's context in the header `traceparent`."""

        def make(ledger: Ledger, inputs: Sequence[Input], *, headers: Pairs = (), **more: Any) -> Job:
            request = current.get()
            if request is None:
                return new_job(ledger, inputs, headers=headers, **more)
            request.decide(self.sampling, model)
            return new_job(ledger, inputs, headers=request.carried(headers), **more)

        return make

    def families(self) -> list[Family]:
        definition = Definition("ts_trace_spans_total", MetricKind.COUNTER, "Count", ("outcome",))
        family = Family(definition, "Spans by outcome")
        for outcome, count in self._export.counts().items():
            family.samples[(outcome,)] = Counter(count)
        return [family]

    async def close(self) -> None:
        """Sends the queued spans, for a few seconds at most."""
        await self._export.close()
