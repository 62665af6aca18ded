"""A model that can't be loaded: every protocol says so at once and why, until it can be loaded."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.duration_pb2 import Duration

from support import GUARD_S, until
from ts.protocol.open_inference_pb2 import ModelInferRequest
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub
from ts_frontend.protos.google_rpc_status_pb2 import Status
from ts_frontend.protos.inference_pb2 import PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub

#: An answer that nobody waits for comes in milliseconds; the model's queue would hold it for two minutes.
AT_ONCE_S = 20
HANDLER = """
import pathlib
if not pathlib.Path({flag!r}).exists():
    raise ValueError("the weights are of another model")

def handle(data, context):
    return ["served"] * len(data or ())
"""
CAUSE = "ValueError: the weights are of another model"


@pytest.fixture(scope="module")
def flag_and_server(
    tmp_path_factory: pytest.TempPathFactory,
    serving: Callable[..., Any],
    write_to: Callable[..., str],
) -> Iterator[tuple[Path, Any]]:
    directory = tmp_path_factory.mktemp("failing")
    store, flag = directory / "store", directory / "flag"
    store.mkdir()
    write_to(store, "m", HANDLER.format(flag=str(flag)))
    with serving(directory, store, {}, ["--ncs"]) as server:
        server.register("m", initial_workers=2, synchronous=False)
        deadline_s = time.monotonic() + GUARD_S
        while "loadFailure" not in server.describe("m"):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        yield flag, server


@pytest.fixture
def server(flag_and_server: tuple[Path, Any]) -> Any:
    flag_and_server[0].unlink(missing_ok=True)
    return flag_and_server[1]


def refused(call: Callable[[], Any]) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as refusal:
        call()
    return refusal.value


@pytest.mark.parametrize("method", ["Predictions", "StreamPredictions", "ModelInfer"])
def test_grpc_calls_end_unavailable_with_the_cause_and_when_to_try_again(server: Any, method: str) -> None:
    with grpc.insecure_channel(server.inference) as channel:
        if method == "ModelInfer":
            error = refused(
                lambda: GRPCInferenceServiceStub(channel).ModelInfer(
                    ModelInferRequest(model_name="m"), timeout=AT_ONCE_S
                )
            )
        else:
            call = getattr(InferenceAPIsServiceStub(channel), method)
            request = PredictionsRequest(model_name="m", input={"data": b"x"})
            error = refused(lambda: list(call(request, timeout=AT_ONCE_S)))
    assert error.code() is grpc.StatusCode.UNAVAILABLE and CAUSE in error.details()
    (details,) = (value for key, value in error.trailing_metadata() if key == "grpc-status-details-bin")
    status = Status.FromString(details)
    assert (status.code, status.message) == (14, error.details())
    (info,) = status.details
    assert info.type_url == "type.googleapis.com/google.rpc.RetryInfo"
    assert info.value[:1] == b"\n" and 1 <= Duration.FromString(info.value[2:]).seconds <= 30


def test_a_stream_of_tensor_requests_carries_the_cause(server: Any) -> None:
    with grpc.insecure_channel(server.inference) as channel:
        stub = GRPCInferenceServiceStub(channel)
        said = ""
        try:
            for answer in stub.ModelStreamInfer(iter([ModelInferRequest(model_name="m")]), timeout=AT_ONCE_S):
                said += answer.error_message
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            said += error.details()
    assert CAUSE in said


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/predictions/m", {"x": 1}),
        ("/v1/models/m:predict", {"instances": [1]}),
        ("/v2/models/m/infer", {"inputs": [{"name": "a", "shape": [1], "datatype": "INT32", "data": [1]}]}),
        ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "hi"}]}),
        ("/invocations?model_name=m", {"x": 1}),
    ],
)
def test_http_requests_are_answered_503_with_the_cause_and_retry_after(server: Any, path: str, body: object) -> None:
    answer = httpx.post(server.http + path, json=body, timeout=AT_ONCE_S)
    assert answer.status_code == 503 and CAUSE in answer.text
    assert 1 <= int(answer.headers["retry-after"]) <= 30


def test_readiness_health_and_descriptions_tell_it(server: Any, torchserve: Any) -> None:
    assert server.describe("m")["loadFailure"] == CAUSE
    assert httpx.get(f"{server.http}/v2/models/m/ready", timeout=GUARD_S).status_code != 200
    assert httpx.get(f"{server.http}/ping", timeout=GUARD_S).status_code == 500
    ports = ["--inference-port", server.inference.split(":")[1], "--management-port", server.management.split(":")[1]]
    assert f"failed: {CAUSE}" in torchserve("list", *ports, code=0).stdout
    listed = torchserve("list", *ports, "--json", code=0).stdout
    assert json.loads(listed)["models"][0]["state"] == f"failed: {CAUSE}"


def test_scaling_it_fails_with_the_cause_and_its_traceback_is_logged_once(server: Any) -> None:
    for _ in range(2):
        answer = httpx.put(
            f"{server.http_management}/models/m", params={"min_worker": 2, "synchronous": "true"}, timeout=GUARD_S
        )
        assert answer.status_code == 500 and CAUSE in answer.json()["message"]
    error = refused(lambda: server.scale("m", 2))
    assert error.code() is grpc.StatusCode.INTERNAL and CAUSE in error.details()
    server.wait_for_log("with the same traceback as before", 3)
    assert sum(line.endswith(CAUSE) and "MODEL_LOG" in line for line in server.lines) == 1


def test_once_it_can_be_loaded_it_serves(flag_and_server: tuple[Path, Any]) -> None:
    flag, server = flag_and_server
    flag.touch()
    assert server.scale("m", 2).startswith("Workers scaled to 2")
    assert server.predict("m", "x") == b"served"
    assert "loadFailure" not in server.describe("m")
    assert httpx.get(f"{server.http}/ping", timeout=GUARD_S).status_code == 200


# --- the same of other systems' models, of which one server has one of each

KSERVED = """
import pathlib
from kserve import Model, ModelServer

class M(Model):
    def load(self):
        known = pathlib.Path(__file__).with_name("known")
        if known.exists():  # not when the server asks the program for its models
            raise ValueError("the weights are of another model")
        known.touch()
        self.ready = True

    def predict(self, payload, headers=None):
        return payload

if __name__ == "__main__":
    model = M("kserved")
    model.load()
    ModelServer().start([model])
"""
AISSEMBLED = """
from aissemble_open_inference_protocol_kserve.aissemble_oip_kserve import AissembleOIPKServe
from aissemble_open_inference_protocol_shared.handlers.dataplane import DataplaneHandler

class Handler(DataplaneHandler):
    def infer(self, payload, model_name, model_version=None):
        return None

    def model_load(self, model_name):
        return False

if __name__ == "__main__":
    service = AissembleOIPKServe(name="aissembled", model_handler=Handler())
    service.load()
    service.start_server()
"""
RUNTIME = """
from mlserver import MLModel

class Raising(MLModel):
    async def load(self):
        raise ValueError("the weights are of another model")

class Unready(MLModel):
    async def load(self):
        return False
"""
TRITON = """
import pathlib

class TritonPythonModel:
    def initialize(self, args):
        if pathlib.Path({flag!r}).exists():  # a repository takes no model that can't be loaded at first
            raise ValueError("the weights are of another model")

    def execute(self, requests):
        return []
"""
CONFIG = """backend: "python"
max_batch_size: 0
input [{name: "a", data_type: TYPE_INT32, dims: [1]}]
output [{name: "b", data_type: TYPE_INT32, dims: [1]}]
"""
OTHERS = {
    "kserved": CAUSE,
    "aissembled": "model_load('aissembled') of its handler returned False",
    "raising": CAUSE,
    "unready": "load() returned False",
    "triton": CAUSE,
}


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory, serving: Callable[..., Any]) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("others")
    store, repository = directory / "store", directory / "repository"
    files = {
        store / "kserved" / "main.py": KSERVED,
        store / "aissembled" / "main.py": AISSEMBLED,
        store / "raising" / "model-settings.json": '{"implementation": "rt.Raising"}',
        store / "unready" / "model-settings.json": '{"implementation": "rt.Unready"}',
        store / "rt.py": RUNTIME,
        repository / "triton" / "1" / "model.py": TRITON.format(flag=str(directory / "flag")),
        repository / "triton" / "config.pbtxt": CONFIG,
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    words = ["--ncs", "--models", "kserved,aissembled,raising,unready", "--model-repository", str(repository)]
    with serving(directory, store, {"default_workers_per_model": 1}, words) as server:
        (pid,) = until(lambda: server.worker_pids("triton"))
        (directory / "flag").touch()
        os.kill(pid, signal.SIGKILL)
        until(lambda: all("loadFailure" in server.describe(name) for name in OTHERS), lambda: server.log)
        yield server


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "triton" else pytest.mark.long) for name in OTHERS]
)
def test_models_of_other_systems_that_cannot_be_loaded_are_refused_at_once_with_the_cause(
    others: Any, name: str
) -> None:
    tensor = {"name": "a", "shape": [1], "datatype": "INT32", "data": [1]}
    answer = httpx.post(f"{others.http}/v2/models/{name}/infer", json={"inputs": [tensor]}, timeout=AT_ONCE_S)
    assert answer.status_code == 503 and OTHERS[name] in answer.text, answer.text
    with grpc.insecure_channel(others.inference) as channel:
        request = ModelInferRequest(model_name=name)
        request.inputs.add(name="a", datatype="INT32", shape=[1]).contents.int_contents.append(1)
        error = refused(lambda: GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=AT_ONCE_S))
    assert error.code() is grpc.StatusCode.UNAVAILABLE and OTHERS[name] in error.details()
    assert httpx.get(f"{others.http}/v2/models/{name}/ready", timeout=GUARD_S).status_code != 200


def test_a_worker_that_is_killed_while_a_registration_loads_is_replaced(
    start: Callable[..., Any], write: Callable[..., str], tmp_path: Path
) -> None:
    """The registration fails with the second one."""
    killing = "import os, pathlib, signal\nflag = pathlib.Path({flag!r})\nif {often} or not flag.exists():\n"
    killing += "    flag.touch()\n    os.kill(os.getpid(), signal.SIGKILL)\n\ndef handle(data, context):\n"
    killing += "    return ['served'] * len(data or ())\n"
    write("once", killing.format(flag=str(tmp_path / "killed"), often=False))
    write("always", killing.format(flag=str(tmp_path / "killed_too"), often=True))
    server = start()
    server.register("once")
    assert server.predict("once", "x") == b"served"
    error = refused(lambda: server.register("always"))
    assert "killed by SIGKILL (out of memory?)" in error.details()
    assert refused(lambda: server.describe("always")).code() is grpc.StatusCode.NOT_FOUND
