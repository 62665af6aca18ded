"""The command lines of KServe's runtimes, with `torchserve` in place of their programs and free ports in place of
theirs; and the effect of further options of Triton on a running server."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from support import GUARD_S, free_port
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub

PROGRAMS = Path(__file__).parents[1] / "data" / "programs"
MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.ones(1, "f4"))]) for request in requests]
"""
CONFIG = """
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
UPPER = """
def handle(data, context):
    return None if data is None else [bytes(*row.values()).decode().upper() for row in data]
"""
BROKEN = """
def initialize(context):
    raise RuntimeError("no weights")

def handle(data, context):
    raise RuntimeError("no weights")
"""


@pytest.fixture
def begin(tmp_path: Path, serving: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """`begin(*words, **settings)` starts a server without a store."""
    servers: list[Any] = []

    def start(*words: str, **settings: object) -> Any:
        servers.append(serving(tmp_path, None, {"default_workers_per_model": 1} | settings, ["--ncs", *words]))
        return servers[-1]

    yield start
    for server in servers:
        server.terminate()


def ready(port: int, model: str) -> int:
    return httpx.get(f"http://127.0.0.1:{port}/v2/models/{model}/ready", timeout=GUARD_S).status_code


def triton_repository(folder: Path) -> Path:
    (folder / "ones" / "1").mkdir(parents=True)
    (folder / "ones" / "1" / "model.py").write_text(MODEL)
    (folder / "ones" / "config.pbtxt").write_text(CONFIG)
    return folder


def test_tritons(begin: Callable[..., Any], tmp_path: Path) -> None:
    """`tritonserver --model-store=/mnt/models --grpc-port=9000 --http-port=8080 --allow-grpc=true --allow-http=true`,
    for everybody with `--kserve-mode`. Promise 001-16."""
    models, http, grpc_port = triton_repository(tmp_path / "models"), free_port(), free_port()
    server = begin(
        f"--model-store={models}",
        f"--grpc-port={grpc_port}",
        f"--http-port={http}",
        "--allow-grpc=true",
        "--allow-http=true",
        "--kserve-mode",
        "--id=mine",
    ).wait_started()
    assert f"grpc_inference listens on 0.0.0.0:{grpc_port}" in server.log
    assert ready(http, "ones") == 200
    body = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [3.0]}]}
    answer = httpx.post(f"http://127.0.0.1:{http}/v2/models/ones/infer", json=body, timeout=GUARD_S).json()
    assert answer["outputs"][0]["data"] == [1.0]
    assert httpx.get(f"http://127.0.0.1:{http}/v2").json()["name"] == "mine"
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        stub = GRPCInferenceServiceStub(channel)
        assert stub.ServerMetadata(pb.ServerMetadataRequest(), timeout=GUARD_S).name == "mine"


@pytest.mark.parametrize("form", ["archive", "unpacked", "program"])
def test_sklearnservers(form: str, begin: Callable[..., Any], tmp_path: Path, write_to: Callable[..., str]) -> None:
    """`--model_name={{.Name}} --model_dir=/mnt/models --http_port=8080`: the folder is the model's."""
    folder, http = tmp_path / "models", free_port()
    folder.mkdir()
    if form == "program":
        shutil.copy(PROGRAMS / "aissemble_readme.txt", folder / "main.py")
    else:
        write_to(folder, "inner", UPPER)
        if form == "unpacked":
            for one in (folder / "inner").iterdir():
                one.rename(folder / one.name)
            (folder / "inner").rmdir()
    server = begin("--model_name=mine", f"--model_dir={folder}", f"--http_port={http}").wait_started()
    server.wait_for_log("of mine_1.0 is ready")
    assert ready(http, "mine") == 200
    if form != "program":
        assert httpx.post(f"http://127.0.0.1:{http}/predictions/mine", content="a", timeout=GUARD_S).text == "A"


def test_torchserves(begin: Callable[..., Any], tmp_path: Path, write_to: Callable[..., str]) -> None:
    """`torchserve --start --model-store=/mnt/models/model-store --ts-config=/mnt/models/config/config.properties`, with
    a config.properties as KServe's pages have it, its models in a snapshot, and the runtime's environment."""
    store = tmp_path / "model-store"
    store.mkdir()
    write_to(store, "mine", "def handle(data, context):\n    return [str(row).upper() for row in data or ()]\n")
    snapshot = (
        '{"name":"startup.cfg","modelCount":1,"models":{"mine":{"1.0":{"defaultVersion":true,"marName":"mine",'
        '"minWorkers":1,"maxWorkers":5,"batchSize":1,"maxBatchDelay":10,"responseTimeout":120}}}}'
    )
    server = begin(
        f"--model-store={store}",
        enable_envvars_config="true",
        install_py_dep_per_model="true",
        enable_metrics_api="true",
        metrics_mode="prometheus",
        NUM_WORKERS=1,
        number_of_netty_threads=4,
        job_queue_size=10,
        model_snapshot=snapshot,
        env={"TS_SERVICE_ENVELOPE": "kserve"},
    ).wait_started()
    server.wait_for_log("of mine_1.0 is ready")
    answer = httpx.post(f"{server.http}/v1/models/mine:predict", json={"instances": ["a"]}, timeout=GUARD_S)
    assert answer.json() == {"predictions": ["A"]}


def test_without_http(begin: Callable[..., Any], tmp_path: Path) -> None:
    models = triton_repository(tmp_path / "models")
    server = begin("--model-repository", str(models), "--allow-http=false", "--allow-metrics=false").wait_started()
    assert "http_inference" not in server.log and "http_metrics" not in server.log
    with grpc.insecure_channel(server.inference) as channel:
        assert GRPCInferenceServiceStub(channel).ModelReady(pb.ModelReadyRequest(name="ones"), timeout=GUARD_S).ready


def test_models_that_cannot_be_loaded(begin: Callable[..., Any], tmp_path: Path, write_to: Callable[..., str]) -> None:
    """Others are served without them, unless nothing is to be; whether the server is ready then, the operator says."""
    store = tmp_path / "store"
    store.mkdir()
    write_to(store, "broken", BROKEN, config="maxRetryTimeoutInSec: 1\n")
    words = ("--model-store", str(store), "--models", "broken")
    server = begin(*words, "--exit-on-error=true")
    assert server.wait() == 1
    assert "no weights" in server.log and "exit_on_error is on" in server.log
    server = begin(*words, "missing", "--exit-on-error")
    assert server.wait() == 1
    assert "Failed to load model: missing" in server.log
    server = begin(*words, "--strict-readiness=false").wait_started()
    server.wait_for_log("no weights")
    assert httpx.get(f"{server.http}/v2/health/ready", timeout=GUARD_S).status_code == 200
    assert httpx.get(f"{server.http}/v2/models/broken/ready", timeout=GUARD_S).status_code != 200
