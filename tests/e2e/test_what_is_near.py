"""Errors about something unknown name what there is: paths, ports, models and versions, over HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from support import GUARD_S
from ts.protocol import open_inference_pb2 as tensors
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub
from ts_frontend.http.request import NOT_FOUND
from ts_frontend.protos.inference_pb2 import PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub
from ts_frontend.protos.management_pb2 import DescribeModelRequest, SetDefaultRequest
from ts_frontend.protos.management_pb2_grpc import ManagementAPIsServiceStub

MODELS = ". Models here: other, probe."
VERSIONS = ". Versions of probe: 1.0."


@pytest.fixture(scope="module")
def server(server_of: Any, probe_handler: Path) -> Iterator[Any]:
    with server_of({"probe": (probe_handler, ""), "other": (probe_handler, "")}) as one:
        yield one


def ask(server: Any, api: str, method: str, path: str, **more: Any) -> httpx.Response:
    return httpx.request(method, f"http://127.0.0.1:{server.port(api)}{path}", timeout=GUARD_S, **more)


# --- models and versions


@pytest.mark.parametrize(
    ("api", "method", "path", "sentence"),
    [
        ("http_inference", "POST", "/predictions/nope", f"Model not found: nope{MODELS}"),
        (
            *("http_inference", "POST", "/predictions/prob"),
            "Model not found: prob; did you mean probe? Models here: other, probe.",
        ),
        ("http_inference", "OPTIONS", "/predictions/nope", f"Model not found: nope{MODELS}"),
        (
            *("http_inference", "POST", "/predictions/probe/9"),
            f"Model version: 9 does not exist for model: probe{VERSIONS}",
        ),
        ("http_management", "GET", "/models/nope", f"Model not found: nope{MODELS}"),
        ("http_management", "DELETE", "/models/nope", f"Model not found: nope{MODELS}"),
        (
            *("http_management", "PUT", "/models/probe/9/set-default"),
            f"Model version 9 does not exist for model probe{VERSIONS}",
        ),
        ("http_inference", "GET", "/v2/models/nope", f"Model not found: nope{MODELS}"),
        (
            *("http_inference", "GET", "/v2/models/probe/versions/9"),
            f"Model version: 9 does not exist for model: probe{VERSIONS}",
        ),
    ],
)
def test_over_http(server: Any, api: str, method: str, path: str, sentence: str) -> None:
    answer = ask(server, api, method, path)
    assert answer.status_code == 404
    told = answer.json()
    assert told.get("message", told.get("error")) == sentence


def test_in_openais_form(server: Any) -> None:
    made = ask(server, "http_inference", "POST", "/v1/completions", json={"model": "nope", "prompt": "x"})
    shown = ask(server, "http_inference", "GET", "/v1/models/nope")
    told = {"type": "invalid_request_error", "param": "model", "code": "model_not_found"}
    assert made.json() == shown.json() == {"error": {"message": f"Model not found: nope{MODELS}", **told}}


CALLS: tuple[tuple[str, Callable[[Any], object], str], ...] = (
    ("inference", lambda c: InferenceAPIsServiceStub(c).Predictions(PredictionsRequest(model_name="nope")), MODELS),
    (
        "inference",
        lambda c: list(InferenceAPIsServiceStub(c).StreamPredictions(PredictionsRequest(model_name="nope"))),
        MODELS,
    ),
    (
        "inference",
        lambda c: InferenceAPIsServiceStub(c).Predictions(PredictionsRequest(model_name="probe", model_version="9")),
        VERSIONS,
    ),
    (
        "inference",
        lambda c: GRPCInferenceServiceStub(c).ModelMetadata(tensors.ModelMetadataRequest(name="nope")),
        MODELS,
    ),
    (
        "management",
        lambda c: ManagementAPIsServiceStub(c).DescribeModel(DescribeModelRequest(model_name="nope")),
        MODELS,
    ),
    (
        "management",
        lambda c: ManagementAPIsServiceStub(c).SetDefault(SetDefaultRequest(model_name="probe", model_version="9")),
        VERSIONS,
    ),
)


@pytest.mark.parametrize(("api", "call", "end"), CALLS)
def test_over_grpc(server: Any, api: str, call: Callable[[Any], object], end: str) -> None:
    with grpc.insecure_channel(getattr(server, api)) as channel, pytest.raises(grpc.RpcError) as failed:
        call(channel)
    assert failed.value.code() is grpc.StatusCode.NOT_FOUND
    assert failed.value.details().startswith("Model ") and failed.value.details().endswith(end)


def test_in_a_stream_the_failed_request_names_them(server: Any) -> None:
    request = tensors.ModelInferRequest(model_name="nope", id="1")
    with grpc.insecure_channel(server.inference) as channel:
        (answer,) = GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([request]), timeout=GUARD_S)
    assert answer.error_message == f"Model not found: nope{MODELS}"


@pytest.mark.parametrize("name", ["a" * 3000, "\0", "😀", "\r\nX: y"])
def test_whatever_the_client_sends_as_a_name(server: Any, name: str) -> None:
    with grpc.insecure_channel(server.inference) as channel, pytest.raises(grpc.RpcError) as failed:
        InferenceAPIsServiceStub(channel).Predictions(PredictionsRequest(model_name=name), timeout=GUARD_S)
    assert failed.value.details() == f"Model not found: {name}{MODELS}"


# --- paths


@pytest.mark.parametrize(
    ("api", "path", "told"),
    [
        ("http_inference", "/prediction/probe", " Did you mean /predictions/{{model_name}}?"),
        ("http_management", "/model/probe", " Did you mean /models/{{model_name}}?"),
        ("http_inference", "/models/probe", " The management API serves this path: port {http_management}."),
        ("http_management", "/predictions/probe", " The inference API serves this path: port {http_inference}."),
        ("http_metrics", "/metric", " Did you mean /metrics?"),
        ("http_inference", "/nosuch", ""),
    ],
)
def test_an_unknown_path_is_told_with_what_is_near(server: Any, api: str, path: str, told: str) -> None:
    ports = {one: server.port(one) for one in ("http_inference", "http_management")}
    answer = ask(server, api, "GET", path)
    message = f"{NOT_FOUND}{told.format(**ports)}"
    assert (answer.status_code, answer.json()) == (
        404,
        {"code": 404, "type": "ResourceNotFoundException", "message": message},
    )


def test_an_unknown_path_of_the_open_inference_protocol(server: Any) -> None:
    answer = ask(server, "http_inference", "POST", "/v2/model/probe/infer", json={})
    told = "Not Found: nothing answers POST /v2/model/probe/infer. Did you mean /v2/models/{model_name}/infer?"
    assert (answer.status_code, answer.json()) == (404, {"error": told})


def test_a_listener_at_a_unix_socket(server_of: Any, tmp_path: Path) -> None:
    with server_of({}, inference_address=f"unix:{tmp_path / 'inference.sock'}") as one:
        told = ask(one, "http_management", "GET", "/predictions/x").json()["message"]
    assert told == f"{NOT_FOUND} The inference API serves this path: its Unix socket."
