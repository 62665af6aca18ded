"""Traces of a whole server, as a collector gets them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from e2e.servers import text_of, text_request
from support import GUARD_S, QuietHandler, http_server
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PROBE = """
def handle(data, context):
    if data is None:
        return None
    if b"fail" in bytes(*data[0].values()):
        raise ValueError("asked to")
    return [str(context.get_request_header(index, "traceparent")) for index in range(len(data))]
"""


class Collector:
    """The collector's requests over either protocol; the spans by name."""

    def __init__(self) -> None:
        self.services: set[str] = set()
        self._spans: list[Span] = []
        self._changed = threading.Condition()

    def take(self, request: ExportTraceServiceRequest) -> None:
        with self._changed:
            for resource in request.resource_spans:
                self.services |= {
                    one.value.string_value for one in resource.resource.attributes if one.key == "service.name"
                }
                self._spans += [span for scope in resource.scope_spans for span in scope.spans]
            self._changed.notify_all()

    def wait_for(self, found: Callable[[Span], bool]) -> Span:
        """The first span that is meant, once it is here."""
        with self._changed:
            assert self._changed.wait_for(lambda: any(map(found, self._spans)), GUARD_S), self._spans
            return next(filter(found, self._spans))

    def of(self, trace_id: str) -> list[Span]:
        with self._changed:
            return [span for span in self._spans if span.trace_id.hex() == trace_id]

    @property
    def names(self) -> set[str]:
        with self._changed:
            return {span.name for span in self._spans}


class OverGrpc(TraceServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:
        self._collector.take(request)
        return ExportTraceServiceResponse()


def over_http(collector: Collector) -> type[QuietHandler]:
    class OverHttp(QuietHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.take(ExportTraceServiceRequest.FromString(body))
            self.answer(200, headers={"content-type": "application/x-protobuf"})

    return OverHttp


@pytest.fixture(scope="module", params=["http/protobuf", "grpc"])
def collecting(request: pytest.FixtureRequest) -> Iterator[tuple[Collector, str, str]]:
    """A collector, its URL, its protocol."""
    collector = Collector()
    if request.param == "grpc":
        server = grpc.server(futures.ThreadPoolExecutor(2))
        add_TraceServiceServicer_to_server(OverGrpc(collector), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield collector, f"http://127.0.0.1:{port}", request.param
        server.stop(0).wait(GUARD_S)
        return
    with http_server(over_http(collector)) as url:
        yield collector, url, request.param


@pytest.fixture(scope="module")
def served(collecting: tuple[Collector, str, str], server_of: Callable[..., Any]) -> Iterator[Any]:
    collector, url, protocol = collecting
    env = {"OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_EXPORTER_OTLP_PROTOCOL": protocol}
    settings: dict[str, object] = {"metrics_mode": "prometheus", "env": env}
    if protocol == "grpc":
        env |= {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_SERVICE_NAME": "tested"}
    else:
        settings["otlp_endpoint"] = url
    with server_of({"probe": (PROBE, "")}, **settings) as server:
        server.collector = collector
        yield server


@pytest.fixture
def stub(served: Any) -> Iterator[GRPCInferenceServiceStub]:
    with grpc.insecure_channel(served.inference) as channel:
        yield GRPCInferenceServiceStub(channel)


def parent_of(trace_id: str, flags: str = "01") -> tuple[tuple[str, str], ...]:
    return (("traceparent", f"00-{trace_id}-{PARENT}-{flags}"), ("x-request-id", f"id-{trace_id[:4]}"))


def attributes(span: Span) -> dict[str, object]:
    found = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        assert kind is not None, one.key
        found[one.key] = getattr(one.value, kind)
    return found


def ask_http(url: str, body: bytes | None = b"x", **headers: str) -> tuple[int, str]:
    form = {"content-type": "application/x-www-form-urlencoded"}
    answer = httpx.request(
        "GET" if body is None else "POST", url, content=body, headers=form | headers, timeout=GUARD_S
    )
    return answer.status_code, answer.text


def children(collector: Collector, span: Span) -> dict[str, Span]:
    """Spans below it, once both are here."""
    for name in ("queue", "inference"):
        collector.wait_for(lambda one, name=name: one.name == name and one.parent_span_id == span.span_id)  # type: ignore[misc]
    return {one.name: one for one in collector.of(span.trace_id.hex()) if one.parent_span_id == span.span_id}


def test_a_call_continues_the_clients_trace(served: Any, stub: Any) -> None:
    """Promise 001-34."""
    answer = stub.ModelInfer(text_request("probe", b"a"), metadata=parent_of(TRACE), timeout=GUARD_S)
    span = served.collector.wait_for(lambda one: one.trace_id.hex() == TRACE and one.kind == Span.SPAN_KIND_SERVER)
    assert span.name == "inference.GRPCInferenceService/ModelInfer"
    assert span.parent_span_id.hex() == PARENT
    found = attributes(span)
    expected = {
        "rpc.system.name": "grpc",
        "rpc.method": "inference.GRPCInferenceService/ModelInfer",
        "rpc.service": "inference.GRPCInferenceService",
        "rpc.response.status_code": "OK",
        "rpc.grpc.status_code": 0,
        "model.name": "probe",
        "model.version": "1.0",
        "request.id": "id-4bf9",
        "network.peer.address": "127.0.0.1",
    }
    assert {key: found.get(key) for key in expected} == expected
    assert text_of(answer) == f"00-{TRACE}-{span.span_id.hex()}-01", "the handler continues our span"
    below = children(served.collector, span)
    times = [
        span.start_time_unix_nano,
        below["queue"].start_time_unix_nano,
        below["queue"].end_time_unix_nano,
        below["inference"].start_time_unix_nano,
        below["inference"].end_time_unix_nano,
    ]
    # Clocks of whole microseconds: where one ends the next begins.
    assert all(later >= earlier - 1000 for earlier, later in zip(times, times[1:], strict=False)), times
    assert attributes(below["inference"])["outcome"] == "answered"
    assert served.collector.services == {"torchrelay"} or served.collector.services == {"tested"}


def test_what_the_client_does_not_sample_is_not_sent(served: Any, stub: Any) -> None:
    silent, loud = "a" * 32, "b" * 32
    told = text_of(stub.ModelInfer(text_request("probe", b"a"), metadata=parent_of(silent, "00"), timeout=GUARD_S))
    assert told.startswith(f"00-{silent}-") and told.endswith("-00"), "the handler is told, too"
    stub.ModelInfer(text_request("probe", b"a"), metadata=parent_of(loud), timeout=GUARD_S)
    served.collector.wait_for(lambda one: one.trace_id.hex() == loud and one.kind == Span.SPAN_KIND_SERVER)
    assert not served.collector.of(silent)


def set_trace(stub: Any, model: str = "", **settings: list[str]) -> dict[str, list[str]]:
    request = pb.TraceSettingRequest(model_name=model)
    for name, values in settings.items():
        request.settings[name].value.extend(values)
    return {name: list(one.value) for name, one in stub.TraceSetting(request, timeout=GUARD_S).settings.items()}


def test_tritons_trace_settings_say_what_is_sent(served: Any, stub: Any) -> None:
    """While the server runs, for a model; the handler is told, too."""

    def sampled(count: int, *metadata: tuple[str, str]) -> list[bool]:
        answers = [
            stub.ModelInfer(text_request("probe", b"a"), metadata=metadata, timeout=GUARD_S) for _ in range(count)
        ]
        return [bool(int(text_of(answer)[-2:], 16) & 1) for answer in answers]

    assert set_trace(stub)["trace_level"] == ["TIMESTAMPS"]
    try:
        assert set_trace(stub, "probe", trace_rate=["2"], trace_count=["2"])["trace_rate"] == ["2"]
        assert sampled(8) == [False, True, False, True, False, False, False, False]
        assert set_trace(stub, "probe")["trace_count"] == ["0"]
        off, on = "1" * 32, "2" * 32
        set_trace(stub, "probe", trace_level=["OFF"])
        assert sampled(2, *parent_of(off)) == [False, False]
        assert ask_http(f"{served.http}/predictions/probe")[1].endswith("-00")
        set_trace(stub, "probe", trace_level=["TIMESTAMPS"], trace_count=["-1"], trace_rate=["1000"])
        assert sampled(1, *parent_of(on)) == [True], "a client's trace goes on, whatever the rate"
        served.collector.wait_for(lambda one: one.trace_id.hex() == on and one.kind == Span.SPAN_KIND_SERVER)
        assert not served.collector.of(off)
    finally:
        set_trace(stub, "probe", trace_level=[], trace_rate=[], trace_count=[])
    assert sampled(2) == [True, True]


def test_failures_are_marked(served: Any, stub: Any) -> None:
    trace_id = "c" * 32
    with pytest.raises(grpc.RpcError):
        stub.ModelInfer(text_request("probe", b"fail"), metadata=parent_of(trace_id), timeout=GUARD_S)
    span = served.collector.wait_for(lambda one: one.trace_id.hex() == trace_id and one.kind == Span.SPAN_KIND_SERVER)
    assert attributes(span)["error.type"] == attributes(span)["rpc.response.status_code"] == "INTERNAL"
    assert span.status.code == span.status.STATUS_CODE_ERROR
    inference = children(served.collector, span)["inference"]
    assert inference.status.code == inference.status.STATUS_CODE_ERROR
    missing = "d" * 32
    with pytest.raises(grpc.RpcError):
        stub.ModelInfer(pb.ModelInferRequest(model_name="no"), metadata=parent_of(missing), timeout=GUARD_S)
    span = served.collector.wait_for(lambda one: one.trace_id.hex() == missing)
    assert attributes(span)["rpc.response.status_code"] == "NOT_FOUND"
    assert span.status.code == span.status.STATUS_CODE_UNSET, "the client's mistake is no fault of the server"


def test_each_request_of_a_stream_has_its_own_children(served: Any, stub: Any) -> None:
    trace_id = "e" * 32
    asked = iter([text_request("probe", b"a")] * 3)
    metadata = (*parent_of(trace_id), ("oip-stream-dialect", "triton"))
    assert len(list(stub.ModelStreamInfer(asked, metadata=metadata, timeout=GUARD_S))) == 3
    span = served.collector.wait_for(lambda one: one.trace_id.hex() == trace_id and one.kind == Span.SPAN_KIND_SERVER)
    assert span.name == "inference.GRPCInferenceService/ModelStreamInfer"
    served.collector.wait_for(lambda one: len(served.collector.of(trace_id)) >= 7)
    assert sorted(one.name for one in served.collector.of(trace_id)) == [*["inference"] * 3, span.name, *["queue"] * 3]


def test_http_requests(served: Any) -> None:
    trace_id = "f" * 31 + "1"
    parent = f"00-{trace_id}-{PARENT}-01"
    headers: dict[str, Any] = {"traceparent": parent, "X-Request-Id": "mine"}
    status, told = ask_http(f"{served.http}/predictions/probe", **headers)
    span = served.collector.wait_for(lambda one: one.trace_id.hex() == trace_id and one.kind == Span.SPAN_KIND_SERVER)
    assert (status, span.name) == (200, "POST /predictions/{model_name}")
    assert (told, span.parent_span_id.hex()) == (f"00-{trace_id}-{span.span_id.hex()}-01", PARENT)
    found = attributes(span)
    expected = {
        "http.request.method": "POST",
        "http.route": "/predictions/{model_name}",
        "url.path": "/predictions/probe",
        "url.scheme": "http",
        "http.response.status_code": 200,
        "network.protocol.version": "1.1",
        "client.address": "127.0.0.1",
        "model.name": "probe",
        "model.version": "1.0",
        "request.id": "mine",
    }
    assert {key: found.get(key) for key in expected} == expected
    assert children(served.collector, span).keys() == {"queue", "inference"}


def test_probes_leave_no_spans(served: Any, stub: Any) -> None:
    stub.ServerLive(pb.ServerLiveRequest(), metadata=parent_of("1" * 32), timeout=GUARD_S)
    stub.ModelReady(pb.ModelReadyRequest(name="probe"), metadata=parent_of("1" * 32), timeout=GUARD_S)
    for path in ("/ping", "/v2/health/live", "/v2/models/probe/ready"):
        ask_http(served.http + path, None, traceparent=f"00-{'1' * 32}-{PARENT}-01")
    stub.ServerMetadata(pb.ServerMetadataRequest(), metadata=parent_of("2" * 32), timeout=GUARD_S)
    served.collector.wait_for(lambda one: one.trace_id.hex() == "2" * 32)
    assert not served.collector.of("1" * 32)


def test_what_became_of_spans_is_counted(served: Any, stub: Any) -> None:
    stub.ServerMetadata(pb.ServerMetadataRequest(), metadata=parent_of("3" * 32), timeout=GUARD_S)
    served.collector.wait_for(lambda one: one.trace_id.hex() == "3" * 32)
    served.wait_for_log("http_metrics listens")
    url = f"http://127.0.0.1:{served.port('http_metrics')}/metrics?name[]=ts_trace_spans_total"
    while 'outcome="exported",} 0.0' in (text := ask_http(url, None)[1]):
        pass  # counted when the collector has answered, which is after it has told us
    assert 'ts_trace_spans_total{outcome="dropped",} 0.0' in text
    assert 'ts_trace_spans_total{outcome="failed",} 0.0' in text


def test_a_collector_that_is_gone_costs_spans_not_requests(
    start: Callable[..., Any], write: Callable[..., str], tmp_path: Path
) -> None:
    """The queue is full at once; processes are started while the threads of OpenTelemetry run."""
    write("probe_traced", PROBE)
    script = tmp_path / "machine.py"
    script.write_text('print("MemoryUsed.Megabytes:77.5|#Level:Host|#hostname:vm,1795217591")\n')
    env = {"OTEL_BSP_MAX_QUEUE_SIZE": "4", "OTEL_BSP_SCHEDULE_DELAY": "20", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    server = start(
        otlp_endpoint="http://127.0.0.1:9",
        metrics_mode="prometheus",
        system_metrics_cmd=script,
        env=env,
        disable_system_metrics="false",
    )
    server.register("probe_traced")
    for _ in range(20):
        assert server.predict("probe_traced", {}).startswith(b"00-")
    server.wait_for_log("Spans are dropped")
    server.wait_for_log("http_metrics listens")
    url = f"http://127.0.0.1:{server.port('http_metrics')}/metrics"
    while 'MemoryUsed{Level="Host"' not in (text := ask_http(url, None)[1]):
        pass
    assert 'ts_trace_spans_total{outcome="exported",} 0.0' in text
    assert 'outcome="dropped",} 0.0' not in text


def test_without_an_endpoint_nothing_is_made(start: Callable[..., Any], write: Callable[..., str]) -> None:
    write("plain_probe", PROBE)
    server = start(env={"OTEL_SDK_DISABLED": "true"}, otlp_endpoint="http://127.0.0.1:9")
    server.register("plain_probe")
    assert server.predict("plain_probe", {}) == b"None", "no header of ours"


def test_a_setting_that_cannot_be_kept_stops_the_start(start: Callable[..., Any]) -> None:
    server = start(otlp_endpoint="localhost:4318", wait=False)
    assert server.wait() == 1
    assert "otlp_endpoint = localhost:4318: write a URL such as http://127.0.0.1:4318" in server.log
