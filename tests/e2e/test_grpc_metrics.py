"""The `grpc_server_…` metrics of a whole server, on both engines, and HTTP on its gRPC ports."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from e2e.servers import text_request
from support import GUARD_S, http_call
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub

WORDS = """
def handle(data, context):
    for word in () if data is None else bytes(data[0]["data"]).decode().split():
        yield [word + " "]
"""
SAMPLE = re.compile(r"grpc_server_(\w+)\{(.*),\} (\S+)")
SERVICE = "inference.GRPCInferenceService"


def get(port: int, path: str = "/metrics", method: str = "GET") -> tuple[int, str]:
    """Status and text of an HTTP/1.1 request."""
    answer = http_call(port, method, path)
    return answer.status, answer.body.decode()


def samples(text: str, method: str) -> dict[str, float]:
    """Values of one method's series by name; handled_total also by its code."""
    found = {}
    for name, labels, value in SAMPLE.findall(text):
        parts = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if parts["grpc_method"] == method and "le" not in parts:
            assert parts["grpc_service"] == SERVICE
            found[f"{name}:{parts['grpc_code']}" if "grpc_code" in parts else name] = float(value)
    return found


@pytest.fixture(scope="module")
def served(server_of: Callable[..., Any]) -> Iterator[Any]:
    with server_of({"words": (WORDS, "")}, grpc_metrics="true") as server:
        server.wait_for_log("http_metrics listens")
        yield server


@pytest.fixture
def stub(served: Any) -> Iterator[GRPCInferenceServiceStub]:
    with grpc.insecure_channel(served.inference) as channel:
        yield GRPCInferenceServiceStub(channel)


@pytest.fixture
def risen(served: Any) -> Callable[[str], dict[str, float]]:
    """By how much a method's series rose since the test began, on the metrics API."""

    def now(method: str) -> dict[str, float]:
        return samples(get(served.port("http_metrics"))[1], method)

    _, before = get(served.port("http_metrics"))

    def rise(method: str) -> dict[str, float]:
        first = samples(before, method)
        return {key: value - first.get(key, 0) for key, value in now(method).items() if value != first.get(key, 0)}

    return rise


def test_unary_calls_by_code(stub: Any, risen: Any) -> None:
    """Promises 001-30, 001-31."""
    for _ in range(3):
        stub.ModelInfer(text_request("words", "a b"), timeout=GUARD_S)
    with pytest.raises(grpc.RpcError) as refused:
        stub.ModelInfer(pb.ModelInferRequest(model_name="missing"), timeout=GUARD_S)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    found = risen("ModelInfer")
    assert found.pop("handling_seconds_sum") > 0
    assert found == {
        "started_total": 4,
        "handled_total:OK": 3,
        "handled_total:NOT_FOUND": 1,
        "handling_seconds_count": 4,
        "msg_received_total": 4,
        "msg_sent_total": 3,
    }


def test_every_message_of_streams_counts(stub: Any, risen: Any) -> None:
    """Promises 001-32, 001-33."""
    assert len(list(stub.ModelStreamInfer(iter([text_request("words", "a b")] * 10), timeout=GUARD_S))) == 20
    assert len(list(stub.ModelInferStream(text_request("words", "a b c"), timeout=GUARD_S))) == 3
    two_way, one_way = risen("ModelStreamInfer"), risen("ModelInferStream")
    assert (two_way["msg_received_total"], two_way["msg_sent_total"], two_way["handled_total:OK"]) == (10, 20, 1)
    assert (one_way["msg_received_total"], one_way["msg_sent_total"], one_way["handling_seconds_count"]) == (1, 3, 1)


def test_a_cancelled_stream_is_counted(served: Any, stub: Any, risen: Any) -> None:
    endless = iter(lambda: text_request("words", "a"), None)
    answers = stub.ModelStreamInfer(endless, timeout=GUARD_S)
    next(answers)
    answers.cancel()
    until_s = time.monotonic() + GUARD_S
    while "handled_total:CANCELLED" not in (found := risen("ModelStreamInfer")):
        assert time.monotonic() < until_s, f"{found}\n{served.log}"
    assert found["handled_total:CANCELLED"] == found["started_total"] == 1


def test_http_on_the_grpc_port_while_calls_run(served: Any, stub: Any) -> None:
    """Promise 001-29."""
    port = served.port("grpc_inference")
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(stub.ModelInfer, text_request("words", "a"), timeout=GUARD_S) for _ in range(20)]
        scrapes = [get(port) for _ in range(5)]
        assert all(call.result().outputs for call in calls)
    assert {status for status, _ in scrapes} == {200}
    assert f'grpc_server_started_total{{grpc_type="UNARY",grpc_service="{SERVICE}"' in get(port)[1]
    assert get(served.port("grpc_management"))[0] == 200
    assert get(port, "/predictions/words")[0] == get(port, "/v2")[0] == 404
    assert get(port, f"/{SERVICE}/ModelInfer", "POST")[0] == 415


def test_off_unless_asked(start: Callable[..., Any]) -> None:
    server = start()
    server.wait_for_log("http_metrics listens")
    with grpc.insecure_channel(server.inference) as channel:
        GRPCInferenceServiceStub(channel).ServerLive(pb.ServerLiveRequest(), timeout=GUARD_S)
    assert "grpc_server_" not in str(get(server.port("http_metrics"))[1])
    assert get(server.port("grpc_inference"))[0] == 404


def test_the_profile_of_dynamo_has_it(start: Callable[..., Any]) -> None:
    """Promise 001-29."""
    server = start("--profile", "dynamo")
    with grpc.insecure_channel(server.inference) as channel:
        GRPCInferenceServiceStub(channel).ServerLive(pb.ServerLiveRequest(), timeout=GUARD_S)
    status, shown = get(server.port("grpc_inference"))
    assert (status, 'grpc_method="ServerLive",grpc_code="OK",} 1.0' in shown) == (200, True)
