"""No request of one API can harm others, its worker or the server.

Promises 001-21, 001-22; every accepted request has exactly one final status, in every dialect.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import pytest

from e2e.servers import text_request
from support import GUARD_S, until
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub as Stub

RESPONSE_BYTES_MAX = 100_000
#: Answers with the text and the size of the batch; one row fails by itself, one has an answer that can't be sent.
BATCHED = """
from ts.tensors.types import InferenceResponse, Tensor
import numpy as np

def answer(row, count):
    text = bytes(row.get("data") or row.get("body")).decode()
    if text == "unsendable":
        return InferenceResponse([Tensor("x", "NO SUCH", np.zeros(1))])
    return f"{text} of {count}"

def handle(data, context):
    return None if data is None else [answer(row, len(data)) for row in data]
"""
BATCHED_CONFIG = "batchSize: 5\nmaxBatchDelay: 20000\nminWorkers: 1\nmaxWorkers: 1\n"
ENDLESS = """
def handle(data, context):
    while data is not None:
        yield ["x" * 1000]
"""
DIES = """
import os

def handle(data, context):
    for word in () if data is None else ("one", "two"):
        yield [word]
    if data is not None:
        os._exit(1)
"""
SPLIT = """
def handle(data, context):
    for byte in () if data is None else "é€".encode():
        yield [bytes([byte])]
"""
MODELS = {"batched": (BATCHED, BATCHED_CONFIG), "endless": (ENDLESS, ""), "dies": (DIES, ""), "split": (SPLIT, "")}


@pytest.fixture(scope="module")
def robust(server_of: Any) -> Iterator[Any]:
    settings = {"max_response_size": RESPONSE_BYTES_MAX, "metrics_mode": "prometheus", "lone_requests_wait": "true"}
    with server_of(MODELS, **settings) as server:
        yield server


@pytest.fixture
def stub(robust: Any) -> Iterator[Stub]:
    with grpc.insecure_channel(robust.inference) as channel:
        yield Stub(channel)


@pytest.fixture
def http(robust: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=robust.http, timeout=GUARD_S) as client:
        yield client


def in_json(value: str = "hi", **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "data", "datatype": "BYTES", "shape": [1], "data": [value]} | more]}


def test_requests_of_all_apis_in_one_batch(robust: Any, stub: Stub, http: httpx.Client) -> None:
    """One can't be read, one can't be answered; the others are not harmed."""

    def infer(body: dict[str, Any]) -> httpx.Response:
        return http.post("/v2/models/batched/versions/1.0/infer", json=body)

    with ThreadPoolExecutor(5) as pool:
        by_grpc = pool.submit(stub.ModelInfer, text_request("batched", "grpc"), timeout=GUARD_S)
        by_http = pool.submit(infer, in_json("http"))
        plain = pool.submit(robust.predict, "batched", b"plain")
        unreadable = pool.submit(infer, in_json("é", parameters={"content_type": "base64"}))
        unsendable = pool.submit(stub.ModelInfer, text_request("batched", "unsendable"), timeout=GUARD_S)
    assert by_grpc.result().raw_output_contents[0][4:] == b"grpc of 4"
    assert by_http.result().json()["outputs"][0]["data"] == ["http of 4"]
    assert plain.result() == b"plain of 4"
    assert unreadable.result().status_code == 400 and "base64" in unreadable.result().json()["error"]
    error = unsendable.exception()
    assert (
        isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.INTERNAL and "NO SUCH" in error.details()
    )


UNARY: dict[str, Callable[[httpx.Client, str], httpx.Response]] = {
    "infer": lambda http, model: http.post(f"/v2/models/{model}/versions/1.0/infer", json=in_json()),
    "generate": lambda http, model: http.post(f"/v2/models/{model}/generate", json={"text_input": "a"}),
    "completions": lambda http, model: http.post("/v1/completions", json={"model": model, "prompt": "a"}),
}


@pytest.mark.parametrize("call", UNARY)
def test_an_answer_without_end_is_too_large(http: httpx.Client, call: str) -> None:
    answer = UNARY[call](http, "endless")
    assert answer.status_code >= 400 and "max_response_size" in answer.text


def test_an_answer_without_end_is_too_large_for_grpc(stub: Stub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(text_request("endless", "hi"), timeout=GUARD_S)
    assert "max_response_size" in str(caught.value)


def test_characters_that_come_in_pieces(http: httpx.Client, stub: Stub) -> None:
    (output,) = UNARY["infer"](http, "split").json()["outputs"]
    assert output["data"] == ["é€"] and "parameters" not in output
    assert stub.ModelInfer(text_request("split", "hi"), timeout=GUARD_S).raw_output_contents[0][4:].decode() == "é€"


# --- a worker that dies in the middle of its answers


def streamed(stub: Stub, requests: list[pb.ModelInferRequest], **metadata: str) -> tuple[list[Any], grpc.StatusCode]:
    return drained(stub.ModelStreamInfer(iter(requests), metadata=list(metadata.items()), timeout=GUARD_S))


def drained(call: Any) -> tuple[list[Any], grpc.StatusCode]:
    """All answers, and the status after them."""
    answers = []
    try:
        answers.extend(call)
    except grpc.RpcError:
        pass
    return answers, call.code()


def test_the_end_of_a_worker_in_tritons_dialect(stub: Stub) -> None:
    answers, code = streamed(stub, [text_request("dies", "hi", id="a")])
    assert code is grpc.StatusCode.OK
    errors = [answer.error_message for answer in answers]
    assert errors[:-1] == ["", ""] and errors[-1] and answers[-1].infer_response.id == "a"


def test_the_end_of_a_worker_in_tritons_dialect_with_statuses(stub: Stub) -> None:
    answers, code = streamed(stub, [text_request("dies", "hi", id="a")], triton_grpc_error="true")
    assert len(answers) == 2 and code not in (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN)


def test_the_end_of_a_worker_in_mlservers_dialect(robust: Any) -> None:
    with grpc.insecure_channel(robust.inference) as channel:
        stream = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            pb.ModelInferRequest.SerializeToString,
            pb.ModelInferResponse.FromString,
        )
        request = iter([text_request("dies", "hi", id="a")])
        answers, code = drained(stream(request, metadata=[("oip-stream-dialect", "mlserver")], timeout=GUARD_S))
    assert len(answers) == 2 and code not in (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/models/dies/infer_stream", in_json()),
        ("/v2/models/dies/generate_stream", {"text_input": "a"}),
        ("/v1/completions", {"model": "dies", "prompt": "a", "stream": True}),
    ],
)
def test_the_end_of_a_worker_is_the_last_event(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    answer = http.post(path, json=body)
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]
    assert answer.status_code == 200
    assert len(events) == 3 and ["error" in event for event in events] == [False, False, True]


# --- streams that end before their requests


def test_leaving_a_stream_ends_what_it_began(robust: Any, stub: Stub) -> None:
    for _ in range(10):
        call = stub.ModelStreamInfer(
            iter([text_request("endless", "hi", id=str(index)) for index in range(3)]), timeout=GUARD_S
        )
        next(call)
        call.cancel()
    wait_for_rest(robust, "endless")


def wait_for_rest(robust: Any, model: str) -> None:
    """Returns when nothing of the model is queued or running."""
    names = ("ts_queued_requests", "ts_running_requests")
    until(lambda: not any(robust.metric(name, model_name=model) for name in names), robust.scraped)
