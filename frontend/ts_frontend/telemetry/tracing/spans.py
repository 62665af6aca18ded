"""Spans of requests: one for each call or HTTP request, which continues the client's trace, and below it the time in
the queue and on a worker; and their export: a bounded queue, a thread that sends them, and counts by outcome. Only
imported when traces are on.

Ending a span only appends it to the queue and never waits for the collector; spans that find it full are dropped and
counted.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar, Token
from importlib import import_module
from typing import TYPE_CHECKING, Any

from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Span, SpanContext, SpanKind, Status, StatusCode, Tracer, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import ts.version
from ts.protocol.frames import Input, Pairs
from ts_frontend.job import Job, JobState, Ledger
from ts_frontend.telemetry.metrics.families import Counter, Definition, Family, MetricKind

if TYPE_CHECKING:
    from ts_frontend.telemetry.tracing.tracing import Sampling

log = logging.getLogger(__name__)

SERVICE = "torchrelay"
QUEUED_MAX = 2048
CLOSE_S_MAX = 5.0


class CountedExporter(SpanExporter):
    """Hands spans to `inner`. Only the thread that sends writes the counts."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self.exported = self.failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:
            if result is SpanExportResult.SUCCESS:
                self.exported += len(spans)
            else:
                self.failed += len(spans)
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)


class BoundedProcessor(BatchSpanProcessor):
    """Takes `queued_max` spans that aren't sent yet, and drops the newest beyond them."""

    def __init__(self, exporter: CountedExporter, queued_max: int) -> None:
        super().__init__(exporter, max_queue_size=queued_max, max_export_batch_size=min(512, queued_max))
        self._counted = exporter
        self._queued_max = queued_max
        self._taken = self.dropped = 0

    def on_end(self, span: ReadableSpan) -> None:
        if not span.context.trace_flags.sampled:
            return
        if self._taken - self._counted.exported - self._counted.failed >= self._queued_max:
            self.dropped += 1
            if self.dropped == 1:
                log.warning("Spans are dropped: the collector is too slow, or can't be reached")
            return
        self._taken += 1
        super().on_end(span)


class Export:
    """The tracer and the exporter of its spans, from OpenTelemetry's `package`. `url` None: the environment names it.
    Raises ValueError for unreadable OpenTelemetry variables."""

    def __init__(self, package: str, url: str | None, environ: Mapping[str, str]) -> None:
        self._exporter = CountedExporter(_exporter(package, url))
        self._processor = BoundedProcessor(self._exporter, _queued_max(environ))
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(self._processor)
        self.tracer: Tracer = self._provider.get_tracer(SERVICE, ts.version.__version__)

    def ended(self, span: ReadableSpan) -> None:
        """Queues a span that was made without a tracer."""
        self._processor.on_end(span)

    def counts(self) -> dict[str, int]:
        exporter = self._exporter
        return {"exported": exporter.exported, "failed": exporter.failed, "dropped": self._processor.dropped}

    async def close(self) -> None:
        """Sends the queued spans; gives up after CLOSE_S_MAX, so that the process can end."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(done.set)

        threading.Thread(target=shut_down, name="trace-shutdown", daemon=True).start()
        try:
            await asyncio.wait_for(done.wait(), CLOSE_S_MAX)
        except TimeoutError:
            log.warning("The last spans weren't sent: the collector took longer than %g s", CLOSE_S_MAX)


def _exporter(package: str, url: str | None) -> SpanExporter:
    make: Callable[..., SpanExporter] = import_module(f"{package}.trace_exporter").OTLPSpanExporter
    return make() if url is None else make(endpoint=url)


def _resource() -> Resource:
    """The resource of the spans: from OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, else SERVICE."""
    found = Resource.create()
    if not str(found.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        return found
    return found.merge(Resource({SERVICE_NAME: SERVICE}))


def _queued_max(environ: Mapping[str, str]) -> int:
    text = environ.get("OTEL_BSP_MAX_QUEUE_SIZE", "").strip()
    return int(text) if text.isdecimal() and int(text) > 0 else QUEUED_MAX


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
        request = current.get()
        if request is not None and request.recording:
            self._requests[job.id] = request
            request.about |= {**self._model, REQUEST_ID: job.request_id}

    def left(self, job: Job) -> None:
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
    makes those of gRPC calls (`grpc/around.py`) and of HTTP requests (`http/around.py`)."""

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
