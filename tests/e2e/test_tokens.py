"""Token authorization on a whole server: TorchServe's recorded exchanges, and every way to come without a good key."""

from __future__ import annotations

import http.client
import json
import re
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import empty_pb2

from e2e.servers import probe_store
from support import GUARD_S, until
from ts.protocol import open_inference_pb2 as open_inference
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub
from ts_frontend.protos.grpc_health_v1_health_pb2 import HealthCheckRequest
from ts_frontend.protos.grpc_health_v1_health_pb2_grpc import HealthStub
from ts_frontend.protos.grpc_reflection_v1_reflection_pb2 import ServerReflectionRequest
from ts_frontend.protos.grpc_reflection_v1_reflection_pb2_grpc import ServerReflectionStub
from ts_frontend.protos.inference_pb2 import PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub
from ts_frontend.protos.management_pb2 import (
    DescribeModelRequest,
    ListModelsRequest,
    RegisterModelRequest,
    UnregisterModelRequest,
)
from ts_frontend.protos.management_pb2_grpc import ManagementAPIsServiceStub

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
REFUSED = "Token Authorization failed. Token either incorrect, expired, or not provided correctly"
REQUEST = PredictionsRequest(model_name="probe", input={"data": b'{"op": "echo", "value": "hello"}'})
#: Recorded keys, and whose they were.
RECORDED = {"bblNMZ8X": "inference", "Cb6gER3m": "management", "aShZObwf": "API"}


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


def ask(
    server: Any,
    method: str,
    target: str,
    *authorization: str,
    api: str = "http_management",
    body: bytes | None = None,
    **headers: str,
) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", server.port(api), timeout=GUARD_S)
    connection.putrequest(method, target)
    for value in authorization:
        connection.putheader("Authorization", value.encode("latin-1"))
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    if body is not None:
        connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body)
    response = connection.getresponse()
    answer = Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    connection.close()
    return answer


def keys_of(server: Any) -> dict[str, str]:
    content = json.loads((server.directory / "key_file.json").read_text())
    return {kind: entry["key"] for kind, entry in content.items()}


def key(server: Any, kind: str) -> str:
    return f"Bearer {keys_of(server)[kind]}"


def metadata(server: Any, kind: str) -> list[tuple[str, str]]:
    return [("authorization", key(server, kind))]


def refused(call: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert str(caught.value.details()).startswith(f"{REFUSED} (")


@pytest.fixture(scope="module")
def server(serving: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Asks for keys, and can't register. The model `probe` is there from the start."""
    directory = tmp_path_factory.mktemp("tokens")
    settings = {
        "disable_token_authorization": "false",
        "enable_model_api": "false",
        "metrics_mode": "prometheus",
        "default_workers_per_model": 1,
        "max_request_size": 20_000_000,
    }
    one = serving(directory, probe_store(directory), settings, ["--ncs", "--models", "probe"])
    try:
        one.wait_started()
        until(lambda: ask(one, "GET", "/v2/models/probe/ready", api="http_inference").status == 200)
        yield one
    finally:
        status = one.terminate()
    assert status == 0
    assert not (directory / "key_file.json").exists()


@pytest.fixture
def inference(server: Any) -> Iterator[Any]:
    with grpc.insecure_channel(server.inference) as channel:
        yield InferenceAPIsServiceStub(channel)


@pytest.fixture
def management(server: Any) -> Iterator[Any]:
    with grpc.insecure_channel(server.management) as channel:
        yield ManagementAPIsServiceStub(channel)


# --- as recorded


def test_the_start_says_what_is_on_and_why(server: Any) -> None:
    assert "Token authorization is on: disable_token_authorization=false (" in server.log
    assert f"Keys are in {server.directory / 'key_file.json'}" in server.log
    assert "while the server runs is off (--enable-model-api turns it on): enable_model_api=false (" in server.log
    for secret in keys_of(server).values():
        assert secret not in server.log


def test_the_key_file_is_that_of_torchserve(server: Any) -> None:
    """150"""
    path = server.directory / "key_file.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    recorded = (GOLDEN / "150_key_file_json.txt").read_text().partition("\n")[2].strip()
    pattern = re.escape(recorded)
    for text in re.findall(r'"key": "(.*?)"', recorded):
        pattern = pattern.replace(text, "[A-Za-z0-9_-]{8}")
    times = set(re.findall(r"\d{4}-\d\d-\d\dT[0-9:.]+Z", recorded))
    for text in times:
        pattern = pattern.replace(re.escape(text), r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z")
    assert len(times) == 2
    assert re.fullmatch(pattern, path.read_text())


@pytest.mark.parametrize("name", ["151", "152", "153", "154", "155", "156", "157", "158", "160"])
def test_the_answer_is_that_of_torchserve(server: Any, name: str) -> None:
    raw = next(GOLDEN.glob(f"{name}_*.txt")).read_bytes().decode()
    call, _, answer = raw.partition("\n")
    match = re.fullmatch(
        r"# curl -i -X (\w+) 'http://localhost:(\d+)([^']*)'(?: -H 'Authorization: Bearer (\S+)')?", call
    )
    assert match is not None
    method, port, target, secret = match.groups()
    api = {"8080": "http_inference", "8081": "http_management"}[port]
    made = ask(server, method, target, *([key(server, RECORDED[secret])] if secret else []), api=api)
    head, _, body = answer.strip().replace("\r", "").partition("\n\n")
    status, fields = int(head.split()[1]), dict(line.split(": ", 1) for line in head.splitlines()[1:])
    if name == "151":  # health needs no key, on purpose
        status, fields, body = 200, {**fields, "connection": "keep-alive"}, '{"status": "Healthy"}'
    assert made.status == status
    assert made.headers["content-type"] == fields["content-type"]
    assert fields["connection"] == "close" or made.headers.get("connection") != "close"
    found, expected = json.loads(made.body), json.loads(body)
    if name == "155":
        assert [model.pop("modelName") for model in found["models"]] == ["probe"]  # there was none in the recording
        found["models"] = []
    told = found.get("message", "")
    reason = r"(?:it sent|its)[^)]*\)\. Send Authorization: Bearer KEY, with the \w+ key that is in .*|type is [^)]*\)"
    more = re.search(rf" \((?:{reason})", told)
    if more is not None:  # the reason, and the header to send
        found["message"] = told[: more.start()]
    assert found == expected
    if name not in ("151", "155"):
        assert made.body.decode().strip().replace(more[0] if more else "\0", "") == body.strip()


def test_a_new_key_is_made_by_the_token_api(server: Any) -> None:
    """159: 200, JSON, a newline."""
    for kind, target in (("inference", "/predictions/probe"), ("management", "/models")):
        api = f"http_{kind}"
        old = keys_of(server)
        made = ask(server, "GET", f"/token?type={kind}", key(server, "API"))
        assert (made.status, made.headers["content-type"], made.body) == (200, "application/json", b"\n")
        new = keys_of(server)
        assert {name for name in new if new[name] != old[name]} == {kind}
        assert ask(server, "GET", target, f"Bearer {old[kind]}", api=api).status == 400
        assert ask(server, "GET", target, f"Bearer {new[kind]}", api=api).status == 200
    assert ask(server, "POST", "/token?type=inference", key(server, "API")).status == 200


@pytest.mark.parametrize("target", ["/token", "/token?type=", "/token?type=API", "/token?type=INFERENCE", "/token?x=1"])
def test_the_token_api_wants_one_of_two_types(server: Any, target: str) -> None:
    before = keys_of(server)
    made = ask(server, "GET", target, key(server, "API"))
    assert made.status == 400
    told = json.loads(made.body)["message"]
    assert told.startswith("Token Authentication failed. ") and "not inference or management)" in told
    assert keys_of(server) == before


def test_the_token_api_is_on_the_management_listener_only(server: Any) -> None:
    assert ask(server, "GET", "/token?type=inference", key(server, "API"), api="http_inference").status == 400
    assert ask(server, "GET", "/token?type=inference", key(server, "inference"), api="http_inference").status == 404


def test_grpc_as_recorded(server: Any, inference: Any, management: Any) -> None:
    """350 (but Ping is health and needs no key) and 352."""
    for name in ("350_grpc_token_missing", "352_grpc_token_mgmt_wrong"):
        recorded = (GOLDEN / f"{name}.txt").read_text()
        assert "PERMISSION_DENIED (7)" in recorded and f"details: '{REFUSED}'" in recorded
    refused(lambda: inference.Predictions(REQUEST, timeout=GUARD_S))
    refused(lambda: management.ListModels(ListModelsRequest(), metadata=metadata(server, "inference"), timeout=GUARD_S))


# --- good keys


def test_a_good_key_opens_its_api(server: Any, inference: Any, management: Any) -> None:
    answer = ask(server, "POST", "/predictions/probe", key(server, "inference"), api="http_inference", body=b"{}")
    assert (answer.status, answer.body) == (200, b"ok")
    with_key = {"metadata": metadata(server, "inference"), "timeout": GUARD_S}
    assert inference.Predictions(REQUEST, **with_key).prediction == b"hello"
    assert [one.prediction for one in inference.StreamPredictions(REQUEST, **with_key)] == [b"hello"]
    answers = inference.StreamPredictions2(iter([REQUEST, REQUEST]), **with_key)
    assert [one.prediction for one in answers if one.prediction] == [b"hello", b"hello"]
    with_key["metadata"] = metadata(server, "management")
    assert "probe" in management.ListModels(ListModelsRequest(), **with_key).msg


def test_the_model_api_is_off_over_grpc_too(server: Any, management: Any) -> None:
    with_key = {"metadata": metadata(server, "management"), "timeout": GUARD_S}
    for call in (
        lambda: management.RegisterModel(RegisterModelRequest(url="probe"), **with_key),
        lambda: management.UnregisterModel(UnregisterModelRequest(model_name="probe"), **with_key),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert caught.value.details().startswith("Model API disabled")
    assert "probe" in management.DescribeModel(DescribeModelRequest(model_name="probe"), **with_key).msg


@pytest.mark.parametrize(
    "method_and_target", ["POST /models", "POST /models?url=", "DELETE /models/none", "DELETE /models/probe/9"]
)
def test_the_model_api_is_off_whatever_is_asked(server: Any, method_and_target: str) -> None:
    method, target = method_and_target.split()
    answer = ask(server, method, target, key(server, "management"))
    assert (answer.status, json.loads(answer.body)["type"]) == (405, "MethodNotAllowedException")
    assert ask(server, method, target).status == 400


def test_a_handler_does_not_see_the_key(server: Any, inference: Any) -> None:
    with_more = [*metadata(server, "inference"), ("x-more", "seen")]
    asked = PredictionsRequest(model_name="probe", input={"data": b'{"op": "headers"}'})
    answers = [inference.Predictions(asked, metadata=with_more, timeout=GUARD_S).prediction.decode()]
    target = "/models/probe/invoke?data=%7B%22op%22%3A%22headers%22%7D"
    answers.append(
        ask(server, "GET", target, key(server, "inference"), api="http_inference", x_more="seen").body.decode()
    )
    for answer in answers:
        assert "seen" in answer
        assert "uthorization" not in answer and keys_of(server)["inference"] not in answer


def test_refused_calls_are_in_the_access_log(server: Any, inference: Any) -> None:
    """Unary and streams, gRPC's code 7; status 400 over HTTP."""
    refused(lambda: inference.Predictions(REQUEST, timeout=GUARD_S))
    refused(lambda: list(inference.StreamPredictions(REQUEST, timeout=GUARD_S)))
    ask(server, "GET", "/predictions/logged", api="http_inference")
    for method in ("Predictions", "StreamPredictions"):
        server.wait_for_log(f'InferenceAPIsService/{method} HTTP/2.0" 7 ')
    server.wait_for_log('"GET /predictions/logged HTTP/1.1" 400 ')


# --- no good key


WRONG = [
    (),
    ("Bearer wrong-key",),
    ("{key}",),
    ("Bearer \xe9{key}",),
    ("Bearer wrong-key", "Bearer {key}"),
    ("Bearer {key}", "Basic eDp5"),
]


@pytest.mark.parametrize("values", WRONG)
@pytest.mark.parametrize(
    ("api", "target"),
    [
        ("http_inference", "/predictions/probe"),
        ("http_management", "/models"),
    ],
)
def test_a_header_that_is_not_right(server: Any, api: str, target: str, values: tuple[str, ...]) -> None:
    secret = keys_of(server)[api.removeprefix("http_")]
    answer = ask(server, "GET", target, *(value.replace("{key}", secret) for value in values), api=api)
    assert answer.status == 400
    told = json.loads(answer.body)
    assert (told["code"], told["type"]) == (400, "InvalidKeyException")
    why = ["it sent no key", "its Authorization isn't `Bearer KEY`", "it sent more than one Authorization"]
    why += ["its key is unknown", "its key is the one of kind"]
    assert any(told["message"].startswith(f"{REFUSED} ({one}") for one in why), told
    assert (f"{REFUSED} ({why[0]}" in told["message"]) is not bool(values)
    assert told["message"].endswith(f"with the {api.removeprefix('http_')} key that is in key_file.json")
    assert secret.encode() not in answer.body


OTHERS = """
/ /models /models/probe /models/probe/1.0 /nowhere /predictions/probe //ping /ping/x /explanations/probe /invocations
/v1/models /v1/models/probe:predict /v1/completions /v1/chat/completions /v2 /v2/models/probe /v2/models/probe/infer
/v2/models/probe/generate /v2/repository/index /wfpredict/any /workflows /workflows/any /metrics /token /Ping /ping%2Fx
"""


@pytest.mark.parametrize("method", ["GET", "POST", "PATCH", "PUT", "DELETE"])
@pytest.mark.parametrize("api", ["http_inference", "http_management"])
def test_nothing_else_is_answered_without_a_key(server: Any, api: str, method: str) -> None:
    found = {target: ask(server, method, target, api=api).status for target in OTHERS.split()}
    unauthorized = ("/v2", "/v1/completions", "/v1/chat")
    refused = {one: 401 if one.startswith(unauthorized) or one == "/v1/models" else 400 for one in OTHERS.split()}
    # What a person gets at the root, where the console asks for the key.
    assert found == refused | ({"/": 200} if method == "GET" else {})


def test_refusals_have_the_form_of_their_protocol(server: Any) -> None:
    key_of = "Send Authorization: Bearer KEY, with the inference key that is in key_file.json"
    told = f"{REFUSED} (it sent no key). {key_of}"
    for method, target, error in (
        ("POST", "/v2/models/probe/infer", told),
        ("GET", "/v2/nothing", told),
        (
            "POST",
            "/v1/chat/completions",
            {"message": told, "type": "authentication_error", "param": None, "code": "invalid_api_key"},
        ),
    ):
        answer = ask(server, method, target, api="http_inference")
        assert (answer.status, json.loads(answer.body)) == (401, {"error": error})


def test_a_body_is_refused_before_it_is_sent(server: Any) -> None:
    """The answer is there while the body has only been announced."""
    with socket.create_connection(("127.0.0.1", server.port("http_inference")), timeout=GUARD_S) as connection:
        connection.sendall(
            b"POST /predictions/probe HTTP/1.1\r\nHost: localhost\r\nContent-Length: 19000000\r\n\r\nbegin"
        )
        assert connection.recv(12) == b"HTTP/1.1 400"


# --- for everyone


def test_health_and_descriptions_need_no_key(server: Any, inference: Any) -> None:
    assert ask(server, "GET", "/ping", api="http_inference").status == 200
    assert ask(server, "GET", "/ping/", "Bearer wrong", api="http_inference").status == 200
    for api in ("http_inference", "http_management", "http_metrics"):
        assert ask(server, "OPTIONS", "/", api=api).status == 200
        assert ask(server, "GET", "/api-description", api=api).status == 200
    assert json.loads(ask(server, "GET", "/v1/models/probe").body) == {"name": "probe", "ready": True}
    assert json.loads(inference.Ping(empty_pb2.Empty(), timeout=GUARD_S).health) == {"status": "Healthy"}
    for address in (server.inference, server.management):
        with grpc.insecure_channel(address) as channel:
            assert HealthStub(channel).Check(HealthCheckRequest(), timeout=GUARD_S).status == 1
            asked = iter([ServerReflectionRequest(list_services="")])
            names = next(ServerReflectionStub(channel).ServerReflectionInfo(asked, timeout=GUARD_S))
            assert len(names.list_services_response.service) > 2


def test_open_inference(server: Any) -> None:
    """Readiness without a key, everything else with one, over both."""
    model = "/v2/models/probe"
    for target in ("/v2/health/live", "/v2/health/ready", f"{model}/ready", f"{model}/versions/1.0/ready"):
        assert ask(server, "GET", target, api="http_inference").status == 200
    for target in ("/v2", "/v2/models", model, f"{model}/infer", "/v2/repository/index"):
        assert ask(server, "POST", target, api="http_inference").status == 401
        assert ask(server, "GET", target, key(server, "management"), api="http_inference").status == 401
    with grpc.insecure_channel(server.inference) as channel:
        stub = GRPCInferenceServiceStub(channel)
        assert stub.ServerLive(open_inference.ServerLiveRequest(), timeout=GUARD_S).live
        assert stub.ServerReady(open_inference.ServerReadyRequest(), timeout=GUARD_S).ready
        assert stub.ModelReady(open_inference.ModelReadyRequest(name="probe"), timeout=GUARD_S).ready
        refused(lambda: stub.ModelMetadata(open_inference.ModelMetadataRequest(name="probe"), timeout=GUARD_S))
        refused(lambda: stub.ModelInfer(open_inference.ModelInferRequest(model_name="probe"), timeout=GUARD_S))
        refused(lambda: list(stub.ModelStreamInfer(iter([open_inference.ModelInferRequest()]), timeout=GUARD_S)))


def test_only_a_key_opens_the_names_of_models(server: Any) -> None:
    """Without one, an unknown model's answer has TorchServe's sentence, or only the refusal."""
    assert json.loads(ask(server, "GET", "/v1/models/nope").body)["message"] == "Model not found: nope"
    assert b'"Model not found: nope"' in ask(server, "GET", "/v1/models/nope", api="http_inference").body
    with_key = key(server, "inference")
    for method, target in (("POST", "/predictions/nope"), ("GET", "/v2/models/nope")):
        assert b"probe" not in ask(server, method, target, api="http_inference").body
        assert b"Models here: probe." in ask(server, method, target, with_key, api="http_inference").body
    assert b"probe" not in ask(server, "GET", "/v2/models/nope/ready", api="http_inference").body
    call = PredictionsRequest(model_name="nope")
    with grpc.insecure_channel(server.inference) as channel:
        stub = InferenceAPIsServiceStub(channel)
        refused(lambda: stub.Predictions(call, timeout=GUARD_S))
        with pytest.raises(grpc.RpcError) as failed:
            stub.Predictions(call, metadata=metadata(server, "inference"), timeout=GUARD_S)
        assert failed.value.details() == "Model not found: nope. Models here: probe."
        ready = GRPCInferenceServiceStub(channel).ModelReady(open_inference.ModelReadyRequest(name="nope"))
        assert not ready.ready
        with pytest.raises(grpc.RpcError) as unknown:
            HealthStub(channel).Check(HealthCheckRequest(service="nope"), timeout=GUARD_S)
        assert "probe" not in unknown.value.details()


def test_only_a_key_opens_what_is_near_a_path(server: Any) -> None:
    near = b"Did you mean /predictions/{model_name}?"
    assert near not in ask(server, "GET", "/prediction/x", api="http_inference").body
    assert near not in ask(server, "GET", "/prediction/x", key(server, "management"), api="http_inference").body
    assert near in ask(server, "GET", "/prediction/x", key(server, "inference"), api="http_inference").body
    without = json.loads(ask(server, "GET", "/models", api="http_metrics").body)
    assert without["message"] == "Requested resource is not found, please refer to API document."


def test_metrics_need_no_key_and_count_refusals(server: Any) -> None:
    ask(server, "GET", "/models")
    text = ask(server, "GET", "/metrics", api="http_metrics").body.decode()
    found = re.search(r'^ts_refused_calls_total\{api="management",.*\} (\S+)$', text, re.MULTILINE)
    assert found is not None
    assert float(found[1]) >= 1


def test_the_log_says_who_was_refused(server: Any) -> None:
    server.wait_for_log("Refused a call to the ")
    assert re.search(r"Refused a call to the \w+ API from 127\.0\.0\.1:\d+: it sent no key", server.log)
    for secret in keys_of(server).values():
        assert secret not in server.log
