"""Servers as hosting platforms start them: SageMaker with one model, with several, with sessions; Vertex AI; Triton on
both. Each server is `torchserve serve` or the platform's flags, with nothing but the platform's variables."""

from __future__ import annotations

import json
import os
import random
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

import httpx
import pytest

from support import GUARD_S, QuietHandler, free_port, http_server

INFERENCE = """
import json, os
def model_fn(model_dir):
    with open(os.path.join(model_dir, "factor.json")) as file:
        return json.load(file)
def transform_fn(model, data, content_type, accept, context):
    context.set_response_header(0, "X-Amzn-SageMaker-Custom-Attributes",
                                context.get_request_header(0, "x-amzn-sagemaker-custom-attributes") or "none")
    return json.dumps([model * one for one in json.loads(data)])
"""
JSON = {"content-type": "application/json"}
#: The command in a folder without a config file.
COMMAND = "import os, sys; os.chdir({!r}); from ts_frontend.cli.main import main; sys.exit(main())"


def sagemaker_model(folder: Path, factor: int, script: str = INFERENCE) -> Path:
    (folder / "code").mkdir(parents=True)
    (folder / "code" / "inference.py").write_text(script)
    (folder / "factor.json").write_text(str(factor))
    return folder


@pytest.fixture
def hosted(tmp_path: Path, serving: Any) -> Callable[..., Any]:
    """`hosted(words, **variables)`: a server on a free port, started by these words of the command line."""

    @contextmanager
    def start(words: Sequence[str], **variables: str) -> Iterator[str]:
        (tmp_path / "server" / "empty").mkdir(parents=True)
        port = free_port()
        ports = {"SAGEMAKER_BIND_TO_PORT" if "AIP_MODE" not in variables else "AIP_HTTP_PORT": str(port)}
        given = [f"--set={key}=0" for key in ("metrics_port", "grpc_inference_port", "grpc_management_port")]
        if "SAGEMAKER_MULTI_MODEL" not in variables:
            given.append("--set=management_address=http://127.0.0.1:0")
        command = [sys.executable, "-c", COMMAND.format(str(tmp_path / "server" / "empty"))]
        places = [f"--set=work_dir={tmp_path / 'server'}", "--set=preload_torch=false", "--set=number_of_gpu=0"]
        settings: dict[str, Any] = {"env": variables | ports, "command": [*command, *words, *given, *places]}
        with serving(tmp_path / "server", None, settings, []) as server:
            yield f"http://127.0.0.1:{port}"
            assert server.terminate() == 0

    return start


def test_a_folder_of_sagemakers_is_served_with_its_headers_both_ways(
    tmp_path: Path, hosted: Callable[..., Any]
) -> None:
    sagemaker_model(tmp_path / "model", 3)
    with hosted(["serve"], SAGEMAKER_BASE_DIR=str(tmp_path), SAGEMAKER_MODEL_SERVER_WORKERS="1") as url:
        assert httpx.get(f"{url}/ping").status_code == 200
        headers = {**JSON, "X-Amzn-SageMaker-Custom-Attributes": "trace=1"}
        answer = httpx.post(f"{url}/invocations", content="[1, 2]", headers=headers)
        assert (answer.status_code, answer.json()) == (200, [3, 6])
        assert answer.headers["x-amzn-sagemaker-custom-attributes"] == "trace=1"
        assert answer.headers["content-type"] == "application/json"
        wrong = httpx.post(f"{url}/invocations", content="{", headers=JSON)
        assert wrong.status_code == 500 and "JSONDecodeError" in wrong.text
        session = httpx.post(f"{url}/invocations", content='{"requestType": "NEW_SESSION"}', headers=JSON)
        assert session.json() == ["requestType" * 3]  # without sessions it is the model's


STREAMS = """
import time
def model_fn(model_dir):
    return 0
def transform_fn(model, data, content_type, accept):
    for at in range(3):
        yield f"{at};"
"""


@pytest.mark.long
def test_an_answer_is_streamed(tmp_path: Path, hosted: Callable[..., Any]) -> None:
    sagemaker_model(tmp_path / "model", 3, STREAMS)
    with (
        hosted(["serve"], SAGEMAKER_BASE_DIR=str(tmp_path), SAGEMAKER_MODEL_SERVER_WORKERS="1") as url,
        httpx.stream("POST", f"{url}/invocations", content="[]", headers=JSON) as answer,
    ):
        assert answer.headers["transfer-encoding"] == "chunked"
        assert "".join(answer.iter_text()) == "0;1;2;"


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ({}, "names no handler"),
        (
            {"code/inference.py": "def model_fn(model_dir):\n    raise OSError('weights are gone')\n"},
            "weights are gone",
        ),
        ({"model.pth": "nothing"}, "model.pth"),
    ],
)
def test_a_model_that_cannot_be_served_ends_the_server_with_its_reason(
    tmp_path: Path, torchserve: Callable[..., Any], folder: Mapping[str, str], said: str
) -> None:
    (tmp_path / "model").mkdir()
    for name, text in folder.items():
        (tmp_path / "model" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "model" / name).write_text(text)
    ports = {"SAGEMAKER_BIND_TO_PORT": "0", "SAGEMAKER_MODEL_SERVER_WORKERS": "1"}
    given = [f"--set={key}=0" for key in ("metrics_port", "grpc_inference_port", "grpc_management_port")]
    given += ["--set=management_address=http://127.0.0.1:0", f"--work-dir={tmp_path}", "--set=preload_torch=false"]
    env = {**os.environ, **ports, "SAGEMAKER_BASE_DIR": str(tmp_path)}
    done = torchserve("serve", *given, env=env)
    assert done.returncode == 1 and said in done.stdout + done.stderr, done


SEQUENCE = """
count = {}
def model_fn(model_dir):
    return count
def transform_fn(model, data, content_type, accept, context):
    session = context.get_sequence_id(0)
    model[session] = model.get(session, 0) + 1
    return f"{session} {model[session]}"
"""


def test_sessions_begin_are_kept_to_one_worker_and_end(tmp_path: Path, hosted: Callable[..., Any]) -> None:
    sagemaker_model(tmp_path / "model", 3, SEQUENCE)
    config = "minWorkers: 2\nmaxWorkers: 2\nsequenceBatching: true\nsequenceMaxIdleMSec: 60000\nmaxNumSequence: 4\n"
    (tmp_path / "model" / "model-config.yaml").write_text(config)
    variables = {"SAGEMAKER_BASE_DIR": str(tmp_path), "SAGEMAKER_ENABLE_STATEFUL_SESSIONS": "true"}
    with hosted(["serve"], **variables) as url:

        def call(body: str, session: str = "") -> httpx.Response:
            headers = {**JSON, **({"X-Amzn-SageMaker-Session-Id": session} if session else {})}
            return httpx.post(f"{url}/invocations", content=body, headers=headers)

        begun = [call('{"requestType": "NEW_SESSION"}') for _ in range(3)]
        sessions = [one.headers["x-amzn-sagemaker-new-session-id"] for one in begun]
        names = [one.partition("; Expires=")[0] for one in sessions]
        assert all(one.status_code == 200 for one in begun) and len(set(names)) == 3
        for turn in range(1, 4):
            assert [call("[]", name).text for name in names] == [f"{name} {turn}" for name in names]
        closed = call('{"requestType": "CLOSE"}', names[0])
        assert closed.headers["x-amzn-sagemaker-closed-session-id"] == names[0]
        for wrong in (call("[]", names[0]), call("[]", "unknown"), call('{"requestType": "CLOSE"}', "unknown")):
            assert wrong.status_code == 400 and "session not found" in wrong.text
        assert call("[]", names[1]).text == f"{names[1]} 4"


# --- several models

HEAVY = """
import json, os
def model_fn(model_dir):
    with open(os.path.join(model_dir, "factor.json")) as file:
        return json.load(file), bytearray(os.urandom(4096)) * 6144  # 24 MiB
def transform_fn(model, data, content_type, accept):
    return json.dumps([model[0] * one for one in json.loads(data)])
"""


def invoke_or_load(client: httpx.Client, models: Path, number: int, held: list[str], lock: threading.Lock) -> str:
    """As SageMaker: a model that isn't there is loaded, and another one is unloaded when there is no room for it."""
    name = f"m{number}"
    for _ in range(200):
        answer = client.post(f"/models/{name}/invoke", content="[2]", headers=JSON)
        if answer.status_code == 200:
            assert answer.json() == [2 * number], (name, answer.text)
            return "answered"
        assert answer.status_code in (404, 503), answer.text  # unloaded meanwhile
        loaded = client.post("/models", json={"model_name": name, "url": str(models / name)})
        if loaded.status_code == 507:
            with lock:
                victim = held.pop(0) if held else None
            if victim is not None:
                assert client.delete(f"/models/{victim}").status_code in (200, 404)
        elif loaded.status_code == 200:
            with lock:
                held.append(name)
        else:
            assert loaded.status_code == 409, loaded.text
    raise AssertionError(f"{name} was never answered")


def evicted(hosted: Callable[..., Any], place: Path, *, count: int, fitting: int, clients: int, requests: int) -> None:
    for number in range(count):
        sagemaker_model(place / "models" / f"m{number}", number, HEAVY)
    limit = fitting * 36 * 1024 * 1024
    variables = {"SAGEMAKER_BASE_DIR": str(place), "SAGEMAKER_MULTI_MODEL": "true"}
    with hosted(["serve", f"--set=registered_memory_max={limit}"], **variables) as url:
        with httpx.Client(base_url=url, timeout=GUARD_S) as client:
            held: list[str] = []
            lock = threading.Lock()
            chosen = random.Random(1).choices(range(count), k=requests)
            with ThreadPoolExecutor(clients) as pool:
                calls = [pool.submit(invoke_or_load, client, place / "models", one, held, lock) for one in chosen]
                assert [one.result(GUARD_S) for one in calls] == ["answered"] * requests
            there = [one["modelName"] for one in client.get("/models?limit=1000").json()["models"]]
            assert 2 <= len(there) <= 2 * fitting, there
        log = (place / "server" / "logs" / "ts_log.log").read_text()
    assert "Traceback" not in log


@pytest.mark.long
def test_more_models_than_memory_are_loaded_and_unloaded_in_turn(tmp_path: Path, hosted: Callable[..., Any]) -> None:
    evicted(hosted, tmp_path, count=16, fitting=4, clients=6, requests=60)


@pytest.mark.slow
def test_two_hundred_models_over_the_memory_of_twenty(tmp_path: Path, hosted: Callable[..., Any]) -> None:
    evicted(hosted, tmp_path, count=200, fitting=20, clients=32, requests=400)


def test_the_contract_of_several_models(tmp_path: Path, hosted: Callable[..., Any]) -> None:
    for name in ("a", "b"):
        sagemaker_model(tmp_path / "models" / name, 5)
    variables = {"SAGEMAKER_BASE_DIR": str(tmp_path), "SAGEMAKER_MULTI_MODEL": "true"}
    with hosted(["serve"], **variables) as url, httpx.Client(base_url=url, timeout=GUARD_S) as client:
        assert client.get("/ping").status_code == 200
        assert client.get("/models").json() == {"models": []}
        for name in ("a", "b"):
            made = client.post("/models", json={"model_name": name, "url": str(tmp_path / "models" / name)})
            assert made.status_code == 200, made.text
        again = client.post("/models", json={"model_name": "a", "url": str(tmp_path / "models" / "a")})
        assert again.status_code == 409
        page = client.get("/models?limit=1").json()
        assert page["models"] == [{"modelName": "a", "modelUrl": str(tmp_path / "models" / "a")}]
        rest = client.get(f"/models?limit=1&next_page_token={page['nextPageToken']}").json()
        assert [one["modelName"] for one in rest["models"]] == ["b"]
        assert client.get("/models?limit=1&next_page_token=2").json() == {"models": []}
        headers = {**JSON, "X-Amzn-SageMaker-Target-Model": "a.tar.gz"}
        assert client.post("/models/a/invoke", content="[1]", headers=headers).json() == [5]
        assert client.delete("/models/a").status_code == 200
        assert client.get("/models/a").status_code == 404
        assert client.post("/models/a/invoke", content="[1]", headers=JSON).status_code == 404
        assert client.delete("/models/a").status_code == 404
        nowhere = client.post("/models", json={"model_name": "c", "url": str(tmp_path / "models" / "nowhere")})
        assert nowhere.status_code in (400, 404) and "nowhere" in nowhere.text
        foreign = client.post("/models", json={"model_name": "c", "url": "/etc/passwd"})
        assert foreign.status_code in (400, 404)


# --- Vertex AI


VERTEX = """
import json
def handle(data, context):
    if data is None:
        return None
    given = [row["body"] for row in data]
    return [json.dumps({"predictions": [2 * x for x in one["instances"]], "with": one["parameters"]}) for one in given]
"""


def test_vertex_calls_its_own_routes(tmp_path: Path, hosted: Callable[..., Any], write_to: Callable[..., str]) -> None:
    write_to(tmp_path, "net", VERTEX)
    variables = {
        "AIP_MODE": "PREDICTION",
        "AIP_HEALTH_ROUTE": "/v1/endpoints/1/deployedModels/2",
        "AIP_PREDICT_ROUTE": "/v1/endpoints/1/deployedModels/2:predict",
    }
    with hosted(["serve", "--models", f"net={tmp_path / 'net'}", "--model-store", str(tmp_path)], **variables) as url:
        assert httpx.get(f"{url}{variables['AIP_HEALTH_ROUTE']}").json() == {"status": "Healthy"}
        body = {"instances": [1, 2], "parameters": {"a": 1}}
        answer = httpx.post(f"{url}{variables['AIP_PREDICT_ROUTE']}", json=body)
        assert answer.json() == {"predictions": [2, 4], "with": {"a": 1}}
        for path in ("v2/models/net/unload", "v2/repository/models/net/unload", "models", "v2/nothing"):
            refused = httpx.post(
                f"{url}{variables['AIP_PREDICT_ROUTE']}", json={}, headers={"X-Vertex-Ai-Triton-Redirect": path}
            )
            assert refused.status_code == 404 and path in refused.text
        ready = httpx.post(
            f"{url}{variables['AIP_PREDICT_ROUTE']}", headers={"X-Vertex-Ai-Triton-Redirect": "v2/health/ready"}
        )
        assert ready.json()["ready"] is True


# --- Triton on both

TRITON = """
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        given = [pb_utils.get_input_tensor_by_name(one, "IN").as_numpy() for one in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", 2 * one)]) for one in given]
"""
CONFIG = """
backend: "python"
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""


def triton_repository(folder: Path) -> Path:
    (folder / "double" / "1").mkdir(parents=True)
    (folder / "double" / "1" / "model.py").write_text(TRITON)
    (folder / "double" / "config.pbtxt").write_text(CONFIG)
    return folder


def binary_request() -> tuple[bytes, int]:
    """The body of tritonclient's binary form, and the size of its header."""
    head = json.dumps(
        {
            "inputs": [{"name": "IN", "shape": [2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}],
            "outputs": [{"name": "OUT", "parameters": {"binary_data": True}}],
        }
    ).encode()
    return head + struct.pack("<2f", 1, 2), len(head)


def check_triton(url: str, kind: str) -> None:
    inputs = [{"name": "IN", "shape": [2], "datatype": "FP32", "data": [1, 2]}]
    plain = httpx.post(url, json={"inputs": inputs})
    assert plain.status_code == 200, plain.text
    assert plain.json()["outputs"][0]["data"] == [2, 4], plain.text
    body, size = binary_request()
    headers = {"content-type": f"application/vnd.{kind}-triton.binary+json;json-header-size={size}"}
    answer = httpx.post(url, content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    prefix, _, length = answer.headers["content-type"].partition(";json-header-size=")
    assert prefix == f"application/vnd.{kind}-triton.binary+json"
    assert struct.unpack("<2f", answer.content[int(length) :]) == (2, 4)


def test_tritons_container_on_sagemaker(tmp_path: Path, hosted: Callable[..., Any]) -> None:
    """With the command line that Triton's `serve` makes of its variables."""
    repository = triton_repository(tmp_path / "model")
    words = "--allow-sagemaker=true --allow-grpc=false --allow-http=false --allow-metrics=false"
    words += f" --model-control-mode=explicit --model-repository={repository} --model-namespacing=true"
    words += " --log-verbose=true --backend-config=python,shm-default-byte-size=16777216 --load-model=double"
    with hosted(["--start", "--foreground", *words.split()]) as url:
        assert httpx.get(f"{url}/ping").status_code == 200
        check_triton(f"{url}/invocations", "sagemaker")


@pytest.mark.long
def test_tritons_variables_without_its_script(tmp_path: Path, hosted: Callable[..., Any]) -> None:
    triton_repository(tmp_path / "model")
    variables = {"SAGEMAKER_BASE_DIR": str(tmp_path), "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "double"}
    with hosted(["serve"], **variables) as url:
        check_triton(f"{url}/invocations", "sagemaker")


#: The flags that Triton's `serve` makes of its variables, with several models.
SEVERAL = (
    "--allow-sagemaker=true --allow-grpc=false --allow-http=false --allow-metrics=false --log-verbose=true"
    " --model-control-mode=explicit --model-namespacing=true --backend-config=python,shm-default-byte-size=16777216"
)


@pytest.mark.parametrize("by_script", [True, pytest.param(False, marks=pytest.mark.long)])
def test_several_of_tritons_models(tmp_path: Path, hosted: Callable[..., Any], by_script: bool) -> None:
    """Each is a repository of its own, or the model's folder."""
    (tmp_path / "none").mkdir()
    models = tmp_path / "models"
    triton_repository(models / "a1" / "model")
    (triton_repository(tmp_path / "made") / "double").rename((models / "b2").absolute())
    words = ["--start", "--foreground", *SEVERAL.split(), f"--model-repository={tmp_path / 'none'}"]
    variables = {"SAGEMAKER_BASE_DIR": str(tmp_path), "SAGEMAKER_MULTI_MODEL": "true"}
    with hosted(words if by_script else ["serve"], **variables) as url, httpx.Client(base_url=url) as client:
        assert client.get("/ping").status_code == 200
        for name, place in {"a1": models / "a1" / "model", "b2": models / "b2"}.items():
            headers = {"X-Amzn-SageMaker-Target-Model": f"{name}.tar.gz"}
            call = {"model_name": name, "url": str(place)}
            assert client.post(f"/models/{name}/invoke", json={}).status_code == 404
            loaded = client.post("/models", json=call, headers=headers)
            assert loaded.status_code == 200, loaded.text
            assert client.post("/models", json=call, headers=headers).status_code == 409
            check_triton(f"{url}/models/{name}/invoke", "sagemaker")
        listed = {one["modelName"]: one["modelUrl"] for one in client.get("/models").json()["models"]}
        assert listed == {"a1": str(models / "a1" / "model"), "b2": str(models / "b2")}
        assert client.delete("/models/a1").status_code == 200
        assert client.post("/models/a1/invoke", json={}).status_code == 404
        check_triton(f"{url}/models/b2/invoke", "sagemaker")
        (models / "c3" / "model").mkdir(parents=True)
        nothing = client.post("/models", json={"model_name": "c3", "url": str(models / "c3" / "model")})
        assert nothing.status_code in (400, 500) and client.get("/models/c3").status_code == 404
        foreign = client.post("/models", json={"model_name": "d4", "url": "/etc"})
        assert foreign.status_code in (400, 404)


@pytest.mark.long
def test_triton_on_vertex(tmp_path: Path, hosted: Callable[..., Any]) -> None:
    repository = triton_repository(tmp_path / "repository")
    words = f"--allow-vertex-ai=true --allow-http=false --model-repository={repository}"
    with hosted(["--start", "--foreground", *words.split()], AIP_MODE="PREDICTION") as url:
        assert httpx.get(f"{url}/ping").status_code == 200
        check_triton(f"{url}/predict", "vertex-ai")
        headers = {"X-Vertex-Ai-Triton-Redirect": "v2/models/double/versions/1"}
        assert httpx.post(f"{url}/predict", headers=headers).json()["name"] == "double"


# --- a model in Google's store


class _Bucket(QuietHandler):
    """The JSON API of one bucket with the folder `net`, of these `objects`."""

    objects: ClassVar[dict[str, bytes]] = {}

    def do_GET(self) -> None:
        objects = self.objects
        parts = urlsplit(self.path)
        key = unquote(parts.path.partition("/o/")[2])
        listed = [{"name": name, "size": str(len(data)), "generation": "1"} for name, data in objects.items()]
        if not key:
            self.answer(200, json.dumps({"items": [one for one in listed if one["name"].startswith("net/")]}).encode())
        elif key not in objects:
            self.answer(404, b"{}")
        elif "alt=media" in parts.query:
            self.answer(200, objects[key])
        else:
            self.answer(200, json.dumps(next(one for one in listed if one["name"] == key)).encode())


@pytest.mark.long
def test_vertex_names_the_models_folder_in_googles_store(
    tmp_path: Path, hosted: Callable[..., Any], write_to: Callable[..., str]
) -> None:
    write_to(tmp_path, "net", VERTEX)
    files = [one for one in (tmp_path / "net").rglob("*") if one.is_file()]
    _Bucket.objects.update({str(one.relative_to(tmp_path)): one.read_bytes() for one in files})
    variables = {"AIP_MODE": "PREDICTION", "AIP_STORAGE_URI": "gs://models/net"}
    with http_server(_Bucket) as bucket, hosted(["serve"], STORAGE_EMULATOR_HOST=bucket, **variables) as url:
        body = {"instances": [3], "parameters": None}
        assert httpx.post(f"{url}/predict", json=body).json() == {"predictions": [6], "with": None}
