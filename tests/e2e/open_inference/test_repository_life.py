"""Models of a repository while other things happen: the server's end, TorchServe's management, files that vanish, loads
that meet, fail, or come while requests run."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from click.testing import CliRunner

from e2e.servers import text_of, text_request
from support import GUARD_S, until
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub
from ts_frontend.cli.commands import commands

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
        if (HERE / "broken").exists():
            raise ValueError("broken")

    def execute(self, requests):
        if (HERE / "run").exists():
            wait("run")
        out = np.array([[self.version]], dtype=object)
        return [pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("out", out)]) for _ in requests]
"""
UPPER = """
def handle(data, context):
    return None if data is None else [bytes(*row.values()).decode().upper() for row in data]
"""
#: The first worker does.
FIRST_WAITS = """
import pathlib, time

HERE = pathlib.Path(__file__).parent
try:
    (HERE / "began").touch(exist_ok=False)
    while (HERE / "wait").exists():
        time.sleep(0.02)
except FileExistsError:
    pass
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
        (directory / "store").mkdir()
        self._serving = serving
        self.servers: list[Any] = []

    def start(self, *arguments: str, mode: str = "explicit", remembers: bool = False, **settings: object) -> Any:
        store = self.directory / "store"
        more = ["--model-repository", str(self.repository), "--model-control-mode", mode, *arguments]
        more += [] if remembers else ["--ncs"]
        self.servers.append(self._serving(self.directory, store, {"drain_timeout_s": DRAIN_S, **settings}, more))
        return self.servers[-1].wait_started()


@pytest.fixture
def begun(tmp_path: Path, serving: Callable[..., Any]) -> Iterator[Begun]:
    found = Begun(tmp_path, serving)
    yield found
    for server in found.servers:
        server.terminate()


def request_for(model: str) -> pb.ModelInferRequest:
    return text_request(model, "a", "in")


def ask(served: Any, model: str) -> str:
    with grpc.insecure_channel(served.inference) as channel:
        return text_of(GRPCInferenceServiceStub(channel).ModelInfer(request_for(model), timeout=GUARD_S))


def load(served: Any, name: str, **parameters: str) -> httpx.Response:
    url = f"{served.http}/v2/repository/models/{name}/load"
    return httpx.post(url, json={"parameters": parameters}, timeout=GUARD_S)


def unload(served: Any, name: str) -> int:
    return httpx.post(f"{served.http}/v2/repository/models/{name}/unload", timeout=GUARD_S).status_code


def loaded(served: Any, name: str) -> int:
    return load(served, name).status_code


def ready(served: Any) -> set[tuple[str, str]]:
    found = httpx.post(f"{served.http}/v2/repository/index", json={"ready": True}, timeout=GUARD_S).json()
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


# --- the server's end


def test_the_servers_end_does_not_wait_for_a_model_that_loads(begun: Begun) -> None:
    """Neither for one that is new, nor for a reload; who asked for it is told."""
    write(begun.repository, "old", 1)
    served = begun.start("--load-model", "old")
    for name in ("old", "new"):
        if name == "new":
            write(begun.repository, name, 1)
        (begun.repository / name / "1" / "load").touch()
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(load, served, name) for name in ("old", "new")]
        for name in ("old", "new"):
            until((begun.repository / name / "1" / "load.began").exists)
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
        silent.settimeout(GUARD_S)
        connections = [silent.accept()[0] for _ in range(3)]
        assert served.terminate() == 0
        for connection in connections:
            connection.close()
        for answer in answers:
            assert answer.result().status_code >= 400
    assert not list((begun.directory / "store").iterdir())


# --- TorchServe's management of a repository's model


@pytest.fixture(scope="module")
def managed(tmp_path_factory: pytest.TempPathFactory, serving: Callable[..., Any]) -> Iterator[Begun]:
    """One server, for tests that have models of their own there."""
    found = Begun(tmp_path_factory.mktemp("managed"), serving)
    found.start()
    yield found
    for server in found.servers:
        server.terminate()


def test_torchserves_management_knows_a_repositorys_model(managed: Begun) -> None:
    """Over HTTP and gRPC: describe, list, scale, the default version, unregister; and then it can be loaded again."""
    (served,) = managed.servers
    path = write(managed.repository, "both", 1, 2)
    assert load(served, "both").status_code == 200
    described = httpx.get(f"{served.http_management}/models/both").json()[0]
    assert (described["modelVersion"], described["modelUrl"], described["minWorkers"]) == ("2", str(path), 1)
    listed = httpx.get(f"{served.http_management}/models").json()["models"]
    assert {"modelName": "both", "modelUrl": str(path)} in listed
    query = "min_worker=2&synchronous=true"
    scaled = httpx.put(f"{served.http_management}/models/both?{query}", timeout=GUARD_S)
    assert scaled.json() == {"status": "Workers scaled to 2 for model: both"} and len(served.worker_pids("both")) == 2
    served.scale("both", 1)
    assert len(served.worker_pids("both")) == 1 and ask(served, "both") == "2"
    httpx.put(f"{served.http_management}/models/both/1/set-default").raise_for_status()
    assert ask(served, "both") == "1"
    assert "unregistered" in served.unregister("both", "2")
    assert httpx.delete(f"{served.http_management}/models/both", timeout=GUARD_S).status_code == 200
    with pytest.raises(grpc.RpcError) as caught:
        ask(served, "both")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND and (path / "1" / "model.py").exists()
    assert unload(served, "both") == 200, "it is known, and not loaded"
    assert load(served, "both").status_code == 200 and ask(served, "both") == "2"


def test_commands_manage_a_repositorys_model(managed: Begun) -> None:
    (served,) = managed.servers
    write(managed.repository, "commanded", 1)
    assert load(served, "commanded").status_code == 200
    address = ["--inference-port", str(served.port("grpc_inference"))]
    address += ["--management-port", str(served.port("grpc_management"))]

    def run(name: str, *words: str) -> str:
        result = CliRunner().invoke(commands, [name, *address, *words])
        assert result.exit_code == 0, result.output
        return str(result.output)

    assert "commanded" in run("list")
    assert "READY" in run("describe", "commanded")
    run("scale", "commanded", "2")
    assert len(served.worker_pids("commanded")) == 2 and ask(served, "commanded") == "1"
    assert "commanded" in run("unregister", "commanded")
    assert (managed.repository / "commanded" / "1").exists() and unload(served, "commanded") == 200


def test_loading_through_both_apis_at_the_same_time(managed: Begun, write_to: Callable[..., str]) -> None:
    """Whoever comes first and last: every caller gets an answer, one model is served, and nothing is left behind."""
    (served,) = managed.servers
    write_to(managed.directory / "store", "pair", UPPER)
    before = set(served.processes())

    def register() -> int:
        asked = {"url": "pair", "initial_workers": "1"}
        return httpx.post(f"{served.http_management}/models", params=asked, timeout=GUARD_S).status_code

    with ThreadPoolExecutor(8) as pool:
        loads = [pool.submit(load, served, "pair") for _ in range(4)]
        registers = [pool.submit(register) for _ in range(4)]
        assert {one.result().status_code for one in loads} == {200}
        assert {one.result() for one in registers} <= {200, 409, 500}  # 500: a load was faster
    assert served.predict("pair", b"x") == b"X"
    assert httpx.get(f"{served.http_management}/models/pair/all").json()[0]["minWorkers"] == 1
    assert unload(served, "pair") == 200
    served.wait_for_log(
        "Model pair 1.0 unregistered",
        served.log.count("Model pair 1.0 added") + served.log.count("Model pair 1.0 replaced"),
    )
    assert set(served.processes()) <= before


def test_a_load_overtakes_a_registration(managed: Begun, write_to: Callable[..., str]) -> None:
    """Of a model that still starts; the caller who registered it is told."""
    (served,) = managed.servers
    folder = managed.directory / "store" / "overtaken"
    write_to(managed.directory / "store", "overtaken", FIRST_WAITS + UPPER)
    with ThreadPoolExecutor(1) as pool:
        (folder / "wait").touch()
        asked = {"url": "overtaken", "initial_workers": "1"}
        registering = pool.submit(httpx.post, f"{served.http_management}/models", params=asked, timeout=GUARD_S)
        until((folder / "began").exists)
        assert load(served, "overtaken").status_code == 200
        assert served.predict("overtaken", b"x") == b"X"
        answer = registering.result()
        assert answer.status_code == 500 and "was stopped before its model was loaded" in answer.json()["message"]
    assert served.predict("overtaken", b"x") == b"X" and unload(served, "overtaken") == 200
    served.wait_for_log("Model overtaken 1.0 unregistered", 2)
    assert "background work failed" not in served.log


def test_scaling_down_a_model_that_still_starts_is_no_error(managed: Begun, write_to: Callable[..., str]) -> None:
    (served,) = managed.servers
    folder = managed.directory / "store" / "withdrawn"
    write_to(managed.directory / "store", "withdrawn", FIRST_WAITS + UPPER)
    (folder / "wait").touch()
    served.register("withdrawn", initial_workers=1, synchronous=False)
    until((folder / "began").exists)
    served.scale("withdrawn", 0)
    failed = "Failed to start workers for model withdrawn version: 1.0"
    served.wait_for_log(failed)
    assert ["[INFO ]" in line for line in served.lines if failed in line] == [True]
    assert unload(served, "withdrawn") == 200


# --- files that vanish, requests that run


def test_files_that_vanish_while_they_are_loaded(managed: Begun) -> None:
    """The load names the missing files; the served version goes on."""
    (served,) = managed.servers
    path = write(managed.repository, "vanishing", 1)
    assert load(served, "vanishing").status_code == 200
    (path / "1" / "load").touch()
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load, served, "vanishing")
        until((path / "1" / "load.began").exists)
        shutil.rmtree(path)
        answer = loading.result()
    assert answer.status_code == 500 and "weights" in answer.json()["error"]
    assert ask(served, "vanishing") == "1"
    assert load(served, "vanishing").status_code == 404 and ask(served, "vanishing") == "1"
    assert unload(served, "vanishing") == 200


def test_unloading_lets_requests_end(managed: Begun) -> None:
    (served,) = managed.servers
    path = write(managed.repository, "running", 1)
    assert load(served, "running").status_code == 200
    (path / "1" / "run").touch()
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, served, "running") for _ in range(4)]
        until((path / "1" / "run.began").exists)
        until(lambda: served.describe("running")["jobQueueStatus"]["pendingRequests"] == 3)
        assert unload(served, "running") == 200
        with pytest.raises(grpc.RpcError) as caught:
            ask(served, "running")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        (path / "1" / "run").unlink()
        assert [one.result() for one in answers] == ["1"] * 4
    served.wait_for_log("Model running 1 unregistered")


# --- loads and unloads that meet or fail


def test_a_version_that_cannot_start_changes_nothing(begun: Begun) -> None:
    """Neither of a model that is served, nor of one that is not."""
    write(begun.repository, "m", 1)
    served = begun.start("--load-model", "m")
    before = workers(served)
    (pid,) = served.worker_pids("m")
    write(begun.repository, "n", 1, 2)
    shutil.copytree(begun.repository / "m" / "1", begun.repository / "m" / "2")
    for name in ("m", "n"):
        (begun.repository / name / "2" / "broken").touch()
        assert load(served, name).status_code == 500
    assert ready(served) == {("m", "1")} and served.worker_pids("m") == [pid]
    until(lambda: workers(served) == before, lambda: f"{workers(served)}, not {before}")


@pytest.mark.long
def test_reloads_lose_no_request(begun: Begun) -> None:
    write(begun.repository, "m", 1)
    served = begun.start("--load-model", "m")
    over = threading.Event()

    def hammer() -> int:
        count = 0
        with grpc.insecure_channel(served.inference) as channel:
            stub = GRPCInferenceServiceStub(channel)
            while not over.is_set():
                stub.ModelInfer(request_for("m"), timeout=GUARD_S)
                count += 1
        return count

    with ThreadPoolExecutor(4) as pool:
        counts = [pool.submit(hammer) for _ in range(4)]
        try:
            for _ in range(4):
                assert load(served, "m").status_code == 200
        finally:
            over.set()
        assert all(count.result() for count in counts)
    served.wait_for_log("Model m 1 unregistered", 4)
    assert len(served.worker_pids("m")) == 1


def test_loads_and_unloads_that_meet(begun: Begun) -> None:
    write(begun.repository, "m", 1)
    served = begun.start()
    before = workers(served)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda act: act(served, "m"), [loaded, unload] * 6))
    assert set(answers) <= {200, 404} and set(answers[::2]) == {200}
    unload(served, "m")
    with pytest.raises(grpc.RpcError) as caught:
        ask(served, "m")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    served.wait_for_log("Model m 1 unregistered", served.log.count("Model m 1 added"))
    assert not ready(served)
    until(
        lambda: workers(served) <= before | served.forkservers(),
        lambda: f"{workers(served)}, not {before}; only the process that others are forked from may be new",
    )


def test_a_slow_load_holds_up_its_own_model_alone(begun: Begun) -> None:
    """An unload that comes meanwhile takes effect after it."""
    (write(begun.repository, "slow", 1) / "1" / "load").touch()
    write(begun.repository, "m", 1)
    served = begun.start()
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(load, served, "slow")
        assert load(served, "m").status_code == 200 and ask(served, "m") == "1" and unload(served, "m") == 200
        gone = pool.submit(unload, served, "slow")
        (begun.repository / "slow" / "1" / "load").unlink()
        assert slow.result().status_code == 200 and gone.result() == 200
    assert not ready(served)


def test_polling_goes_on_whatever_it_meets(begun: Begun, tmp_path: Path) -> None:
    write(begun.repository, "m", 1)
    second = tmp_path / "second"
    second.mkdir()
    served = begun.start("--model-repository", str(second), "--repository-poll-secs", "0.1", mode="poll")
    second.rename(tmp_path / "away")
    served.wait_for_log("can't be read")
    assert ask(served, "m") == "1"
    (tmp_path / "away").rename(second)
    (second / "half").mkdir()
    served.wait_for_log("Model half could not be loaded")
    write(second, "m", 1)
    served.wait_for_log("Model m could not be loaded")
    write(second, "late", 1)
    served.wait_for_log("Model late 1 added")
    assert ask(served, "late") == "1" and ask(served, "m") == "1"
    assert served.log.count("Model m could not be loaded") == 1


def newest_snapshot(directory: Path) -> str:
    """The snapshot that a restart would read."""
    files = sorted((directory / "logs" / "config").glob("*.cfg"))
    return files[-1].read_text() if files else ""


def test_what_calls_loaded_and_unloaded_is_remembered(
    begun: Begun, write_to: Callable[..., str], tmp_path: Path
) -> None:
    write_to(tmp_path / "store", "upper", UPPER)
    served = begun.start(remembers=True)
    assert load(served, "upper").status_code == 200
    served.terminate()
    served = begun.start(remembers=True)
    assert listed(served) == ["upper"]
    assert unload(served, "upper") == 200
    served.wait_for_log("Model upper 1.0 unregistered")
    until(lambda: "upper" not in newest_snapshot(tmp_path), "it is written soon after, beside the calls")
    served.process.kill()
    served.wait()
    assert listed(begun.start(remembers=True)) == []
