"""Servers that were started as other servers are, and asked as their clients ask."""

from __future__ import annotations

import json
import re
import select
import socket
import urllib.request

import grpc
import h2.config
import h2.connection
import h2.events
import pytest

from support import GUARD_S
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub

#: Says the process it runs in; then counts, as many words as it is asked for.
TEXT = """
import os
from ts.tensors.types import InferenceResponse, Tensor

def handle(data, context):
    if data is None:
        return
    row = data[0]
    if bytes(*row.values()) == b"where":
        yield [InferenceResponse([Tensor.of("response", str(os.getpid()))])]
        return
    for number in range(row.request.parameters.get("max_tokens", 3)):
        yield [InferenceResponse([Tensor.of("response", f"{number} ")])]
"""
CONFIG = """
openInference:
  inputs: [{name: prompt, datatype: BYTES, shape: [-1]}]
  outputs: [{name: response, datatype: BYTES, shape: [-1]}]
  parameters: {max_tokens: INT32}
"""


def prompt(text: str, **parameters: str) -> pb.ModelInferRequest:
    """A request as MAX's sample client makes it: code points, no datatype, no shape, numbers as text."""
    request = pb.ModelInferRequest(model_name="llama31", model_version="0")
    request.inputs.add(name="prompt").contents.int_contents.extend(map(ord, text))
    for name, value in parameters.items():
        request.parameters[name].string_param = value
    return request


def text_of(response: pb.ModelInferResponse) -> str:
    return "".join(map(chr, response.outputs[0].contents.int_contents))


@pytest.fixture(scope="module", params=[False, True], ids=["workers", "bypass"])
def started(request, tmp_path_factory, serving, write_to):
    """A server as MAX's is started; with `--bypass-serve`, too."""
    directory = tmp_path_factory.mktemp("max")
    store = directory / "store"
    store.mkdir()
    write_to(store, "llama31", TEXT, config=CONFIG)
    words = ["--ncs", "--model=llama31", "--grpc-workers", "1", "--extra_grpc_port", "0:triton"]
    server = serving(
        directory, store, {"metrics_mode": "prometheus"}, [*words, *(["--bypass-serve"] if request.param else [])]
    )
    try:
        server.wait_started().wait_for_log("of llama31_1.0 is ready")
        yield server, request.param
    finally:
        assert server.terminate() == 0, server.log


@pytest.fixture
def stub(started):
    with grpc.insecure_channel(started[0].inference) as channel:
        yield GRPCInferenceServiceStub(channel)


def test_clients_of_max(stub):
    """Promises 000-03, 000-05, 000-07 to 000-12, 000-18, 000-19, 000-22."""
    assert stub.ModelReady(pb.ModelReadyRequest(name="llama31")).ready
    assert stub.ModelMetadata(pb.ModelMetadataRequest(name="llama31", version="0")).name == "llama31"
    assert stub.ServerMetadata(pb.ServerMetadataRequest()).name
    answer = stub.ModelInfer(prompt("What is life?"))
    assert (text_of(answer), answer.outputs[0].datatype) == ("0 1 2 ", "")
    pieces = [text_of(one) for one in stub.ModelInferStream(prompt("What is life?", max_tokens="2")) if one.outputs]
    assert pieces == ["0 ", "1 "]


def test_a_number_that_is_none(stub):
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(prompt("x", max_tokens="many"))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "parameter 'max_tokens' is of INT32, and 'many' isn't" in caught.value.details()


def test_where_a_handler_runs(started, stub):
    """Promise 000-22: in the server's own process, and no worker is counted; else in one of its own."""
    server, bypassed = started
    pid = int(text_of(stub.ModelInfer(prompt("where"))))
    described = server.describe("llama31")
    assert (pid == server.process.pid, len(described["workers"])) == ((True, 0) if bypassed else (False, 1))
    assert ("bypass_serve is on: handlers run INSIDE" in server.log) == bypassed
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port('http_metrics')}/metrics", timeout=GUARD_S) as answer:
        metrics = answer.read().decode()
    ready = re.search(r"ts_ready_workers\{.*llama31.*\} ([0-9])", metrics)
    assert ready is not None, metrics
    assert ready[1] == ("0" if bypassed else "1")


def test_the_openai_api_has_the_same_model(started):
    """Promises 000-20, 000-21."""
    body = json.dumps({"model": "llama31", "prompt": "x", "max_tokens": 2}).encode()
    request = urllib.request.Request(f"{started[0].http}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=GUARD_S) as answer:
        assert json.loads(answer.read())["choices"][0]["text"] == "0 1 "


def test_a_further_port_has_a_dialect_of_its_own(started):
    """Promise 000-04: typed contents would be answered in MLServer's dialect on the first port."""
    server, _ = started
    with grpc.insecure_channel(f"127.0.0.1:{server.port('grpc_inference_2')}") as channel:
        call = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )
        answers = list(call(iter([prompt("x")]), timeout=GUARD_S))
    assert "".join(text_of(one.infer_response) for one in answers if one.infer_response.outputs) == "0 1 2 "


def test_a_pool_of_ten_channels(started):
    """Promises 000-23, 001-23."""
    channels = [grpc.insecure_channel(started[0].inference) for _ in range(10)]
    try:
        stubs = [GRPCInferenceServiceStub(channel) for channel in channels]
        calls = [stubs[number % 10].ServerLive.future(pb.ServerLiveRequest()) for number in range(1000)]
        assert all(call.result(GUARD_S).live for call in calls)
        streams = [stub.ModelInferStream(prompt("x")) for stub in stubs for _ in range(2)]
        assert ["".join(text_of(one) for one in stream if one.outputs) for stream in streams] == ["0 1 2 "] * 20
    finally:
        for channel in channels:
            channel.close()


# --- TLS, sizes, keepalive: a server of each engine


def test_tls_and_sizes_by_flags(start, certificates):
    """Promises 001-11, 001-12, 001-38, 001-39."""
    files = ("--cert-file", str(certificates / "server.crt"), "--key_file", str(certificates / "server.key"))
    server = start("--use-tls", *files, "--max-message-size", "100000", wait=False)
    server.wait_for_log("http_metrics listens on https://")
    listens = re.search(r"grpc_inference listens on (\S+) \(TLS\)", server.log)
    assert listens is not None, server.log
    address = listens[1]
    assert "http_inference listens on https://" in server.log
    trusted = grpc.ssl_channel_credentials((certificates / "ca.crt").read_bytes())
    with grpc.secure_channel(address, trusted) as channel:
        stub = GRPCInferenceServiceStub(channel)
        assert stub.ServerLive(pb.ServerLiveRequest(), timeout=GUARD_S).live
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(100001)]), timeout=GUARD_S)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError):
        GRPCInferenceServiceStub(channel).ServerLive(pb.ServerLiveRequest(), timeout=5)


def test_an_idle_client_may_ping(start):
    """Promise 001-21, shortened: every ping is answered, and the connection stays. gRPC's own default closes it at the
    third."""
    server = start("--set", "grpc.http2.min_ping_interval_without_data_ms=20", wait=False)
    server.wait_for_log("grpc_inference listens on")
    host, port = server.inference.split(":")
    with socket.create_connection((host, int(port)), timeout=GUARD_S) as sock:
        client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        client.initiate_connection()
        answered = 0
        for number in range(12):
            client.ping(number.to_bytes(8, "big"))
            sock.sendall(client.data_to_send())
            while answered == number:
                data = sock.recv(65536)
                assert data, f"closed after {number} pings"
                events = client.receive_data(data)
                assert not [one for one in events if isinstance(one, h2.events.ConnectionTerminated)]
                answered += sum(isinstance(one, h2.events.PingAckReceived) for one in events)
            assert not select.select([sock], [], [], 0.05)[0], "idle, and something came"
    assert answered == 12
