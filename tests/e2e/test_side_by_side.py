"""One server for an unchanged Triton repository, an unchanged MLServer runtime, a page's aiSSEMBLE program and a
TorchServe archive."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest

from model_archiver.model_archiver_config import ModelArchiverConfig
from model_archiver.model_packaging import generate_model_archive
from support import GUARD_S
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub

TESTS = Path(__file__).parents[1]
BLOCKS = TESTS / "data" / "documents" / "aissemble"
PROGRAMS = TESTS / "data" / "programs"
CONFIG = """
backend: "python"
input [ { name: "text_input" data_type: TYPE_STRING dims: [ -1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
"""
MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        texts = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
        upper = np.array([text.decode().upper() for text in texts], dtype=object)
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("text_output", upper)])
"""
REVERSED = """
def handle(data, context):
    return None if data is None else [bytes(*row.values()).decode()[::-1] for row in data]
"""
TWO = """
from kserve import Model, ModelServer


class Named(Model):
    def load(self):
        self.ready = True

    def predict(self, payload, headers=None):
        return {"predictions": [self.name]}


if __name__ == "__main__":
    models = [Named("first"), Named("second")]
    for model in models:
        model.load()
    ModelServer().start(models)
"""
#: What each model is asked (input, datatype, element) and answers, as ModelInfer has it (outputs by name).
ASKED: dict[str, tuple[str, str, Any, dict[str, list[Any]]]] = {
    "upper": ("text_input", "BYTES", "abc", {"text_output": ["ABC"]}),
    "sum": ("x", "INT32", 4, {"total": [104]}),
    "my_model": ("input", "FP32", 1.5, {}),
    "reversed": ("data", "BYTES", "abc", {"output": ["cba"]}),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `store` with an archive, a runtime and programs, and a `repository`."""
    found = tmp_path_factory.mktemp("side_by_side")
    (found / "repository" / "upper" / "1").mkdir(parents=True)
    (found / "repository" / "upper" / "config.pbtxt").write_text(CONFIG)
    (found / "repository" / "upper" / "1" / "model.py").write_text(MODEL)
    store = found / "store"
    store.mkdir()
    shutil.copytree(TESTS / "handlers" / "mlserver" / "sum", store / "sum")
    (store / "readme").mkdir()
    (store / "readme" / "main.py").write_text((BLOCKS / "2.txt").read_text() + "\n" + (BLOCKS / "3.txt").read_text())
    (store / "two").mkdir()
    (store / "two" / "program.py").write_text(TWO)
    (found / "handler.py").write_text(REVERSED)
    generate_model_archive(ModelArchiverConfig("reversed", str(found / "handler.py"), "1.0", export_path=str(store)))
    return found


@pytest.fixture(scope="module")
def served(directory: Path, serving: Callable[..., Any]) -> Iterator[Any]:
    (directory / "scaling.py").write_text((PROGRAMS / "handler_program.txt").read_text())
    with serving(
        directory,
        directory / "store",
        {"default_workers_per_model": 1, "ts_open_inference_protocol": "oip"},
        ["--ncs", "--model-repository", str(directory / "repository"), "--program", "scaling.py --times=3"]
        + ["--models", "readme", "sum", "reversed.mar"],
    ) as server:
        yield server


def over_grpc(served: Any, name: str) -> dict[str, list[Any]]:
    tensor_name, datatype, value, _ = ASKED[name]
    tensor = pb.ModelInferRequest.InferInputTensor(name=tensor_name, datatype=datatype, shape=[1])
    fields = {"BYTES": "bytes_contents", "INT32": "int_contents", "FP32": "fp32_contents"}
    contents = getattr(tensor.contents, fields[datatype])
    contents.append(value.encode() if isinstance(value, str) else value)
    with grpc.insecure_channel(served.inference) as channel:
        request = pb.ModelInferRequest(model_name=name, inputs=[tensor])
        answer = GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=GUARD_S)
    assert answer.model_name == name
    return {
        one.name: [value.decode() for value in one.contents.bytes_contents] or list(one.contents.int64_contents)
        for one in answer.outputs
    }


def over_rest(served: Any, name: str) -> dict[str, list[Any]]:
    tensor_name, datatype, value, _ = ASKED[name]
    tensor = {"name": tensor_name, "shape": [1], "datatype": datatype, "data": [value]}
    answer = httpx.post(f"{served.http}/v2/models/{name}/infer", json={"inputs": [tensor]}, timeout=GUARD_S)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model_name"] == name
    return {one["name"]: one["data"] for one in answer.json()["outputs"]}


def over_predictions(served: Any, name: str) -> str:
    answer = httpx.post(f"{served.http}/predictions/{name}", content=b"abc", timeout=GUARD_S)
    assert answer.status_code == 200, answer.text
    return answer.text


def test_all_of_them_answer_at_once(served: Any) -> None:
    """Promises 001-17, 003-05, 004-03: over gRPC, REST and TorchServe's own API, by one process."""
    with ThreadPoolExecutor(12) as pool:
        calls = [
            (name, expected, pool.submit(ask, served, name))
            for _ in range(3)
            for name, (_, _, _, expected) in ASKED.items()
            for ask in (over_grpc, over_rest)
        ]
        plain = [
            (expected, pool.submit(over_predictions, served, name))
            for _ in range(3)
            for name, expected in (("my_model", "{}"), ("reversed", "cba"))
        ]
    assert [(name, call.result()) for name, _, call in calls] == [(name, expected) for name, expected, _ in calls]
    assert [call.result() for _, call in plain] == [expected for expected, _ in plain]
    listed = httpx.get(f"{served.http_management}/models").json()["models"]
    assert {one["modelName"] for one in listed} == {*ASKED, "scaling"}


def test_a_program_with_arguments_lies_where_it_likes(served: Any) -> None:
    body = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [2.0]}]}
    answer = httpx.post(f"{served.http}/v2/models/scaling/infer", json=body, timeout=GUARD_S).json()
    assert answer["outputs"][0]["data"] == [6.0]


def manage(served: Any, method: str, path: str, **query: Any) -> tuple[int, Any]:
    answer = httpx.request(method, f"{served.http_management}{path}", params=query, timeout=GUARD_S)
    return answer.status_code, answer.json()


def test_a_program_of_the_store_can_be_registered(served: Any) -> None:
    url = "two/program.py"
    status, said = manage(served, "POST", "/models", url=url)
    assert status == 400 and "serves first, second: choose one" in said["message"]
    for name in ("first", "second"):
        assert (
            manage(served, "POST", "/models", url=url, model_name=name, initial_workers=1, synchronous=True)[0] == 200
        )
        answer = httpx.post(f"{served.http}/v1/models/{name}:predict", json={"instances": [1]}, timeout=GUARD_S)
        assert answer.json() == {"predictions": [name]}
    status, said = manage(served, "POST", "/models", url=url, model_name="third", initial_workers=1, synchronous=True)
    assert status == 500 and "serves first, second here, but no 'third'" in said["message"]
    for name in ("first", "second"):
        assert manage(served, "DELETE", f"/models/{name}")[0] == 200


def test_a_programs_only_model_may_have_another_name(served: Any) -> None:
    query = {"url": "readme", "model_name": "renamed", "initial_workers": 1, "synchronous": True}
    assert manage(served, "POST", "/models", **query)[0] == 200
    body = {"inputs": [{"name": "input", "shape": [1], "datatype": "FP32", "data": [2.0]}]}
    answer = httpx.post(f"{served.http}/v2/models/renamed/infer", json=body, timeout=GUARD_S).json()
    assert answer["model_name"] == "renamed"
    assert manage(served, "DELETE", "/models/renamed")[0] == 200


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("print('ends')\n", "it ended without starting its server"),
        ("raise RuntimeError('no such file')\n", "RuntimeError: no such file"),
        ("from kserve import ModelServer\nModelServer().start([])\n", "starts its server without a model"),
    ],
)
def test_a_program_that_serves_nothing_is_refused_with_its_words(
    served: Any, directory: Path, text: str, reason: str
) -> None:
    (directory / "store" / "broken.py").write_text(text)
    status, said = manage(served, "POST", "/models", url="broken.py")
    assert status == 400 and reason in said["message"]


@pytest.mark.parametrize("url", ["../scaling.py", "/etc/passwd.py", "file:///tmp/main.py", "nowhere.py"])
def test_only_programs_of_the_store_can_be_registered(served: Any, url: str) -> None:
    assert manage(served, "POST", "/models", url=url)[0] in (400, 404)


def test_a_program_survives_a_restart_with_its_models(
    tmp_path: Path, directory: Path, serving: Callable[..., Any]
) -> None:
    """Those of the store by the snapshot; the ones of the command line as often as they are named."""
    for arguments in (["--models", "readme"], []):
        server = serving(tmp_path, directory / "store", {"default_workers_per_model": 1}, arguments)
        try:
            server.wait_started()
            assert json.loads(httpx.get(f"{server.http_management}/models").text)["models"] == [
                {"modelName": "my_model", "modelUrl": "readme"}
            ]
        finally:
            assert server.terminate() == 0


def has_torch(served: Any, name: str) -> bool:
    (pid,) = served.worker_pids(name)
    return any("libtorch" in one.path for one in psutil.Process(pid).memory_maps())


@pytest.mark.skipif(sys.platform != "linux", reason="the files that a process has mapped are read, as Linux has them")
@pytest.mark.long
def test_models_without_torch_do_not_wait_for_its_import(
    tmp_path: Path, directory: Path, serving: Callable[..., Any]
) -> None:
    """Sources tell it, and a program that is run for its models' names tells it better."""
    store = tmp_path / "store"
    shutil.copytree(directory / "store" / "sum", store / "sum")
    hidden = "import importlib\n" + TWO
    for name, text in {"seen": TWO, "run": hidden, "guessed": hidden}.items():
        (store / name).mkdir()
        both = TWO.partition("models = ")[2].partition("\n")[0]
        (store / name / "main.py").write_text(text.replace(both, f'[Named("{name}")]'))
    (tmp_path / "two.py").write_text(hidden)
    with serving(
        tmp_path,
        store,
        {"default_workers_per_model": 1, "preload_torch": "true", "preloaded": ()},
        ["--ncs", "--model-repository", str(directory / "repository"), "--program", "two.py"]
        + ["--models", "sum", "named=seen", "run", "assumed=guessed"],
    ) as server:
        names = ["first", "second", "upper", "sum", "named", "run", "assumed"]
        server.wait_for_log("is ready (pid", len(names))
        assert {name: has_torch(server, name) for name in names} == dict.fromkeys(names, False) | {"assumed": True}
        server.register("seen", model_name="registered")
        assert not has_torch(server, "registered")
