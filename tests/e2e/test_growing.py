"""Servers whose models get as many workers as their load needs: more than one, or none."""

from __future__ import annotations

import io
import json
import os
import random
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest

from e2e.servers import Serving
from support import GUARD_S, until
from ts_frontend.protos.inference_pb2 import PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub
from ts_frontend.workers.memory import proportional_bytes

#: A request runs until the file that it names is there.
GATED = """
import os, time

def handle(data, context):
    if data is None:
        return None
    for row in data:
        while not os.path.exists(bytes(row.get("data") or row.get("body")).decode()):
            time.sleep(0.005)
    return [str(os.getpid())] * len(data)
"""
AUTOSCALED = "minWorkers: 1\nmaxWorkers: 3\nautoscale: {targetQueue: 0, upAfter: 0.2, downAfter: 1}\n"


@pytest.fixture(scope="module")
def server(server_of: Callable[..., AbstractContextManager[Any]]) -> Iterator[Any]:
    with server_of({"busy": (GATED, AUTOSCALED)}, metrics_mode="prometheus") as running:
        yield running


def test_requests_that_wait_bring_workers_and_quiet_ends_them(server: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    assert len(server.worker_pids("busy")) == 1
    assert server.describe("busy")["autoscale"]["active"] is True
    with ThreadPoolExecutor(9) as clients:
        answers = [clients.submit(server.predict, "busy", bytes(gate)) for _ in range(9)]
        until(lambda: len(server.worker_pids("busy")) == 3, "the most")
        gate.write_text("")
        assert len({answer.result(GUARD_S) for answer in answers}) > 1, "the new workers had a part in it"
    until(lambda: len(server.worker_pids("busy")) == 1, "the least")
    said = server.describe("busy")
    assert (said["minWorkers"], said["maxWorkers"]) == (1, 3)
    assert said["autoscale"]["lastDecision"]["to"] == 1
    assert "were busy in 1 s" in said["autoscale"]["lastDecision"]["reason"]
    http = httpx.get(f"{server.http_management}/models/busy").json()[0]
    assert http["autoscale"]["lastDecision"]["to"] == 1
    text = server.scraped()
    assert 'direction="up"' in text and "ts_wanted_workers{" in text


#: Some memory of the model's own.
HEAVY = """
import os

class Heavy:
    def initialize(self, context):
        self.weights = os.urandom(1 << 20) * 64

    def handle(self, data, context):
        return [context.manifest["model"]["modelName"]] * len(data)
"""
NAMES = [f"heavy{number}" for number in range(6)]
MIB = 1 << 20


@pytest.fixture(scope="module")
def on_demand(server_of: Callable[..., AbstractContextManager[Any]]) -> Iterator[Any]:
    """Six models of more than 64 MiB, of which two fit."""
    models = dict.fromkeys(NAMES, (HEAVY, "modelMemory: 100MiB\n"))
    with server_of(
        models, load_on_demand="true", model_memory_max=str(240 * MIB), metrics_mode="prometheus"
    ) as running:
        yield running


def test_six_models_of_which_two_fit_answer_all_requests(on_demand: Any) -> None:
    """Some of them from several clients at a time. No process is there before the first request."""
    server = on_demand
    assert [server.describe(name)["workers"] for name in NAMES] == [[]] * 6
    listed = httpx.get(f"{server.http_management}/models").json()["models"]
    assert {one["modelName"]: one["state"] for one in listed} == dict.fromkeys(NAMES, "known")
    most, over = 0, threading.Event()
    before = set(server.processes())  # the forkservers

    def look() -> None:
        nonlocal most
        while not over.wait(0.05):
            workers = set(server.processes()) - before
            most = max(most, sum(proportional_bytes(one.pid) for one in workers))

    watcher = threading.Thread(target=look)
    watcher.start()
    chance = random.Random(3)
    try:
        with ThreadPoolExecutor(4) as clients:
            asked = [chance.choice(NAMES) for _ in range(24)]
            answers = [(name, clients.submit(server.predict, name, b"x")) for name in asked]
            for name, answer in answers:
                assert answer.result(GUARD_S).decode() == name
    finally:
        over.set()
        watcher.join(GUARD_S)
    assert 64 * MIB < most <= 240 * MIB
    states = [server.describe(name)["loadOnDemand"]["state"] for name in NAMES]
    assert 1 <= states.count("warm") <= 2


def test_the_answer_of_a_cold_request_says_how_long_the_load_took(on_demand: Any) -> None:
    server = on_demand
    for name in NAMES[:3]:  # two fit
        server.predict(name, b"x")
    cold = next(one for one in NAMES if server.describe(one)["loadOnDemand"]["state"] == "known")
    answer = httpx.post(f"{server.http}/predictions/{cold}", content=b"x", timeout=GUARD_S)
    assert answer.text == cold and int(answer.headers["x-cold-start-ms"]) > 0
    again = httpx.post(f"{server.http}/predictions/{cold}", content=b"x", timeout=GUARD_S)
    assert "x-cold-start-ms" not in again.headers

    def reasons() -> dict[str, tuple[str, str]]:
        index = httpx.post(f"{server.http}/v2/repository/index", json={}).json()
        return {one["name"]: (one["state"], one.get("reason", "")) for one in index}

    # The request is answered by the first worker that is ready, which may be a moment before the load is over.
    until(lambda: reasons()[cold] == ("READY", ""), reasons)
    assert ("READY", "known") in reasons().values()
    assert server.scale(cold, 0)
    assert server.describe(cold)["loadOnDemand"]["state"] == "known"
    with grpc.insecure_channel(server.inference) as channel:
        request = PredictionsRequest(model_name=cold, input={"data": b"x"})
        _, call = InferenceAPIsServiceStub(channel).Predictions.with_call(request, timeout=GUARD_S)
        assert int(dict(call.trailing_metadata())["x-cold-start-ms"]) > 0


def test_a_model_on_demand_is_unregistered_whether_it_is_loaded_or_not(on_demand: Any) -> None:
    server = on_demand
    server.predict(NAMES[0], b"x")
    known = next(one for one in NAMES if server.describe(one)["loadOnDemand"]["state"] == "known")
    pids = server.worker_pids(NAMES[0])
    for name in (NAMES[0], known):
        assert "unregistered" in server.unregister(name)
    assert pids and not any(map(psutil.pid_exists, pids))
    for name in (NAMES[0], known):
        assert httpx.post(f"{server.http}/predictions/{name}", content=b"x", timeout=GUARD_S).status_code == 404


#: Answers with what its files hold, and with where they are.
FILED = """
import os

def handle(data, context):
    if data is None:
        return None
    path = os.path.join(context.system_properties["model_dir"], "weights.bin")
    return [os.path.getsize(path)] * len(data)
"""
#: Of a file that registration doesn't need.
WEIGHTS_BYTES = 3 * MIB


def packed(store: Path, name: str, handler: str = FILED, config: str = "", suffix: str = ".mar") -> Path:
    """An archive in the store, with a file of WEIGHTS_BYTES."""
    model = {"modelName": name, "handler": "handler.py", "modelVersion": "2.0", "configFile": "model-config.yaml"}
    files = {
        "MAR-INF/MANIFEST.json": json.dumps({"runtime": "python", "model": model}).encode(),
        "handler.py": handler.encode(),
        "model-config.yaml": config.encode() or b"{}",
        "weights.bin": os.urandom(WEIGHTS_BYTES),
    }
    path = store / f"{name}{suffix}"
    if suffix == ".mar":
        with zipfile.ZipFile(path, "w") as archive:
            for file, data in files.items():
                archive.writestr(file, data)
    else:
        with tarfile.open(path, "w:gz") as tar:
            for file, data in files.items():
                entry = tarfile.TarInfo(file)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    return path


def damaged(path: Path) -> Path:
    """The same with an error in the weights, which is seen only by who reads them."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    return path


@pytest.fixture
def archives(tmp_path: Path) -> Iterator[tuple[Path, Callable[[], list[Path]], Callable[..., Any]]]:
    """A store, the folders of models that servers have unpacked, and `serve(*models, **settings)`, a running server."""
    store = tmp_path / "store"
    store.mkdir()
    servers = []

    def unpacked() -> list[Path]:
        found = (tmp_path / "tmp").glob("torchrelay-server-*/models/*")
        return [folder for folder in found if not folder.name.startswith(".partial-")]

    def serve(*models: str, **settings: object) -> Any:
        servers.append(Serving(tmp_path, store, dict(settings), ["--ncs", "--models", *models]))
        return servers[-1].wait_started()

    yield store, unpacked, serve
    for server in servers:
        server.terminate()
    assert not any((tmp_path / "tmp").glob("torchrelay-*"))


def asked(server: Any, name: str) -> httpx.Response:
    return httpx.post(f"{server.http}/predictions/{name}", content=b"x", timeout=GUARD_S)


def test_an_archive_is_unpacked_for_the_first_request(archives: Any) -> None:
    """Known models have no file there, and all that their manifests and configurations say is known."""
    store, unpacked, serve = archives
    for name in ("one", "two"):
        packed(store, name, config="minWorkers: 1\nmaxWorkers: 3\nloadOnDemand: true\nbatchSize: 4\n")
    packed(store, "gzipped", config="loadOnDemand: true\n", suffix=".tar.gz")
    packed(store, "usual")
    server = serve("one.mar", "two.mar", "gzipped.tar.gz")
    assert unpacked() == []
    said = server.describe("one")
    assert (said["modelVersion"], said["batchSize"], said["maxWorkers"]) == ("2.0", 4, 3)
    assert said["loadOnDemand"]["state"] == "known"
    server.register("usual.mar", initial_workers=1)
    (usual,) = unpacked()
    assert (usual / "weights.bin").stat().st_size == WEIGHTS_BYTES, "it isn't on demand"
    assert asked(server, "one").text == asked(server, "gzipped").text == str(WEIGHTS_BYTES)
    assert len(unpacked()) == 3
    assert server.scale("one", 0)
    assert asked(server, "one").text == str(WEIGHTS_BYTES)
    for name in ("one", "two", "gzipped"):
        server.unregister(name)
    assert unpacked() == [usual]


def test_what_is_wrong_with_an_archive_is_told_when_it_is_seen(archives: Any) -> None:
    """A wrong name at the registration, damaged weights and a changed archive by the request that needs the files;
    both work once the archive is mended, or registered again."""
    store, unpacked, serve = archives
    whole = packed(store, "broken").read_bytes()
    path = damaged(store / "broken.mar")
    times = path.stat()
    packed(store, "changed")
    with zipfile.ZipFile(store / "wrong.mar", "w") as archive:
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"model": {"modelName": "wrong", "handler": "h.py"}}))
        archive.writestr("../weights.bin", bytes(WEIGHTS_BYTES))
    server = serve("broken.mar", "changed.mar", load_on_demand="true")
    with pytest.raises(grpc.RpcError, match="leads out of the archive"):
        server.register("wrong.mar")
    assert unpacked() == []
    answer = asked(server, "broken")
    assert (answer.status_code, answer.json()["code"]) == (503, 503)
    assert "could not be loaded" in answer.text and "broken.mar" in answer.text and "damaged" in answer.text
    assert int(answer.headers["retry-after"]) >= 1
    assert server.describe("broken")["loadOnDemand"]["state"] == "failing"
    assert unpacked() == []
    path.write_bytes(whole)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    until(lambda: asked(server, "broken").status_code == 200, lambda: server.log)

    packed(store, "changed")
    answer = asked(server, "changed")
    assert answer.status_code == 503
    assert "changed.mar: it was changed since the model was registered" in answer.text
    server.unregister("changed")
    server.register("changed.mar")
    assert asked(server, "changed").text == str(WEIGHTS_BYTES)
