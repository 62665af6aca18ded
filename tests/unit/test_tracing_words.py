"""The destination of traces and the settings for it; the cost of a collector that doesn't answer."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from support import GUARD_S
from ts_frontend.config.kinds import ConfigError
from ts_frontend.http.routes import ROUTES
from ts_frontend.http.routing import RouteTable
from ts_frontend.telemetry.tracing.spans import BoundedProcessor, CountedExporter
from ts_frontend.telemetry.tracing.tracing import GRPC, HTTP, endpoint, protocol_of, wanted

BASE = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}


def test_traces_are_made_where_somebody_says_where_to() -> None:
    assert not wanted(None, {})
    assert wanted("http://c:4318", {})
    assert wanted(None, BASE)
    assert wanted(None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"})
    assert not wanted("http://c:4318", {"OTEL_SDK_DISABLED": "true"})
    assert not wanted(None, {**BASE, "OTEL_TRACES_EXPORTER": "none"})


def test_an_exporter_that_was_withdrawn_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Promise 001-35."""
    assert not wanted(None, {**BASE, "OTEL_TRACES_EXPORTER": "jaeger"})
    assert "OTEL_TRACES_EXPORTER=jaeger" in caplog.text


def test_protocols() -> None:
    assert protocol_of({}) == HTTP
    assert protocol_of({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}) == GRPC
    both = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    assert protocol_of(both) == HTTP
    with pytest.raises(ConfigError, match="'http/json'"):
        protocol_of({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})


def test_endpoints() -> None:
    assert endpoint(None, HTTP) is None
    assert endpoint("http://c:4318", HTTP) == endpoint("http://c:4318/", HTTP) == "http://c:4318/v1/traces"
    assert endpoint("https://c/own/path", HTTP) == "https://c/own/path"
    assert endpoint("http://c:4317", GRPC) == "http://c:4317"
    with pytest.raises(ConfigError, match="otlp_endpoint = c:4317"):
        endpoint("c:4317", GRPC)


@pytest.mark.parametrize(
    ("path", "template"),
    [
        ("/predictions/m", "/predictions/{model_name}"),
        ("/v1/models/m:predict", "/v1/models/{model_name}:predict"),
        ("/v1/models/m", "/v1/models/{model_name}"),
        ("/v2/models/m/versions/2/infer", "/v2/models/{model_name}/versions/{model_version}/infer"),
        ("/v2/models/m/infer", "/v2/models/{model_name}/infer"),
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/predictions/", ""),
        ("/what/ever", ""),
    ],
)
def test_templates(path: str, template: str) -> None:
    assert RouteTable(ROUTES, ("http_inference",)).find("POST", path).template == template


class Stuck(SpanExporter):
    """A collector that answers when it may."""

    def __init__(self) -> None:
        self.may = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.may.wait(GUARD_S)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


def test_spans_beyond_the_bound_are_dropped_and_counted() -> None:
    inner = Stuck()
    exporter = CountedExporter(inner)
    processor = BoundedProcessor(exporter, 8)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    tracer = provider.get_tracer("test")
    for _ in range(20):
        tracer.start_span("one").end()
    assert processor.dropped == 12
    inner.may.set()
    provider.shutdown()
    assert (exporter.exported, exporter.failed) == (8, 0)
