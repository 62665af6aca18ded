"""`mlserver start FOLDER`, a model at the root of its store, one that only variables name, and runtimes with paths of
their own."""

from __future__ import annotations

import json
import os
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from support import GUARD_S, http_call
from ts.compat import SHIMS
from ts.protocol.open_inference_pb2 import ModelInferRequest
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub

RUNTIMES = Path(__file__).parent.parent.parent / "handlers" / "mlserver"
STORE = RUNTIMES.parent / "mlserver_store"
TENSOR = {"name": "x", "datatype": "INT32", "shape": [2], "data": [1, 2]}
TEXT = {"name": "names", "datatype": "BYTES", "shape": [1], "data": ["a"], "parameters": {"content_type": "str"}}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, serving: Callable[..., Any]) -> Iterator[Any]:
    """`mlserver start` on a folder that is a model, with others, a module that they share, and no model's folder in
    it."""
    directory = tmp_path_factory.mktemp("started")
    folder = directory / "folder"
    shutil.copytree(RUNTIMES / "routes", folder)
    shutil.copytree(RUNTIMES / "sum", folder / "inside" / "sum")
    for name in ("rt.py", "echo", "deep", "own"):
        (shutil.copytree if (STORE / name).is_dir() else shutil.copy)(STORE / name, folder / name)
    (folder / "artefacts").mkdir()
    (folder / "settings.json").write_text('{"server_name": "here", "parallel_workers": 1, "debug": true}')
    path = os.pathsep.join((os.environ["PYTHONPATH"], SHIMS)) if "PYTHONPATH" in os.environ else SHIMS
    command = [sys.executable, "-m", "mlserver", "start", str(folder)]
    with serving(directory, None, {"command": command, "env": {"PYTHONPATH": path}}, []) as server:
        wait_ready(server, "routes", "sum", "echo", "greeting", "own")
        yield server


def wait_ready(server: Any, *models: str) -> None:
    """Requests wait for a worker that is starting."""
    for name in models:
        tensor = TEXT if name in ("echo", "greeting", "own") else TENSOR
        assert ask(server, f"/v2/models/{name}/infer", {"inputs": [tensor]})[0] == 200, server.log


def ask(server: Any, path: str, value: Any = None, method: str = "") -> tuple[int, Any, Any]:
    """Status, JSON and headers."""
    usual, data = ("GET", None) if value is None else ("POST", json.dumps(value))
    answer = http_call(server.port("http_inference"), method or usual, path, data, {"X-Mine": "1"})
    return answer.status, json.loads(answer.body or b"null"), answer.headers


def test_the_folder_itself_and_what_lies_in_it_are_served(started: Any) -> None:
    names = {one["name"] for one in ask(started, "/v2/repository/index", {})[1]}
    assert names == {"routes", "sum", "echo", "greeting", "own"}
    assert "Failed to load model" not in started.log


def test_what_lies_at_the_root_is_importable_for_the_models_of_sub_folders(started: Any) -> None:
    """`rt.py` holds the runtimes of two models, and an import of a third one, which has its own code in its folder."""
    tensor = TEXT | {"shape": [2], "data": ["you", "me"]}
    answers = {name: ask(started, f"/v2/models/{name}/infer", {"inputs": [tensor]})[1] for name in ("echo", "greeting")}
    found = {name: answer["outputs"][0]["data"] for name, answer in answers.items()}
    assert found == {"echo": ["you", "me"], "greeting": ["hello you", "hello me"]}
    told = json.loads(ask(started, "/v2/models/own/infer", {"inputs": [tensor]})[1]["outputs"][0]["data"][0])
    root = str(started.directory / "folder")
    assert told["rt"] == f"{root}/rt.py" and told["path"][:2] == [f"{root}/own", root]
    assert ask(started, "/v2/repository/models/greeting/load", {})[0] == 200, "again, with what is on the path by now"
    assert ask(started, "/v2/models/greeting/infer", {"inputs": [tensor]})[0] == 200


def test_metadata_has_the_content_type_that_a_runtime_sets_when_it_loads(started: Any) -> None:
    assert ask(started, "/v2/models/own")[1]["parameters"] == {"content_type": "str"}
    assert "parameters" not in ask(started, "/v2/models/echo")[1]


def test_its_settings_json_counts(started: Any) -> None:
    assert "debug has no effect" in started.log


def test_metrics_and_the_description_are_there_without_a_setting(started: Any) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{started.port('http_metrics')}/metrics", timeout=GUARD_S) as found:
        assert 'model_infer_request_success_total{model="routes"' in found.read().decode()
    assert "openapi" in ask(started, "/v2/docs/dataplane.json")[1]


def test_the_folder_itself_is_loaded_again(started: Any) -> None:
    assert ask(started, "/v2/repository/models/routes/load", {})[0] == 200
    assert ask(started, "/greet/you")[1] == {"text": "hello you"}


# --- paths of their own


def test_a_path_with_parameters(started: Any) -> None:
    assert ask(started, "/greet/you")[:2] == (200, {"text": "hello you"})
    assert ask(started, "/greet/you%20all?times=2&loud=true")[:2] == (200, {"text": "HELLO YOU ALL HELLO YOU ALL"})


def test_a_parameter_that_does_not_fit(started: Any) -> None:
    status, found, _ = ask(started, "/greet/you?times=x")
    assert status == 422 and found["detail"][0]["loc"] == ["query", "times"]


def test_a_path_that_takes_an_inference_request(started: Any) -> None:
    status, found, _ = ask(started, "/count", {"inputs": [TENSOR, TENSOR]})
    assert status == 200 and found["outputs"] == [{"name": "count", "shape": [1], "datatype": "INT64", "data": [2]}]
    assert ask(started, "/count", {"inputs": []})[:2] == (418, {"error": "no inputs to count"})
    assert ask(started, "/count", {"inputs": 5})[0] == 422


def test_a_path_beside_those_of_the_protocol(started: Any) -> None:
    assert ask(started, "/v2/models/routes/explain", {"b": 1, "a": 2})[:2] == (200, ["a", "b"])
    assert ask(started, "/v2/models/routes/nothing", {})[0] == 404


def test_a_path_of_torchserves_that_a_model_takes(started: Any) -> None:
    assert ask(started, "/invocations", {})[:2] == (200, "mine")
    assert ask(started, "/ping")[:2] == (200, {"status": "Healthy"})


def test_another_method_is_refused(started: Any) -> None:
    assert ask(started, "/count")[0] == 405


def test_a_path_that_raises(started: Any) -> None:
    assert ask(started, "/broken")[0] in (500, 503)
    started.wait_for_log("KeyError: 'no'")


def test_a_path_that_cannot_be_matched_is_refused_at_load_and_no_other_models(started: Any, tmp_path: Path) -> None:
    folder = started.directory / "folder" / "inside" / "unmatched"
    shutil.copytree(RUNTIMES / "routes", folder)
    code = (folder / "routes_model.py").read_text()
    (folder / "routes_model.py").write_text(code.replace("/greet/{name}", "/{name}/{name}"))
    settings = json.loads((folder / "model-settings.json").read_text())
    (folder / "model-settings.json").write_text(json.dumps(settings | {"name": "unmatched"}))
    try:
        status, found, _ = ask(started, "/v2/repository/models/unmatched/load", {})
        assert status >= 400 and "names the parameter 'name' twice" in (found["error"] + started.log)
        assert ask(started, "/greet/you")[1] == {"text": "hello you"}
    finally:
        ask(started, "/v2/repository/models/unmatched/unload", {})
        shutil.rmtree(folder)


# --- headers


def test_events_headers_and_a_runtimes_own(started: Any) -> None:
    status, found, headers = ask(started, "/v2/models/routes/infer", {"id": "i", "inputs": [TENSOR]})
    assert status == 200 and "parameters" not in found
    assert {name: headers[name] for name in headers if name.lower().startswith(("ce-", "x-greeting"))} == {
        "ce-specversion": "0.3",
        "ce-source": "io.seldon.serving.deployment.here",
        "ce-type": "io.seldon.serving.inference.response",
        "ce-modelid": "routes",
        "ce-inferenceservicename": "here",
        "ce-endpoint": "routes",
        "ce-id": "i",
        "ce-requestid": "i",
        "x-greeting": "hello",
    }
    assert "Ce-Type=io.seldon.serving.inference.request" in found["outputs"][0]["data"]
    assert "Ce-Id=i" in found["outputs"][0]["data"] and "x-mine=1" in found["outputs"][0]["data"]


def test_the_same_as_trailing_metadata(started: Any) -> None:
    request = ModelInferRequest(model_name="routes", id="g")
    tensor = request.inputs.add(name="x", datatype="INT32", shape=[1])
    tensor.contents.int_contents.append(1)
    with grpc.insecure_channel(started.inference) as channel:
        answer, call = GRPCInferenceServiceStub(channel).ModelInfer.with_call(
            request, timeout=GUARD_S, metadata=[("x-mine", "2")]
        )
    trailing = dict(call.trailing_metadata())
    assert trailing["ce-id"] == "g" and trailing["x-greeting"] == "hello"
    assert trailing["ce-type"] == "io.seldon.serving.inference.response"
    assert b"x-mine=2" in answer.outputs[0].contents.bytes_contents and not answer.parameters


# --- variables


def test_a_model_that_only_variables_name(tmp_path: Path, serving: Callable[..., Any]) -> None:
    """As KServe's runtime of MLServer starts it."""
    folder = tmp_path / "models"
    folder.mkdir()
    shutil.copy(RUNTIMES / "routes" / "routes_model.py", folder)
    env = {
        "MLSERVER_MODEL_NAME": "mine",
        "MLSERVER_MODEL_URI": str(folder),
        "MLSERVER_MODEL_IMPLEMENTATION": "routes_model.Routes",
        "MLSERVER_MODEL_EXTRA": '{"greeting": "bonjour"}',
        "MLSERVER_MODEL_VERSION": "v7",
        "MLSERVER_LOAD_MODELS_AT_STARTUP": "true",
        "MLSERVER_HTTP_PORT": "0",
    }
    with serving(tmp_path, folder, {"env": env}, ["--ncs", "--profile", "mlserver"]) as server:
        wait_ready(server, "mine")
        assert ask(server, "/v2/models/mine")[1]["versions"] == ["v7"]
        assert ask(server, "/greet/me")[1] == {"text": "bonjour me"}
