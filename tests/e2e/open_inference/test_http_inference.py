"""/v2 over HTTP with TorchServe handlers behind it: health, metadata, JSON and binary tensors, events, bad tensors."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from support import GUARD_S, TIMEOUTS_US


@pytest.fixture
def http(served: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.http, timeout=GUARD_S) as client:
        yield client


def tensor(datatype: str, shape: list[int], data: Any = None, name: str = "x", **parameters: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "datatype": datatype, "shape": shape}
    if data is not None:
        found["data"] = data
    if parameters:
        found["parameters"] = parameters
    return found


def infer(
    http: httpx.Client, model: str, *inputs: dict[str, Any], path: str = "versions/1.0/", **more: Any
) -> httpx.Response:
    return http.post(f"/v2/models/{model}/{path}infer", json={"inputs": inputs, **more})


# --- health and metadata


def test_metadata(http: httpx.Client) -> None:
    assert http.get("/v2").json()["name"] == "torchrelay" == http.get("/v2/").json()["name"]
    assert set(http.get("/v2/models").json()["models"]) >= {"sum", "same"}
    assert http.get("/v2/models/sum").json() == {
        "name": "sum",
        "versions": ["1.0"],
        "platform": "python",
        "inputs": [
            {"name": "a", "datatype": "FP32", "shape": [-1]},
            {"name": "b", "datatype": "FP32", "shape": [-1], "parameters": {"content_type": "np"}},
        ],
        "outputs": [{"name": "sum", "datatype": "FP32", "shape": [-1]}],
    }
    assert {"name": "sum", "version": "1.0", "state": "READY", "reason": ""} in http.post("/v2/repository/index").json()


# --- tensors


def test_binary_tensors_both_ways(http: httpx.Client) -> None:
    data = np.array([1, 2, 3], "<f4").tobytes()
    text = struct.pack("<I", 2) + b"ab"
    head = json.dumps(
        {
            "inputs": [
                tensor("FP32", [3], None, "x", binary_data_size=len(data)),
                tensor("BYTES", [1], None, "y", binary_data_size=len(text)),
            ],
            "outputs": [{"name": "y"}, {"name": "x", "parameters": {"binary_data": False}}],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    answer = http.post("/v2/models/same/versions/1.0/infer", content=head + data + text, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/octet-stream"
    size = int(answer.headers["inference-header-content-length"])
    y, x = json.loads(answer.content[:size])["outputs"]
    assert y["parameters"]["binary_data_size"] == len(text) and answer.content[size:] == text
    assert x["data"] == [1.0, 2.0, 3.0]


def test_torchserves_way_without_a_declaration(http: httpx.Client) -> None:
    """As TorchServe does, a model that declares nothing gets the body of /v2/models/M/infer as it is."""
    answer = http.post("/v2/models/upper/infer", content=b"abc")
    assert (answer.status_code, answer.text) == (200, "ABC")


def test_binary_tensors_without_a_declaration(http: httpx.Client) -> None:
    """No handler of TorchServe's could read them: they are tensors in any case."""
    head = json.dumps({"inputs": [tensor("BYTES", [1], None, binary_data_size=7)]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    answer = http.post("/v2/models/upper/infer", content=head + b"\3\0\0\0abc", headers=headers)
    assert answer.json()["outputs"][0]["data"] == ["ABC"]


# --- events


def test_events_of_a_stream(http: httpx.Client) -> None:
    body = {"inputs": [tensor("BYTES", [1], ["a b"])]}
    with http.stream("POST", "/v2/models/words/versions/1.0/infer_stream", json=body) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = answer.read().decode().split("\n\n")
    assert events.pop() == ""
    found = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [one["outputs"][0]["data"] for one in found] == [["a "], ["b "]]


def test_generate_takes_v2_requests_too(http: httpx.Client) -> None:
    """As MLServer's does: an answer in the same form, the texts of a stream joined."""
    answer = http.post("/v2/models/words/generate", json={"inputs": [tensor("BYTES", [1], ["a b"])]})
    assert answer.json()["outputs"][0]["data"] == ["a b "]


# --- what can't be


BAD = {
    "not JSON": (b"{", ["not valid JSON"]),
    "too few elements": (tensor("FP32", [2], [1]), ["'x'", "1 elements"]),
    "number too large": (tensor("INT8", [1], [300]), ["'x'", "INT8"]),
    "deep nesting": (
        b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": ' + b"[" * 100_000,
        ["JSON"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_tensors_name_tensor_and_reason(http: httpx.Client, case: str) -> None:
    body, words = BAD[case]
    content = body if isinstance(body, bytes) else json.dumps({"inputs": [body]}).encode()
    answer = http.post("/v2/models/same/versions/1.0/infer", content=content)
    assert answer.status_code == 400, answer.text
    assert all(word in answer.json()["error"] for word in words), answer.text


@pytest.mark.parametrize(
    "body",
    [
        b'{"inputs": [{"name": "x", "datatype": "INT32", "shape": [1], "data": [1]}],'
        b' "inputs": [{"name": "x", "datatype": "INT32", "shape": [1], "data": [2]}]}',
        b'{"inputs": [{"name": "x", "datatype": "INT32", "shape": [1], "data": [1], "data": [2]}]}',
        b'{"inputs": 7, "inputs": [{"name": "w", "name": "x", "datatype": "FP32", "datatype": "INT32",'
        b' "shape": [5], "shape": [1], "data": [2]}]}',
    ],
)
def test_of_equal_keys_the_last_counts(http: httpx.Client, body: bytes) -> None:
    """As Python's JSON has it, in all places that read a body: no two of them may read different things."""
    answer = http.post("/v2/models/same/versions/1.0/infer", content=body)
    assert answer.status_code == 200, answer.text
    (output,) = answer.json()["outputs"]
    assert (output["name"], output["datatype"], output["data"]) == ("x", "INT32", [2])


@pytest.mark.parametrize("path", ["infer", "generate_stream"])
def test_the_parameter_timeout_ends_what_runs(http: httpx.Client, path: str) -> None:
    body: dict[str, Any] = {"inputs": [tensor("BYTES", [1], ["x"])]}

    def runs(timeout_us: int) -> bool:
        answer = http.post(
            f"/v2/models/waits/versions/1.0/{path}", json={**body, "parameters": {"timeout": timeout_us}}
        )
        assert answer.status_code == 504
        return "given to a worker" in answer.json()["error"]

    for _ in range(2):  # the second one needs the worker that the first one had
        assert any(map(runs, TIMEOUTS_US))


@pytest.mark.parametrize("path", ["infer", "explain"])
@pytest.mark.parametrize("size", [1, 20_000])
def test_the_parameter_timeout_ends_what_a_handler_of_torchserve_runs(http: httpx.Client, path: str, size: int) -> None:
    """Without a version, a handler that declares no tensors gets the body unchanged, and its timeout counts."""
    body: dict[str, Any] = {"inputs": [tensor("BYTES", [1], ["x" * size])]}

    def runs(timeout_us: int) -> bool:
        answer = http.post(f"/v2/models/waits/{path}", json={**body, "parameters": {"timeout": timeout_us}})
        assert answer.status_code == 504 and answer.json()["type"] == "RequestTimeoutException"
        return "given to a worker" in answer.json()["message"]

    assert any(map(runs, TIMEOUTS_US))


def test_a_timeout_that_is_no_number_is_named(http: httpx.Client) -> None:
    for parameters in ({"timeout": "soon"}, {"timeout": -1}, {"timeout": 0.5}):
        answer = http.post("/v2/models/upper/infer", json={"parameters": parameters})
        assert answer.status_code == 400 and "parameter timeout is a number of microseconds" in answer.json()["message"]
    answer = http.post("/v2/models/raises/infer", json={"parameters": {"other": "soon"}})
    assert "ValueError: no" in answer.text, "a parameter of another name is the handler's"
