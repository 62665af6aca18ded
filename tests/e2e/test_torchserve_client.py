"""A whole server under clients made from TorchServe's definitions, the client script, and the subcommands."""

from __future__ import annotations

import importlib
import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import pytest
from click.testing import CliRunner, Result
from google.protobuf import empty_pb2
from google.rpc import status_pb2
from grpc_tools import protoc

from ts_frontend.cli.commands import commands

CALL_S_MAX = 60
LOAD_THREADS = 4


def compile_protos(include: Path, prefix: str, out: Path) -> None:
    well_known = Path(protoc.__file__).parent / "_proto"
    googleapis = Path(status_pb2.__file__).parents[2]
    flags = [f"-I{include}", f"-I{well_known}", f"-I{googleapis}", f"--python_out={out}", f"--grpc_python_out={out}"]
    assert protoc.main(["protoc", *flags, f"{prefix}inference.proto", f"{prefix}management.proto"]) == 0


@pytest.fixture(scope="module")
def theirs(root: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Modules from TorchServe's definitions, in the process that has ours too."""
    out = tmp_path_factory.mktemp("stubs")
    compile_protos(root / "tests" / "data", "torchserve_protos/", out)
    sys.path.insert(0, str(out))
    try:
        names = ("inference_pb2", "inference_pb2_grpc", "management_pb2", "management_pb2_grpc")
        return SimpleNamespace(**{name: importlib.import_module(f"torchserve_protos.{name}") for name in names})
    finally:
        sys.path.remove(str(out))


class TheirClient:
    """Calls made with TorchServe's messages and stubs."""

    def __init__(self, theirs: SimpleNamespace, server: Any) -> None:
        self.server = server
        self.pb, self.mpb = theirs.inference_pb2, theirs.management_pb2
        self.channels = [grpc.insecure_channel(server.inference), grpc.insecure_channel(server.management)]
        self.inference = theirs.inference_pb2_grpc.InferenceAPIsServiceStub(self.channels[0])
        self.management = theirs.management_pb2_grpc.ManagementAPIsServiceStub(self.channels[1])

    def manage(self, method: str, request: str, **fields: Any) -> str:
        message = getattr(self.mpb, request)(**fields)
        return str(getattr(self.management, method)(message, timeout=CALL_S_MAX).msg)

    def describe(self, version: str = "") -> list[dict[str, Any]]:
        text = self.manage("DescribeModel", "DescribeModelRequest", model_name="probe", model_version=version)
        return list(json.loads(text))

    def request(self, value: object = None, version: str = "", sequence_id: str | None = None) -> Any:
        data = json.dumps(value or {"op": "echo"}).encode()
        return self.pb.PredictionsRequest(
            model_name="probe", model_version=version, input={"data": data}, sequence_id=sequence_id
        )

    def predict(self, value: object = None, version: str = "") -> bytes:
        return bytes(self.inference.Predictions(self.request(value, version), timeout=CALL_S_MAX).prediction)

    def close(self) -> None:
        for channel in self.channels:
            channel.close()


@pytest.fixture
def client(theirs: SimpleNamespace, start: Callable[..., Any]) -> Iterator[TheirClient]:
    made = TheirClient(theirs, start())
    yield made
    made.close()


@pytest.fixture
def guest(theirs: SimpleNamespace, shared: Any) -> Iterator[TheirClient]:
    """A client of the server that several tests share; `probe` is registered there."""
    made = TheirClient(theirs, shared)
    yield made
    made.close()


def status_of(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


class Load:
    """Threads that predict until told to stop; `outcomes` has one word for each request."""

    def __init__(self, client: TheirClient) -> None:
        self.client, self.running = client, True
        self.outcomes: list[str] = []
        self.threads = [threading.Thread(target=self.work) for _ in range(LOAD_THREADS)]

    def work(self) -> None:
        while self.running:
            try:
                self.outcomes.append(self.client.predict().decode())
            except grpc.RpcError as error:
                self.outcomes.append(f"{error.code()} {error.details()}")

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.running = False
        for thread in self.threads:
            thread.join(CALL_S_MAX)


def scale(client: TheirClient, count: int) -> str:
    return client.manage("ScaleWorker", "ScaleWorkerRequest", model_name="probe", min_worker=count, synchronous=True)


def test_a_models_life_under_load(client: TheirClient, write: Callable[..., str], probe_handler: Path) -> None:
    """register -> scale 1, 4, 1 -> describe -> two versions -> unregister, and no request is lost."""
    write("probe", probe_handler, version="2.0", directory="probe_2")
    register = {"url": "probe", "initial_workers": 1, "synchronous": True}
    answer = client.manage("RegisterModel", "RegisterModelRequest", **register)
    assert answer == 'Model "probe" Version: 1.0 registered with 1 initial workers'
    with Load(client) as load:
        assert scale(client, 4) == "Workers scaled to 4 for model: probe"
        assert len(client.describe()[0]["workers"]) == 4
        assert scale(client, 1) == "Workers scaled to 1 for model: probe"
        client.manage("RegisterModel", "RegisterModelRequest", **{**register, "url": "probe_2"})
        assert [found["modelVersion"] for found in client.describe("all")] == ["1.0", "2.0"]
        default = {"model_name": "probe", "model_version": "2.0"}
        client.manage("SetDefault", "SetDefaultRequest", **default)
        assert client.describe()[0]["modelVersion"] == "2.0"
        assert client.predict(version="1.0") == client.predict() == b"ok"
        removed = client.manage("UnregisterModel", "UnregisterModelRequest", model_name="probe", model_version="1.0")
        assert removed == 'Model "probe" unregistered'
    assert load.outcomes
    assert set(load.outcomes) == {"ok"}
    client.manage("UnregisterModel", "UnregisterModelRequest", model_name="probe")
    gone = (grpc.StatusCode.NOT_FOUND, "Model not found: probe. Models here: none.")
    assert status_of(client.predict) == gone


def test_ping(guest: TheirClient) -> None:
    answer = guest.inference.Ping(empty_pb2.Empty(), timeout=CALL_S_MAX)
    assert answer.health == '{\n  "status": "Healthy"\n}'


def test_streams(guest: TheirClient) -> None:
    ask = guest.request({"op": "stream", "count": 3})
    pieces = [answer.prediction for answer in guest.inference.StreamPredictions(ask, timeout=CALL_S_MAX)]
    assert pieces == [b"0 ", b"1 ", b"2 ", b"end"]
    plain = guest.inference.StreamPredictions(guest.request(), timeout=CALL_S_MAX)
    assert [answer.prediction for answer in plain] == [b"ok"]


def test_conversation(guest: TheirClient) -> None:
    lost = guest.request()
    lost.model_name = "nope"
    requests = [guest.request({"op": "echo", "value": "one"}, sequence_id="s"), lost, guest.request()]
    answers = list(guest.inference.StreamPredictions2(iter(requests), timeout=CALL_S_MAX))
    assert {answer.sequence_id: answer.prediction for answer in answers if answer.sequence_id} == {"s": b"one"}
    failures = [answer.status for answer in answers if answer.HasField("status")]
    assert [status.code for status in failures] == [5]
    assert failures[0].message.startswith("Model not found: nope. Models here: ") and "probe" in failures[0].message
    assert sorted(answer.prediction for answer in answers) == [b"", b"ok", b"one"]


def test_metadata_both_ways(client: TheirClient, write: Callable[..., str]) -> None:
    write(
        "headers",
        "def handle(data, context):\n"
        "    if data is None:\n        return\n"
        "    context.set_response_header(0, 'X-Answer', 'yes')\n"
        "    context.set_response_status(418, 'teapot', 0)\n"
        "    return [[context.get_request_id(0), context.get_request_header(0, 'x-meta'),"
        " context.get_all_request_header(0).get('data')]]\n",
    )
    client.manage("RegisterModel", "RegisterModelRequest", url="headers", initial_workers=1, synchronous=True)
    request = client.request()
    request.model_name = "headers"
    metadata = (("x-meta", "1"), ("x-request-id", "id-7"))
    answer, call = client.inference.Predictions.with_call(request, timeout=CALL_S_MAX, metadata=metadata)
    assert json.loads(answer.prediction) == ["id-7", "1", {"content-type": ""}]
    trailing = {entry.key: entry.value for entry in call.trailing_metadata()}
    assert (trailing["x-answer"], trailing["ts-response-status"]) == ("yes", "418")
    assert trailing["ts-response-phrase"] == "teapot"
    answer = httpx.get(f"{client.server.http}/predictions/headers", timeout=CALL_S_MAX)
    assert (answer.status_code, answer.headers["ts-response-phrase"]) == (418, "teapot")


# --- the script


def script(path: Path, server: Any, *words: str) -> subprocess.CompletedProcess[str]:
    address = server.inference if words[0].startswith("infer") else server.management
    host, _, port = address.partition(":")
    command = [sys.executable, str(path), *words, "--host", host, "--port", port]
    return subprocess.run(command, capture_output=True, text=True, timeout=CALL_S_MAX, check=False)


@pytest.mark.parametrize(
    "own_stubs", [False, pytest.param(True, marks=pytest.mark.long)], ids=["package", "stubs next to it"]
)
def test_the_client_script(root: Path, tmp_path: Path, start: Callable[..., Any], own_stubs: bool) -> None:
    path = tmp_path / "torchserve_grpc_client.py"
    shutil.copy(root / "ts_scripts" / path.name, path)
    if own_stubs:
        compile_protos(root / "tests" / "data" / "torchserve_protos", "", tmp_path)
    server = start()
    ask = tmp_path / "ask.json"
    ask.write_text('{"op": "stream", "count": 2}')
    missing = script(path, server, "infer", "probe", str(ask))
    assert (missing.returncode, "NOT_FOUND: Model not found: probe" in missing.stderr) == (1, True)
    registered = script(path, server, "register", "probe", "probe")
    assert registered.stdout == 'Model "probe" Version: 1.0 registered with 1 initial workers\n', registered.stderr
    assert script(path, server, "infer", "probe", str(ask)).stdout == "0 1 end\n"
    assert script(path, server, "infer_stream", "probe", str(ask)).stdout == "0 1 end\n"
    assert script(path, server, "unregister", "probe").stdout == 'Model "probe" unregistered\n'
    assert script(path, server, "infer", "probe", str(tmp_path / "none")).returncode == 2


def test_the_client_script_explains_itself(root: Path) -> None:
    command = [sys.executable, str(root / "ts_scripts" / "torchserve_grpc_client.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "infer_stream" in done.stdout


# --- the subcommands


def test_subcommands(start: Callable[..., Any], write: Callable[..., str], probe_handler: Path, tmp_path: Path) -> None:
    write("eager", probe_handler, config="minWorkers: 2\nmaxWorkers: 2\n")
    write("broken", "def initialize(context):\n    pass\n\nprint('before it broke')\nraise ValueError('bad weights')\n")
    server = start()
    env = {
        "TORCHSERVE_INFERENCE_PORT": str(server.port("grpc_inference")),
        "TORCHSERVE_MANAGEMENT_PORT": str(server.port("grpc_management")),
    }

    def run(*words: str, **more: Any) -> Result:
        return CliRunner().invoke(commands, words, env=env, **more)

    assert run("ping").output == "Healthy\n"
    assert run("list").output == "No model is registered.\n"
    assert run("register", "probe").stdout == "probe 1.0: 1 of 1 ready\n"
    assert run("register", "eager").stdout == "eager 1.0: 2 of 2 ready\n"
    assert run("scale", "probe", "2").stdout == "probe 1.0: 2 of 2 ready\n"
    assert run("scale", "probe", "1").stdout == "probe 1.0: 1 of 1 ready\n"
    assert [line.split()[0] for line in run("list").output.splitlines()] == ["MODEL", "eager", "probe"]
    assert "READY" in run("describe", "probe").output
    assert run("predict", "probe", "-", input=b"{}").stdout_bytes == b"ok"
    assert run("stream", "probe", "--input", 'data={"op": "stream", "count": 2}').output == "0 1 end"
    broken = run("register", "broken")
    assert (broken.exit_code, "bad weights" in broken.stderr) == (1, True), broken.output
    assert run("unregister", "probe").output == 'Model "probe" unregistered\n'
    assert run("predict", "probe", "-", input=b"{}").stderr == (
        "Error: NOT_FOUND: Model not found: probe. Models here: broken, eager.\n"
    )


def test_interrupting_a_stream_cancels_it(start: Callable[..., Any], tmp_path: Path) -> None:
    server = start()
    server.register("probe")
    left = tmp_path / "left"
    ask = json.dumps({"op": "stream_until_left", "left": str(left)})
    code = "import sys; from ts_frontend.cli.commands import commands; commands(sys.argv[1:])"
    ports = ["--inference-port", str(server.port("grpc_inference"))]
    command = [sys.executable, "-c", code, "stream", "probe", "--input", f"data={ask}", *ports]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1000)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=CALL_S_MAX)
    assert (process.returncode, errors) == (130, b"Error: Interrupted.\n")
    assert server.predict("probe", {"op": "echo"}) == b"ok"  # by the only worker, so the stream's handler is done
    assert left.exists()
