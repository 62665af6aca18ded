"""The calls that were recorded with MLServer 1.7.1, made again to the same models; tests/data/mlserver/README.md
describes the recording. Intended differences are in DEVIATIONS, with reasons; those of all answers in `normal`."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format

from support import GUARD_S
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.pool import POOL

DATA = Path(__file__).parents[2] / "data" / "mlserver"
_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
EXCHANGES: list[dict[str, Any]] = json.loads((DATA / "exchanges.json").read_text())

# --- on purpose: the names of exchanges, the reason, and what the answer is here

DEVIATIONS: list[tuple[str, str, dict[str, Any]]] = [
    (r"GET /v2/?", "it is this server's name and version", {"status": 200, "body": ["extensions", "name", "version"]}),
    (r"gRPC ServerMetadata", "it is this server's name and version", {"code": "OK"}),
    (r"GET /v2/health/(live|ready)", "KServe's clients read a body", {"status": 200}),
    (r"GET /v2/models/\w+(/versions/\d)?/ready", "KServe's clients read a body", {}),
    (r"(un)?load|load (again|without body|two versions)", "KServe's clients read a body", {"status": 200}),
    (r"gRPC (un)?load", "KServe's clients read a message", {"code": "OK"}),
    (r"gRPC ModelReady (nobody|echo) \d?", "what isn't there isn't ready, which is no error", {"code": "OK"}),
    (r"index without body|index bad", "a body is not needed", {"status": 200}),
    (r"same name twice|shape too large|negative shape|words for numbers", "tensors are checked", {"status": 400}),
    (r"(shape too large|words for numbers), decoded", "tensors are checked", {"status": 400}),
    (r"gRPC (shape too large|unknown datatype)", "tensors are checked", {"code": "INVALID_ARGUMENT"}),
    (r"(inputs|shape|data|name) (missing|wrong)|unknown datatype|number as id", "400, not 422", {"status": 400}),
    (r"not JSON|empty body|a list|bad body \w+", "400, not 422", {"status": 400}),
    (r"form content type", "curl's content type is no hindrance", {"status": 200}),
    (r"nested|scalar data|string data", "`data` comes flat", {"status": 200}),
    (r"failing (nothing|odd)", "an error is JSON", {"status": 500}),
    (r"unknown model \w+_stream", "an error before the first event has its status", {"status": 404}),
    (r"stream breaks at once", "an error before the first event has its status", {"status": 422}),
    (r"stream breaks", "a later error is an event", {"status": 200}),
    (r"gRPC failing 418", "what no code of gRPC means is FAILED_PRECONDITION", {"code": "FAILED_PRECONDITION"}),
    (r"gRPC failing 503", "the status has a code of gRPC", {"code": "UNAVAILABLE"}),
    (r"gRPC stream predict only", "a class without predict_stream predicts each request", {"code": "OK"}),
    (r"gRPC stream empty", "no request, no answer", {"code": "OK"}),
    (r"GET /(v2/)?nothing|GET /v2/models/echo/infer", "an error is told as all others are", {}),
]


def deviation(name: str) -> dict[str, Any] | None:
    return next((change for pattern, _, change in DEVIATIONS if re.fullmatch(pattern, name)), None)


# --- asking


def ask_http(address: str, request: dict[str, Any]) -> dict[str, Any]:
    """`status`, `headers` that matter, and the body: `json` or `text`; `broken`: it ended in the middle."""
    body = json.dumps(request["body"]) if "body" in request else request.get("text", "")
    headers = {"Content-Type": "application/json", **request.get("headers", {})}
    connection = http.client.HTTPConnection(address, timeout=GUARD_S)
    try:
        connection.request(request["method"], request["path"], body.encode() or None, headers)
        answer = connection.getresponse()
        found: dict[str, Any] = {"status": answer.status, "headers": {}}
        for name, value in answer.getheaders():
            if name.lower().startswith(("ce-", "x-mine", "content-type", "location")):
                found["headers"][name.lower()] = value
        try:
            text = answer.read().decode()
        except http.client.IncompleteRead as error:
            found["broken"], text = True, error.partial.decode()
    finally:
        connection.close()
    try:
        found["json"] = json.loads(text)
    except ValueError:
        found["text"] = text
    return found


_KINDS = {"ModelStreamInfer": "ModelInfer"}


def ask_grpc(address: str, request: dict[str, Any]) -> dict[str, Any]:
    """`code`, `details`, `messages` and `trailing` metadata."""
    method = request["method"]
    kind = _KINDS.get(method, method)
    sent, received = getattr(pb, f"{kind}Request"), getattr(pb, f"{kind}Response")
    messages = [json_format.ParseDict(one, sent(), descriptor_pool=POOL) for one in request["messages"]]
    metadata = [*request.get("metadata", {}).items(), ("oip-stream-dialect", "mlserver")]
    found = []
    with grpc.insecure_channel(address) as channel:
        make = channel.stream_stream if method == "ModelStreamInfer" else channel.unary_stream
        calling = make(f"/inference.GRPCInferenceService/{method}", sent.SerializeToString, received.FromString)
        given = iter(messages) if method == "ModelStreamInfer" else messages[0]
        call: Any = calling(given, timeout=GUARD_S, metadata=metadata)
        try:
            for message in call:
                found.append(json_format.MessageToDict(message, preserving_proto_field_name=True, descriptor_pool=POOL))
        except grpc.RpcError:
            pass
        trailing = {name: value for name, value in call.trailing_metadata() or () if name.startswith(("ce-", "x-"))}
        return {"code": call.code().name, "details": call.details(), "messages": found, "trailing": trailing}


def ask(http_address: str, grpc_address: str, exchange: dict[str, Any]) -> dict[str, Any]:
    if "http" in exchange:
        return ask_http(http_address, exchange["http"])
    return ask_grpc(grpc_address, exchange["grpc"])


# --- comparing


def normal(answer: dict[str, Any], name: str) -> Any:
    """An answer without the differences of all answers: ids made by the server, the version of a model that names none,
    `versions` in metadata (MLServer's are those of dependencies), empty parameters and contents, the numbers' form, the
    words of errors that aren't the model's."""
    answer = json.loads(_ID.sub("ID", json.dumps(answer)))
    if "code" in answer:
        details = answer["details"] if name.startswith("gRPC failing") and name[-1:].isdigit() else ""
        order = sorted if "index" in name else list
        messages = [_message(one) for one in answer["messages"]]
        return answer["code"], details, _plain(messages, order), _without_made_ids(answer["trailing"])
    if answer["headers"].get("content-type", "").startswith("text/event-stream"):
        events = [_message(json.loads(one.removeprefix("data: "))) for one in answer["text"].split("\n\n") if one]
        return answer["status"], events
    body = answer.get("json")
    if answer["status"] >= 400:
        return answer["status"], body if name.startswith("failing") else "an error"
    if isinstance(body, list):
        body = sorted((_message(one) for one in body), key=json.dumps)
    return answer["status"], answer["headers"], _message(body) if isinstance(body, dict) else body


def _plain(messages: list[Any], order: Any) -> list[Any]:
    for one in messages:
        if "models" in one:
            one["models"] = order([_message(model) for model in one["models"]], key=json.dumps)
    return messages


def _message(found: dict[str, Any]) -> dict[str, Any]:
    found = dict(found)
    found.pop("versions", None)
    parameters = {key: value for key, value in (found.pop("parameters", None) or {}).items() if key != "headers"}
    if parameters:
        found["parameters"] = parameters
    if found.get("id") == "ID":
        del found["id"]
    if found.get("version", "1.0") == "1.0":
        found.pop("version", None)
    if found.get("model_version", "1.0") == "1.0":
        found.pop("model_version", None)
    if isinstance(found.get("state"), str):
        found["state"], found["reason"] = found["state"].removeprefix("State."), ""
    for output in found.get("outputs") or ():
        if output.get("contents") == {}:
            del output["contents"]
        if str(output.get("datatype")).startswith("FP") and "data" in output:
            output["data"] = [one if one is None else f"{one:.7g}" for one in output["data"]]
    return found


def _without_made_ids(trailing: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in trailing.items() if value != "ID"}


# --- the tests


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, serving: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """This server's answers, by exchange: the calls keep their order, since some change the served models."""
    directory = tmp_path_factory.mktemp("recorded")
    shutil.copytree(DATA / "models", directory / "store")
    env = {"MLSERVER_PARALLEL_WORKERS": "1"}
    with serving(directory, directory / "store", {"env": env}, ["--ncs", "--profile", "mlserver"]) as server:
        address = server.http.removeprefix("http://")
        # Requests wait for a worker that is starting.
        for model in ("echo", "echo/versions/1", "text", "double", "failing"):
            ask_http(address, {"method": "POST", "path": f"/v2/models/{model}/infer", "body": {"inputs": []}})
        yield {one["name"]: ask(address, server.inference, one) for one in EXCHANGES}


def test_every_exchange_has_a_name_of_its_own() -> None:
    assert len({one["name"] for one in EXCHANGES}) == len(EXCHANGES) > 150


def test_the_answers_are_those_of_mlserver(answers: dict[str, Any]) -> None:
    wrong: dict[str, str] = {}
    for exchange in EXCHANGES:
        try:
            check(exchange, answers)
        except AssertionError as error:
            wrong[exchange["name"]] = str(error)
    assert not wrong, wrong


def check(exchange: dict[str, Any], answers: dict[str, Any]) -> None:
    name = exchange["name"]
    found, change = answers[name], deviation(name)
    if change is None:
        assert normal(found, name) == normal(exchange["answer"], name)
        return
    key = "code" if "code" in found else "status"
    assert found[key] == change.get(key, exchange["answer"][key])
    if "body" in change:
        assert sorted(found["json"]) == change["body"]
    if found[key] not in ("OK", 200) and key == "status":
        assert list(found["json"]) in (["error"], ["code", "type", "message"])


def test_a_deviation_is_one() -> None:
    """Patterns match something, and no equal answers."""
    for pattern, reason, _ in DEVIATIONS:
        assert reason and any(re.fullmatch(pattern, one["name"]) for one in EXCHANGES), pattern


# --- recording: python test_mlserver_recordings.py HTTP_ADDRESS GRPC_ADDRESS, of an MLServer that serves the models

if __name__ == "__main__":
    for one in EXCHANGES:
        one["answer"] = ask(sys.argv[1], sys.argv[2], one)
    text = ",\n".join(json.dumps(one, ensure_ascii=False) for one in EXCHANGES)
    (DATA / "exchanges.json").write_text(f"[\n{text}\n]\n")
