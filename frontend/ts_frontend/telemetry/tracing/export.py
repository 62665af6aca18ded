"""Export of spans: a bounded queue, a thread that sends them, and counts by outcome.

Ending a span only appends it to the queue and never waits for the collector; spans that find it full are dropped and
counted.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Tracer

import ts.version
from ts_frontend.telemetry.tracing.settings import GRPC

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
    """The tracer and the exporter of its spans. `url` None: the environment names it. Raises ValueError for unreadable
    OpenTelemetry variables."""

    def __init__(self, protocol: str, url: str | None, environ: Mapping[str, str]) -> None:
        self._exporter = CountedExporter(_exporter(protocol, url))
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


def _exporter(protocol: str, url: str | None) -> SpanExporter:
    more: dict[str, Any] = {} if url is None else {"endpoint": url}
    if protocol == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc

        return OverGrpc(**more)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

    return OverHttp(**more)


def _resource() -> Resource:
    """The resource of the spans: from OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, else SERVICE."""
    found = Resource.create()
    if not str(found.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        return found
    return found.merge(Resource({SERVICE_NAME: SERVICE}))


def _queued_max(environ: Mapping[str, str]) -> int:
    text = environ.get("OTEL_BSP_MAX_QUEUE_SIZE", "").strip()
    return int(text) if text.isdecimal() and int(text) > 0 else QUEUED_MAX
