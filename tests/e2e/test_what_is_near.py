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
from ts_frontend.protos.inference_pb2 import PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub
from ts_frontend.protos.management_pb2 import DescribeModelRequest, SetDefaultRequest
from ts_frontend.protos.management_pb2_grpc import ManagementAPIsServiceStub

MODELS = ". Models here: other, probe."
VERSIONS = ". Versions of probe: 1.0."


@pytest.fixture(scope="module", params=["h2corn", "grpcio"])
def server(request: pytest.FixtureRequest, server_of: Any, probe_handler: Path) -> Iterator[Any]:
    with server_of({"probe": (probe_handler, ""), "other": (probe_handler, "")}, grpc_engine=request.param) as one:
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
