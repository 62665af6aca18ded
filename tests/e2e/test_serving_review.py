"""Corners of a worker's life: a request that only waits isn't hung, a hung one is found everywhere, nothing is left."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
import psutil
import pytest

from support import GUARD_S, until
from ts_frontend.protos.inference_pb2 import PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub
from ts_frontend.protos.management_pb2 import RegisterModelRequest
from ts_frontend.protos.management_pb2_grpc import ManagementAPIsServiceStub

GENERATOR = """
import json, time

def handle(data, context):
    if data is None:
        return
    time.sleep(json.loads(bytes(data[0]["data"]))["seconds"])
    yield ["done"]
"""

ASYNC = """
import asyncio, json

async def handle(data, context):
    if data is None:
        return
    await asyncio.sleep(json.loads(bytes(data[0]["data"]))["seconds"])
    return ["done"]
"""

ROUGH = """
import json, os, time
from pathlib import Path
from ts.handler_utils.utils import send_intermediate_predict_response

def handle(data, context):
    if data is None:
        return None
    ask = json.loads(bytes(data[0]["data"]))
    if ask["op"] == "flood":  # a child that holds all descriptors of the worker outlives it, and writes
        if os.fork() == 0:
            while True:
                os.write(1, b"line\\n" * 10_000)
        os._exit(3)
    if ask["op"] == "exit":
        os._exit(5)
    if ask["op"] == "orphan":
        child = os.fork()
        while child == 0:
            time.sleep(0.1)
        Path(ask["child"]).write_text(str(child))
        os._exit(6)
    if ask["op"] == "no_newline":
        os.write(1, b"\\xff" * 4_000_000)
        os._exit(4)
    if ask["op"] == "stream_and_hang":
        for _ in range(8):
            try:
                send_intermediate_predict_response([b"x" * 1_000_000], context.request_ids, "more", 200, context)
            except BaseException:
                break
        Path(ask["begun"]).touch()
        while True:
            time.sleep(0.05)
    return ["ok"]
"""


def request_for(model: str, value: object) -> PredictionsRequest:
    return PredictionsRequest(model_name=model, input={"data": json.dumps(value).encode()})


def failure_of(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as failure:
        call()
    return failure.value.code(), failure.value.details()


def ended(pid: int) -> bool:
    """True when the process is gone, or only waits to be reaped."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def together(server, model: str, seconds: float, count: int) -> list[bytes]:
    with ThreadPoolExecutor(count) as pool:
        calls = [pool.submit(server.predict, model, {"seconds": seconds}, timeout=GUARD_S) for _ in range(count)]
        return [call.result() for call in calls]


def test_only_what_runs_can_hang(start, write):
    """Responses may take 1 s: four generators that wait for each other take longer than that in all, and two async
    requests that were late in coming leave a worker that goes on."""
    write("turns", GENERATOR, config="responseTimeout: 1\nminWorkers: 1\n")
    write("beside", ASYNC, config="responseTimeout: 1\nminWorkers: 1\n")
    server = start()
    server.register("turns")
    server.register("beside")
    before = server.worker_pids("turns"), server.worker_pids("beside")
    assert together(server, "turns", 0.5, 4) == [b"done"] * 4
    assert together(server, "beside", 2.0, 2) == [b"done"] * 2
    assert server.predict("beside", {"seconds": 0}, timeout=GUARD_S) == b"done"
    assert (server.worker_pids("turns"), server.worker_pids("beside")) == before


def test_a_handler_that_hangs_is_found_on_a_worker_that_is_retiring(start, write, probe_handler, tmp_path):
    write("hanging", probe_handler, config="responseTimeout: 1\nminWorkers: 1\n")
    server = start()
    server.register("hanging")
    begun = tmp_path / "begun"
    with ThreadPoolExecutor(1) as pool:
        ask = {"op": "hold", "begun": str(begun), "release": str(tmp_path / "never")}
        held = pool.submit(failure_of, lambda: server.predict("hanging", ask, timeout=GUARD_S))
        until(begun.exists)
        server.scale("hanging", 0)
        code, details = held.result()
    assert code is grpc.StatusCode.INTERNAL and "responseTimeout" in details


def test_a_hung_handler_whose_stream_nobody_reads_is_killed(start, write, tmp_path):
    write("rough", ROUGH, config="responseTimeout: 1\nminWorkers: 1\n")
    server = start()
    server.register("rough")
    pids = server.worker_pids("rough")
    begun = tmp_path / "begun"
    own_connection = [("grpc.use_local_subchannel_pool", 1)]  # what isn't read would fill the window of all others
    with grpc.insecure_channel(server.inference, own_connection) as channel:
        ask = {"op": "stream_and_hang", "begun": str(begun)}
        call = InferenceAPIsServiceStub(channel).StreamPredictions(request_for("rough", ask), timeout=GUARD_S)
        until(begun.exists)
        assert server.predict("rough", {"op": "ok"}, timeout=GUARD_S) == b"ok"
        call.cancel()
    assert server.worker_pids("rough") != pids


def test_what_a_worker_leaves_behind_stops_nothing(start, write):
    write("rough", ROUGH)
    server = start()
    server.register("rough")
    assert "exit code 3" in failure_of(lambda: server.predict("rough", {"op": "flood"}, timeout=GUARD_S))[1]
    assert server.predict("rough", {"op": "ok"}, timeout=GUARD_S) == b"ok"
    assert "exit code 4" in failure_of(lambda: server.predict("rough", {"op": "no_newline"}, timeout=GUARD_S))[1]
    assert server.predict("rough", {"op": "ok"}, timeout=GUARD_S) == b"ok"
    assert len(json.dumps(server.describe("rough")["lastWorkerFailure"])) < 1_000_000

    process = psutil.Process(server.process.pid)
    before = process.num_fds()
    for number in range(3, 9):
        failure_of(lambda: server.predict("rough", {"op": "exit"}, timeout=GUARD_S))
        assert server.predict("rough", {"op": "ok"}, timeout=GUARD_S) == b"ok"
        server.wait_for_log("is ready (pid", number + 1)
    assert comes_down_to(process, before + 2)


def test_a_killed_forkserver_is_replaced_and_so_are_its_workers(start, tmp_path):
    server = start()
    server.register("probe", initial_workers=2)
    begun, release = tmp_path / "begun", tmp_path / "release"
    release.touch()
    (forkserver,) = server.forkservers()
    with ThreadPoolExecutor(8) as pool:
        for number in range(2):
            ask = {"op": "hold", "begun": f"{begun}{number}", "release": str(tmp_path / "never")}
            pool.submit(failure_of, partial(server.predict, "probe", ask, timeout=GUARD_S))
            until((tmp_path / f"begun{number}").exists)
        queued = [pool.submit(server.predict, "probe", {"op": "echo"}, timeout=GUARD_S) for _ in range(6)]
        until(lambda: server.describe("probe")["jobQueueStatus"]["pendingRequests"] >= 6)
        os.kill(forkserver, signal.SIGKILL)
        assert [call.result() for call in queued] == [b"ok"] * 6
    server.wait_for_log("is ready (pid", 4)


def comes_down_to(process: psutil.Process, count: int) -> bool:
    """When so few descriptors are left open; those of a process that just ended are closed when its end is known."""
    return until(lambda: process.num_fds() <= count, lambda: f"{process.num_fds()} descriptors, not {count}")


@pytest.mark.parametrize("worker_start", ["fork", pytest.param("exec", marks=pytest.mark.long)])
def test_what_a_worker_has_started_ends_with_it(start, write, tmp_path, worker_start):
    write("rough", ROUGH)
    server = start(worker_start=worker_start)
    server.register("rough")
    child = tmp_path / "child"
    code, details = failure_of(lambda: server.predict("rough", {"op": "orphan", "child": str(child)}, timeout=GUARD_S))
    assert code is grpc.StatusCode.UNAVAILABLE and "exit code 6" in details
    until(lambda: ended(int(child.read_text())))


def test_a_model_is_registered_once_however_many_ask_and_whoever_leaves(start):
    server = start()
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(server.register, "probe") for _ in range(3)]
        errors: list[Any] = [error for call in calls if (error := call.exception()) is not None]
    assert [error.code() for error in errors] == [grpc.StatusCode.ALREADY_EXISTS] * 2
    server.unregister("probe")
    with grpc.insecure_channel(server.management) as channel:
        request = RegisterModelRequest(url="probe", initial_workers=1, synchronous=True)
        call = ManagementAPIsServiceStub(channel).RegisterModel.future(request, timeout=GUARD_S)
        server.wait_for_log("Model probe 1.0 added", 2)
        call.cancel()
    assert server.predict("probe", {}, timeout=GUARD_S) == b"ok"


@pytest.mark.parametrize("worker_start", ["fork", pytest.param("exec", marks=pytest.mark.long)])
def test_leaving_while_a_model_loads(start, worker_start):
    """Unregistering and stopping don't wait for a model that never finishes loading."""
    server = start(worker_start=worker_start)
    server.register("probe")
    before = psutil.Process(server.process.pid).num_fds()
    for _ in range(3):
        server.register("slowstart", synchronous=False)
        assert server.unregister("slowstart") == 'Model "slowstart" unregistered'
    assert server.predict("probe", {}) == b"ok"
    assert comes_down_to(psutil.Process(server.process.pid), before + 2)
    server.register("slowstart", synchronous=False)
    begun_s = time.monotonic()
    assert server.terminate() == 0
    assert time.monotonic() - begun_s < GUARD_S
    assert os.listdir(server.directory / "tmp") == []
