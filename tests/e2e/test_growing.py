"""Servers whose models get as many workers as their load needs: more than one, or none."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest

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
    text = httpx.get(f"http://127.0.0.1:{server.port('http_metrics')}/metrics").text
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
    process = psutil.Process(server.process.pid)
    before = set(process.children(recursive=True))  # the forkservers

    def look() -> None:
        nonlocal most
        while not over.wait(0.05):
            workers = set(process.children(recursive=True)) - before
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


def test_metrics_count_loads_and_what_was_unloaded(on_demand: Any) -> None:
    server = on_demand
    for name in (*NAMES, *NAMES[:2]):
        server.predict(name, b"x")
    assert server.scale(NAMES[1], 0)
    text = httpx.get(f"http://127.0.0.1:{server.port('http_metrics')}/metrics").text
    found = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[:1] != "#"}

    def total(name: str) -> float:
        return sum(value for line, value in found.items() if line.startswith(name))

    assert total("ts_cold_starts_total{") == total("ts_cold_start_seconds_count{") >= len(NAMES)
    unloads = {line.partition('reason="')[2][:6]: value for line, value in found.items() if "_unloads_total{" in line}
    assert unloads["memory"] >= len(NAMES) - 2 and unloads["scaled"] >= 1
    assert total("ts_on_demand_models{") == len(NAMES)
    assert 0 < total("ts_on_demand_memory_bytes{") <= 240 * MIB


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
