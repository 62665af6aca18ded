"""Models of a repository while other things happen: the server's end, TorchServe's management, files that vanish."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from ts.protocol import open_inference_pb2 as pb
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub

GUARD_S = 60
#: Longer than any test waits: who ends sooner didn't wait for it.
DRAIN_S = 10 * GUARD_S
MODEL = """
import pathlib, time
import numpy as np
import triton_python_backend_utils as pb_utils

HERE = pathlib.Path(__file__).parent

def wait(name):
    (HERE / f"{name}.began").touch()
    while (HERE / name).exists():
        time.sleep(0.02)

class TritonPythonModel:
    def initialize(self, args):
        self.version = args["model_version"]
        if (HERE / "load").exists():
            wait("load")
            (HERE / "weights").read_text()

    def execute(self, requests):
        if (HERE / "run").exists():
            wait("run")
        out = np.array([[self.version]], dtype=object)
        return [pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("out", out)]) for _ in requests]
"""
CONFIG = """
backend: "python"
input [ { name: "in" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "out" data_type: TYPE_STRING dims: [ 1, 1 ] } ]
version_policy { all {} }
"""


def write(repository: Path, name: str, *versions: int) -> Path:
    for version in versions:
        (repository / name / str(version)).mkdir(parents=True)
        (repository / name / str(version) / "model.py").write_text(MODEL)
        (repository / name / str(version) / "weights").touch()
    (repository / name / "config.pbtxt").write_text(CONFIG)
    return repository / name


class Begun:
    def __init__(self, directory: Path, serving: Callable[..., Any]) -> None:
        self.directory, self.repository = directory, directory / "model_repository"
        self.repository.mkdir()
        self._serving = serving
        self.servers: list[Any] = []

    def start(self, *arguments: str, **settings: object) -> Any:
        store = self.directory / "store"
        store.mkdir(exist_ok=True)
        more = ["--ncs", "--model-repository", str(self.repository), "--model-control-mode", "explicit", *arguments]
        self.servers.append(self._serving(self.directory, store, {"drain_timeout_s": DRAIN_S, **settings}, more))
        return self.servers[-1].wait_started()


@pytest.fixture
def begun(tmp_path: Path, serving: Callable[..., Any]) -> Iterator[Begun]:
    found = Begun(tmp_path, serving)
    yield found
    for server in found.servers:
        server.terminate()


def ask(served: Any, model: str, version: str = "") -> str:
    tensor = pb.ModelInferRequest.InferInputTensor(name="in", datatype="BYTES", shape=[1])
    content = struct.pack("<I", 1) + b"a"
    request = pb.ModelInferRequest(
        model_name=model, model_version=version, inputs=[tensor], raw_input_contents=[content]
    )
    with grpc.insecure_channel(served.inference) as channel:
        answer = GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=GUARD_S)
    found: str = answer.raw_output_contents[0][4:].decode()
    return found


def load(served: Any, name: str, **parameters: str) -> httpx.Response:
    url = f"{served.http}/v2/repository/models/{name}/load"
    return httpx.post(url, json={"parameters": parameters}, timeout=GUARD_S)


def unload(served: Any, name: str) -> int:
    return httpx.post(f"{served.http}/v2/repository/models/{name}/unload", timeout=GUARD_S).status_code


def until(file: Path) -> None:
    """Returns when the file is there."""
    over = threading.Event()
    for _ in range(GUARD_S * 50):
        if file.exists() or over.wait(0.02):
            return
    raise AssertionError(f"{file} did not come")


# --- the server's end


def test_the_servers_end_does_not_wait_for_a_model_that_loads(begun: Begun) -> None:
    """Neither for one that is new, nor for a reload; who asked for it is told."""
    served = begun.start("--load-model", "old") if write(begun.repository, "old", 1) else None
    for name in ("old", "new"):
        if name == "new":
            write(begun.repository, name, 1)
        (begun.repository / name / "1" / "load").touch()
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(load, served, name) for name in ("old", "new")]
        for name in ("old", "new"):
            until(begun.repository / name / "1" / "load.began")
        assert served.terminate() == 0
        for answer in answers:
            assert answer.result().status_code == 503 and "server" in answer.result().text
    assert not list((begun.directory / "tmp").glob("*/downloads"))


def test_the_servers_end_does_not_wait_for_a_download(begun: Begun) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(3) as pool:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        account = {"AWS_ACCESS_KEY_ID": "who", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_ENDPOINT_URL": address}
        served = begun.start(allowed_urls=r"s3://.*,http://127\\.0\\.0\\.1:.*", env=account)
        urls = ("s3://models/m.mar", f"{address}/m.mar")
        answers = [pool.submit(load, served, "m", model_path=url) for url in urls[:1]]
        answers.append(pool.submit(load, served, "n", model_path=urls[1]))
        asked = {"url": f"{address}/registered.mar"}
        answers.append(pool.submit(httpx.post, f"{served.http_management}/models", params=asked, timeout=GUARD_S))
        connections = [silent.accept()[0] for _ in range(3)]
        assert served.terminate() == 0
        for connection in connections:
            connection.close()
        for answer in answers:
            assert answer.result().status_code >= 400
    assert not list((begun.directory / "store").iterdir())
