"""An unchanged Triton model repository served, in each control mode, beside archives of the model store."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from support import GUARD_S
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub

#: As in a seed of this protocol: a text model with a config.pbtxt.
CONFIG = """
# A text model
name: "llm_model"
backend: "python"
max_batch_size: 8
input [ { name: "text_input" data_type: TYPE_STRING dims: [ -1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
"""
MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.version = args["model_version"]

    def execute(self, requests):
        responses = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
            out = np.array([[t.decode() + " v" + self.version for t in row] for row in text], dtype=object)
            responses.append(pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("text_output", out)]))
        return responses
"""
UPPER = """
def handle(data, context):
    return None if data is None else [bytes(*row.values()).decode().upper() for row in data]
"""


def write(repository: Path, name: str = "llm_model", versions: tuple[int, ...] = (1,), config: str = CONFIG) -> Path:
    for version in versions:
        (repository / name / str(version)).mkdir(parents=True)
        (repository / name / str(version) / "model.py").write_text(MODEL)
    if config:
        (repository / name / "config.pbtxt").write_text(config)
    return repository / name


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "model_repository"
    path.mkdir()
    write(path)
    return path


@pytest.fixture
def begin(
    tmp_path: Path, repository: Path, serving: Callable[..., Any], write_to: Callable[..., str]
) -> Iterator[Callable[..., Any]]:
    """`begin(*arguments)` starts a server on the repository, beside a store with the model `upper`."""
    store = tmp_path / "store"
    store.mkdir()
    write_to(store, "upper", UPPER)
    servers: list[Any] = []

    def start(*arguments: str, **settings: object) -> Any:
        more = ["--ncs", "--model-repository", str(repository), *arguments]
        servers.append(serving(tmp_path, store, dict(settings), more))
        return servers[-1].wait_started()

    yield start
    for server in servers:
        server.terminate()


@pytest.fixture(scope="module")
def kept(
    tmp_path_factory: pytest.TempPathFactory, serving: Callable[..., Any], write_to: Callable[..., str]
) -> Iterator[Any]:
    """One server in explicit mode, for calls that change nothing."""
    directory: Path = tmp_path_factory.mktemp("kept")
    for folder in ("store", "repository"):
        (directory / folder).mkdir()
    write_to(directory / "store", "upper", UPPER)
    write(directory / "repository")
    more = ["--ncs", "--model-repository", str(directory / "repository"), "--model-control-mode", "explicit"]
    with serving(directory, directory / "store", {"max_request_size": 100_000}, [*more, "--load-model", "*"]) as server:
        yield server


def ask(served: Any, text: str, version: str = "") -> str:
    data = text.encode()
    tensor = pb.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1, 1])
    request = pb.ModelInferRequest(
        model_name="llm_model",
        model_version=version,
        inputs=[tensor],
        raw_input_contents=[struct.pack("<I", len(data)) + data],
    )
    with grpc.insecure_channel(served.inference) as channel:
        answer = GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=GUARD_S)
    found: str = answer.raw_output_contents[0][4:].decode()
    return found


def call(served: Any, method: str, request: Any) -> Any:
    with grpc.insecure_channel(served.inference) as channel:
        return getattr(GRPCInferenceServiceStub(channel), method)(request, timeout=GUARD_S)


def post(served: Any, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{served.http}/v2/repository/{path}", json=body, timeout=GUARD_S)


def states(served: Any) -> dict[tuple[str, str], str]:
    return {(one["name"], one["version"]): one["state"] for one in post(served, "index").json()}


def test_everything_is_loaded_at_start(begin: Any) -> None:
    """Promises 001-17, 001-18."""
    served = begin()
    served.register("upper")
    assert ask(served, "hi") == "hi v1" and served.predict("upper", b"x") == b"X"
    assert states(served) == {("llm_model", "1"): "READY", ("upper", "1.0"): "READY"}
    metadata = httpx.get(f"{served.http}/v2/models/llm_model").json()
    assert metadata["inputs"] == [{"name": "text_input", "datatype": "BYTES", "shape": [-1, -1]}]
    config = httpx.get(f"{served.http}/v2/models/llm_model/config").json()
    assert (config["name"], config["backend"], config["max_batch_size"]) == ("llm_model", "python", 8)
    assert config["input"][0]["data_type"] == "TYPE_STRING" and config["input"][0]["dims"] == [-1]
    assert call(served, "ModelConfig", pb.ModelConfigRequest(name="llm_model")).config.max_batch_size == 8
    assert call(served, "ModelConfig", pb.ModelConfigRequest(name="upper")).config.backend == "python"
    refused = post(served, "models/llm_model/unload")
    assert refused.status_code == 400 and "--model-control-mode explicit" in refused.json()["error"]


def test_a_repository_needs_no_model_store(tmp_path: Path, repository: Path, serving: Callable[..., Any]) -> None:
    """Nor do broken models in it stop the others."""
    write(repository, "broken", config='name: "other"')
    with serving(tmp_path, None, {}, ["--ncs", "--model-repository", str(repository)]) as server:
        served = server.wait_started()
        assert ask(served, "hi") == "hi v1"
        assert states(served) == {("llm_model", "1"): "READY", ("broken", ""): "UNAVAILABLE"}
        assert "'other'" in next(one["reason"] for one in post(served, "index").json() if one["name"] == "broken")


def test_loading_and_unloading(begin: Any, repository: Path) -> None:
    """Promises 001-19, 001-20: by all three kinds of clients."""
    served = begin("--model-control-mode", "explicit")
    assert states(served) == {("llm_model", ""): ""}
    answer = call(served, "RepositoryModelLoad", pb.RepositoryModelLoadRequest(repository_name="llm_model"))
    assert (answer.model_name, answer.isLoaded) == ("llm_model", True)
    assert ask(served, "a") == "a v1"
    write(repository, versions=(2,), config="")
    assert post(served, "models/llm_model/load").json() == {"name": "llm_model", "load": True}
    assert ask(served, "a") == "a v2"
    assert states(served) == {("llm_model", "2"): "READY"}
    both = json.dumps({"version_policy": {"all": {}}, "max_batch_size": 8, "input": [], "output": []})
    assert post(served, "models/llm_model/load", parameters={"config": both}).status_code == 200
    assert (ask(served, "a", "1"), ask(served, "a", "2"), ask(served, "a")) == ("a v1", "a v2", "a v2")
    assert call(served, "RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="llm_model")).isUnloaded
    with pytest.raises(grpc.RpcError) as caught:
        ask(served, "a")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_kserves_message_loads_and_unloads(kept: Any) -> None:
    """Promises 001-19, 001-20. It has the model's name where Triton's has the repository's, and nothing else."""
    name = b"\n\x05upper"
    for verb in ("Load", "Unload"):
        with grpc.insecure_channel(kept.inference) as channel:
            method = channel.unary_unary(f"/inference.GRPCInferenceService/RepositoryModel{verb}")
            assert method(name, timeout=GUARD_S) == name + b"\x10\x01"
        assert (("upper", "1.0") in states(kept)) is (verb == "Load")


def test_archives_are_loaded_by_name_and_by_path(begin: Any, tmp_path: Path) -> None:
    served = begin("--model-control-mode", "explicit")
    assert post(served, "models/upper/load").status_code == 200
    assert served.predict("upper", b"x") == b"X"
    request = pb.RepositoryModelLoadRequest(model_name="second")
    request.parameters["model_path"].string_param = str(tmp_path / "store" / "upper")
    call(served, "RepositoryModelLoad", request)
    assert served.predict("second", b"y") == b"Y"
    request.parameters["model_path"].string_param = "/etc"
    with pytest.raises(grpc.RpcError) as caught:
        call(served, "RepositoryModelLoad", request)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "allowed_urls" in caught.value.details() and "whole URL file:///etc" in caught.value.details()
    answer = post(served, "models/second/load", parameters={"model_path": "https://127.0.0.1:1/m.mar"})
    assert answer.status_code == 400 and "forbidden to load from there. The key allowed_urls" in answer.json()["error"]
    request.parameters["model_path"].string_param = str(tmp_path / "store" / "absent")
    with pytest.raises(grpc.RpcError) as caught:
        call(served, "RepositoryModelLoad", request)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


WORDS = """
import numpy as np
import triton_python_backend_utils as pb_utils
from pathlib import Path

class TritonPythonModel:
    def execute(self, requests):
        text = (Path(__file__).parent / "words" / "said.txt").read_text()
        out = np.array([[text]], dtype=object)
        return [pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("text_output", out)]) for _ in requests]
"""
WORDS_CONFIG = """{"backend": "python", "max_batch_size": 8,
 "input": [{"name": "text_input", "data_type": "TYPE_STRING", "dims": [-1]}],
 "output": [{"name": "text_output", "data_type": "TYPE_STRING", "dims": [-1]}]}"""


def test_a_request_may_bring_the_model(begin: Any, repository: Path, tmp_path: Path) -> None:
    """By both protocols, in the place of the repository's, as long as nothing else is loaded."""
    served = begin("--model-control-mode", "explicit", "--load-model", "llm_model")
    request = pb.RepositoryModelLoadRequest(model_name="llm_model")
    request.parameters["config"].string_param = WORDS_CONFIG
    request.parameters["file:3/model.py"].bytes_param = WORDS.encode()
    request.parameters["file:3/words/said.txt"].bytes_param = b"by gRPC"
    call(served, "RepositoryModelLoad", request)
    assert ask(served, "hi") == "by gRPC" and states(served) == {("llm_model", "3"): "READY"}
    files = {"3/model.py": WORDS.encode(), "3/words/said.txt": b"by HTTP"}
    parameters = {f"file:{name}": base64.b64encode(content).decode() for name, content in files.items()}
    answer = post(served, "models/llm_model/load", parameters={"config": WORDS_CONFIG, **parameters})
    assert answer.status_code == 200, answer.text
    assert ask(served, "hi") == "by HTTP"
    request.parameters["file:3/model.py"].bytes_param = b"1 / 0"
    with pytest.raises(grpc.RpcError) as caught:
        call(served, "RepositoryModelLoad", request)
    assert "ZeroDivisionError" in caught.value.details() and ask(served, "hi") == "by HTTP"
    assert post(served, "models/llm_model/load").status_code == 200
    assert ask(served, "hi") == "hi v1"
    served.wait_for_log("Model llm_model 3 unregistered", 2)
    assert not list(tmp_path.glob("tmp/*/downloads/*")) and len(list(repository.glob("*/*"))) == 2


def test_files_that_are_too_large_are_refused_with_the_setting(kept: Any) -> None:
    request = pb.RepositoryModelLoadRequest(model_name="m")
    request.parameters["config"].string_param = WORDS_CONFIG
    request.parameters["file:1/model.py"].bytes_param = bytes(200_000)
    with pytest.raises(grpc.RpcError) as caught:
        call(kept, "RepositoryModelLoad", request)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than the limit of 100000 bytes (max_request_size)" in caught.value.details()
    answer = post(kept, "models/m/load", parameters={"config": WORDS_CONFIG, "file:1/model.py": "A" * 200_000})
    assert answer.status_code == 413 and "max_request_size" in answer.text


def test_a_model_comes_with_a_request_only_where_the_operator_says_so(
    tmp_path: Path, serving: Callable[..., Any], write_to: Callable[..., str]
) -> None:
    """Calls to load are allowed where there is no repository; those bring no code."""
    store = tmp_path / "store"
    store.mkdir()
    write_to(store, "upper", UPPER)
    with serving(tmp_path, store, {}, ["--ncs"]) as server:
        served = server.wait_started()
        assert post(served, "models/upper/load").status_code == 200
        files = {"config": WORDS_CONFIG, "file:1/model.py": "eA=="}
        answer = post(served, "models/upper/load", parameters=files)
        assert answer.status_code == 400 and "--model-control-mode explicit" in answer.json()["error"]
        assert served.predict("upper", b"x") == b"X"


def test_polling_follows_the_files(begin: Any, repository: Path) -> None:
    served = begin("--model-control-mode", "poll", "--repository-poll-secs", "0.2")
    assert ask(served, "a") == "a v1"
    write(repository, versions=(3,), config="")
    served.wait_for_log("Model llm_model 3 added")
    served.wait_for_log("Model llm_model 1 unregistered")
    assert ask(served, "a") == "a v3"
