"""Loads and unloads that meet, fail, or come while requests run."""

from __future__ import annotations

import shutil
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest

from support import GUARD_S, until
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub

MODEL = """
import pathlib, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.version = args["model_version"]
        wait = pathlib.Path(__file__).with_name("wait")
        while wait.exists():
            time.sleep(0.02)
        if pathlib.Path(__file__).with_name("broken").exists():
            raise ValueError("broken")

    def execute(self, requests):
        out = np.array([[self.version]], dtype=object)
        return [pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("out", out)]) for _ in requests]
"""
UPPER = """
def handle(data, context):
    return None if data is None else [bytes(*row.values()).decode().upper() for row in data]
"""
CONFIG = """
backend: "python"
max_batch_size: 8
input [ { name: "in" data_type: TYPE_STRING dims: [ -1 ] } ]
output [ { name: "out" data_type: TYPE_STRING dims: [ -1 ] } ]
version_policy { all {} }
"""


def write(repository: Path, name: str, *versions: int) -> Path:
    for version in versions:
        (repository / name / str(version)).mkdir(parents=True)
        (repository / name / str(version) / "model.py").write_text(MODEL)
    (repository / name / "config.pbtxt").write_text(CONFIG)
    return repository / name


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "model_repository"
    path.mkdir()
    return path


@pytest.fixture
def begin(
    tmp_path: Path, repository: Path, serving: Callable[..., Any], model_writer: Callable[..., str]
) -> Iterator[Callable[..., Any]]:
    """`begin(mode, *arguments)` starts a server on the repository, beside a store with the model `upper`."""
    store = tmp_path / "store"
    store.mkdir()
    model_writer(store, "upper", UPPER)
    servers: list[Any] = []

    def start(mode: str, *arguments: str) -> Any:
        more = ["--model-repository", str(repository), "--model-control-mode", mode, *arguments]
        servers.append(serving(tmp_path, store, {}, more))
        return servers[-1].wait_started()

    yield start
    for server in servers:
        server.terminate()


def request(model: str) -> pb.ModelInferRequest:
    tensor = pb.ModelInferRequest.InferInputTensor(name="in", datatype="BYTES", shape=[1, 1])
    return pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[struct.pack("<I", 1) + b"a"])


def ask(served: Any, model: str = "m") -> str:
    with grpc.insecure_channel(served.inference) as channel:
        answer = GRPCInferenceServiceStub(channel).ModelInfer(request(model), timeout=GUARD_S)
    found: str = answer.raw_output_contents[0][4:].decode()
    return found


def post(served: Any, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{served.http}/v2/repository/{path}", json=body, timeout=GUARD_S)


def load(served: Any, name: str = "m") -> int:
    return post(served, f"models/{name}/load").status_code


def unload(served: Any, name: str = "m") -> int:
    return post(served, f"models/{name}/unload").status_code


def ready(served: Any) -> set[tuple[str, str]]:
    found = post(served, "index", ready=True).json()
    return {(one["name"], one["version"]) for one in found}


def listed(served: Any) -> list[str]:
    """The served models, whether their workers are ready or not."""
    found: list[str] = httpx.get(f"{served.http}/v2/models").json()["models"]
    return found


def workers(served: Any) -> set[int]:
    """The processes of the server that run models."""
    found = set()
    for process in served.processes():
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.pid)
        except psutil.NoSuchProcess:
            pass
    return found


def test_a_version_that_cannot_start_changes_nothing(begin: Any, repository: Path) -> None:
    """Neither of a model that is served, nor of one that is not."""
    write(repository, "m", 1)
    served = begin("explicit", "--load-model", "m", "--ncs")
    before = workers(served)
    (pid,) = served.worker_pids("m")
    write(repository, "n", 1, 2)
    shutil.copytree(repository / "m" / "1", repository / "m" / "2")
    for name in ("m", "n"):
        (repository / name / "2" / "broken").touch()
        assert load(served, name) == 500
    assert ready(served) == {("m", "1")} and served.worker_pids("m") == [pid]
    until(lambda: workers(served) == before, lambda: f"{workers(served)}, not {before}")


@pytest.mark.long
def test_reloads_lose_no_request(begin: Any, repository: Path) -> None:
    write(repository, "m", 1)
    served = begin("explicit", "--load-model", "m", "--ncs")
    over = threading.Event()

    def hammer() -> int:
        count = 0
        with grpc.insecure_channel(served.inference) as channel:
            stub = GRPCInferenceServiceStub(channel)
            while not over.is_set():
                stub.ModelInfer(request("m"), timeout=GUARD_S)
                count += 1
        return count

    with ThreadPoolExecutor(4) as pool:
        counts = [pool.submit(hammer) for _ in range(4)]
        try:
            for _ in range(4):
                assert load(served) == 200
        finally:
            over.set()
        assert all(count.result() for count in counts)
    served.wait_for_log("Model m 1 unregistered", 4)
    assert len(served.worker_pids("m")) == 1


def test_loads_and_unloads_that_meet(begin: Any, repository: Path) -> None:
    write(repository, "m", 1)
    served = begin("explicit", "--ncs")
    before = workers(served)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda act: act(served), [load, unload] * 6))
    assert set(answers) <= {200, 404} and set(answers[::2]) == {200}
    unload(served)
    with pytest.raises(grpc.RpcError) as caught:
        ask(served)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    served.wait_for_log("Model m 1 unregistered", served.log.count("Model m 1 added"))
    assert not ready(served)
    until(
        lambda: workers(served) <= before | served.forkservers(),
        lambda: f"{workers(served)}, not {before}; only the process that others are forked from may be new",
    )


def test_a_slow_load_holds_up_its_own_model_alone(begin: Any, repository: Path) -> None:
    """An unload that comes meanwhile takes effect after it."""
    (write(repository, "slow", 1) / "1" / "wait").touch()
    write(repository, "m", 1)
    served = begin("explicit", "--ncs")
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(load, served, "slow")
        assert load(served) == 200 and ask(served) == "1" and unload(served) == 200
        gone = pool.submit(unload, served, "slow")
        (repository / "slow" / "1" / "wait").unlink()
        assert slow.result() == 200 and gone.result() == 200
    assert not ready(served)


def test_polling_goes_on_whatever_it_meets(begin: Any, repository: Path, tmp_path: Path) -> None:
    write(repository, "m", 1)
    second = tmp_path / "second"
    second.mkdir()
    served = begin("poll", "--model-repository", str(second), "--repository-poll-secs", "0.1", "--ncs")
    second.rename(tmp_path / "away")
    served.wait_for_log("can't be read")
    assert ask(served) == "1"
    (tmp_path / "away").rename(second)
    (second / "half").mkdir()
    served.wait_for_log("Model half could not be loaded")
    write(second, "m", 1)
    served.wait_for_log("Model m could not be loaded")
    write(second, "late", 1)
    served.wait_for_log("Model late 1 added")
    assert ask(served, "late") == "1" and ask(served) == "1"
    assert served.log.count("Model m could not be loaded") == 1


def newest_snapshot(directory: Path) -> str:
    """The snapshot that a restart would read."""
    files = sorted((directory / "logs" / "config").glob("*.cfg"))
    return files[-1].read_text() if files else ""


def test_what_calls_loaded_and_unloaded_is_remembered(begin: Any, repository: Path, tmp_path: Path) -> None:
    served = begin("explicit")
    assert load(served, "upper") == 200
    served.terminate()
    served = begin("explicit")
    assert listed(served) == ["upper"]
    assert unload(served, "upper") == 200
    served.wait_for_log("Model upper 1.0 unregistered")
    until(lambda: "upper" not in newest_snapshot(tmp_path), "it is written soon after, beside the calls")
    served.process.kill()
    served.wait()
    assert listed(begin("explicit")) == []
