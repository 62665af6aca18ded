"""Handlers that misbehave, workers that die and callers that leave: one accepted request has one final status, only
what runs can hang, and nothing is left."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2

from e2e.servers import ARCHIVES, Serving, request_for, write_model
from support import GUARD_S, until
from ts_frontend.protos.google_rpc_status_pb2 import Status
from ts_frontend.protos.grpc_health_v1_health_pb2 import HealthCheckRequest
from ts_frontend.protos.grpc_health_v1_health_pb2_grpc import HealthStub
from ts_frontend.protos.inference_pb2 import PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub
from ts_frontend.protos.management_pb2 import RegisterModelRequest
from ts_frontend.protos.management_pb2_grpc import ManagementAPIsServiceStub

SERVING, NOT_SERVING = 1, 2
PROBE = ARCHIVES / "probe" / "handler.py"


def asked(value: object, model: str = "probe") -> PredictionsRequest:
    return request_for(model, value)


@pytest.fixture
def add(shared) -> Callable[..., None]:
    """`add(name, handler's file or text, config, …)` registers a model of this test alone on the shared server."""

    def register(name: str, source: Path | str, config: str = "minWorkers: 1\n", **more: Any) -> None:
        shared.register(write_model(shared.store, name, source, config=config), **more)

    return register


def status_of(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as failure:
        call()
    return failure.value.code(), failure.value.details()


def test_callers_of_a_dead_worker_are_told_when_to_ask_again(shared):
    """In the trailers, and in the status of StreamPredictions2; the delay is a google.rpc.RetryInfo."""
    request = asked({"op": "exit", "code": 9})
    with grpc.insecure_channel(shared.inference) as channel:
        stub = InferenceAPIsServiceStub(channel)
        with pytest.raises(grpc.RpcError) as failed:
            stub.Predictions(request, timeout=GUARD_S)
        trailing = dict(failed.value.trailing_metadata())
        (answer,) = stub.StreamPredictions2(iter([request]), timeout=GUARD_S)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Predictions(asked({"op": "refuse"}), timeout=GUARD_S)
    for status in (Status.FromString(trailing["grpc-status-details-bin"]), answer.status):
        assert (status.code, status.message) == (14, failed.value.details())
        (detail,) = [one for one in status.details if not one.type_url.endswith("RequestInfo")]
        assert detail.type_url == "type.googleapis.com/google.rpc.RetryInfo"
        assert detail.value[:2] == b"\x0a\x02" and Duration.FromString(detail.value[2:]).seconds == 1
    assert "grpc-status-details-bin" not in dict(refused.value.trailing_metadata())


def holds(server, text):
    return any(text in line for line in server.lines)


def test_callers_of_a_handler_that_raised_are_told_where(shared):
    """In the details of the status, with the types of google.rpc."""
    request = asked({"op": "raise"})
    with grpc.insecure_channel(shared.inference) as channel:
        stub = InferenceAPIsServiceStub(channel)
        with pytest.raises(grpc.RpcError) as failed:
            stub.Predictions(request, timeout=GUARD_S)
        trailing = dict(failed.value.trailing_metadata())
        (answer,) = stub.StreamPredictions2(iter([request]), timeout=GUARD_S)
    for status in (Status.FromString(trailing["grpc-status-details-bin"]), answer.status):
        assert (status.code, status.message) == (13, failed.value.details())
        info, *more_of_it, debug = status.details
        assert info.type_url == "type.googleapis.com/google.rpc.ErrorInfo"
        assert (found := error_details_pb2.ErrorInfo.FromString(info.value)).reason == "HANDLER_FAILED"
        assert found.domain == "torchrelay"
        assert debug.type_url == "type.googleapis.com/google.rpc.DebugInfo"
        more = error_details_pb2.DebugInfo.FromString(debug.value)
        assert more.detail == status.message
        assert more.stack_entries[-1] in status.message
        for one in more_of_it:
            assert one.type_url == "type.googleapis.com/google.rpc.RequestInfo"
            logged = f"request ids: {error_details_pb2.RequestInfo.FromString(one.value).request_id}"
            assert until(partial(holds, shared, logged))
        assert len(more_of_it) == (status is not answer.status), "a stream's errors are told by their answers"
        assert "Prediction failed: " in status.message and re.search(r" \(\w+\.py, line \d+, in \w+\)$", status.message)


def test_callers_who_may_not_know_are_told_where_it_is_written(start):
    server = start(debug_errors="false")
    server.register("probe")
    code, details = status_of(lambda: server.predict("probe", {"op": "raise"}))
    assert code is grpc.StatusCode.INTERNAL
    found = re.fullmatch(r"Prediction failed \(request ID (\S+): the model's log says why\)", details)
    assert found and until(lambda: [line for line in server.lines if f"request ids: {found[1]}" in line])


def test_a_request_that_died_with_its_worker_is_found_in_the_log(shared):
    with grpc.insecure_channel(shared.inference) as channel, pytest.raises(grpc.RpcError) as failed:
        InferenceAPIsServiceStub(channel).Predictions(asked({"op": "exit", "code": 6}), timeout=GUARD_S)
    status = Status.FromString(dict(failed.value.trailing_metadata())["grpc-status-details-bin"])
    (found,) = [one for one in status.details if one.type_url == "type.googleapis.com/google.rpc.RequestInfo"]
    request_id = error_details_pb2.RequestInfo.FromString(found.value).request_id
    assert until(lambda: [line for line in shared.lines if "exit code 6; request ids: " + request_id in line])


STANDSTILL_S = 3.0


def stand_still(server: Any, release: Path, seconds: float) -> None:
    """Stops the server, but not its workers, whose handler goes on when `release` is there."""
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        release.touch()
        end_s = time.monotonic() + seconds
        until(lambda: time.monotonic() > end_s)
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


def test_an_answer_that_came_while_the_server_stood_still_is_given(shared, add, tmp_path):
    """A paused container, a virtual machine that was moved: the worker went on, or its time has stood still too."""
    add("patient", PROBE, "responseTimeout: 1\nminWorkers: 1\n")
    begun, release = tmp_path / "begun", tmp_path / "release"
    before = shared.worker_pids("patient")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(shared.predict, "patient", {"op": "hold", "begun": str(begun), "release": str(release)})
        until(begun.exists)
        stand_still(shared, release, STANDSTILL_S)
        assert answer.result(GUARD_S)
    assert shared.worker_pids("patient") == before


SLOW_LOAD = """
import pathlib, time
pathlib.Path({begun!r}).touch()
while not pathlib.Path({release!r}).exists():
    time.sleep(0.01)

def handle(data, context):
    return data and [b"loaded"] * len(data)
"""


@pytest.mark.long
def test_a_model_that_loaded_while_the_server_stood_still_is_there(shared, add, tmp_path):
    begun, release = tmp_path / "begun", tmp_path / "release"
    code = SLOW_LOAD.format(begun=str(begun), release=str(release))
    with ThreadPoolExecutor(1) as pool:
        registered = pool.submit(add, "slow", code, f"startupTimeout: {STANDSTILL_S:g}\nminWorkers: 1\n")
        until(begun.exists)
        stand_still(shared, release, STANDSTILL_S + 1)
        registered.result(GUARD_S)
    assert "didn't load" not in shared.log
    assert shared.predict("slow", {}) == b"loaded"


def test_killing_a_worker_under_load_costs_only_what_it_had_started(shared, add, tmp_path):
    add("four", PROBE, "", initial_workers=4)
    pids = set(shared.worker_pids("four"))
    victim = min(pids)
    works = asked({"op": "work", "ran": str(tmp_path / "ran")}, "four")

    async def scenario() -> list[grpc.aio.AioRpcError]:
        failures: list[grpc.aio.AioRpcError] = []
        done = 0

        async def client(stub: Any) -> None:
            nonlocal done
            for _ in range(100):
                try:
                    answer = await stub.Predictions(works, timeout=GUARD_S)
                    assert answer.prediction == b"worked"
                except grpc.aio.AioRpcError as error:
                    failures.append(error)
                done += 1
                if done == 400:
                    os.kill(victim, signal.SIGKILL)

        async with grpc.aio.insecure_channel(shared.inference) as channel:
            await asyncio.gather(*(client(InferenceAPIsServiceStub(channel)) for _ in range(16)))
        return failures

    failures = asyncio.run(scenario())
    assert len(failures) <= 1, [failure.details() for failure in failures]
    assert all("SIGKILL" in failure.details() for failure in failures)
    shared.wait_for_log("of four_1.0 is ready (pid", 5)
    after = set(shared.worker_pids("four"))
    assert len(after) == 4 and victim not in after and len(after & pids) == 3


LENGTHS = """
def handle(data, context):
    return None if data is None else [str(len(row.get("data") or row.get("body"))) for row in data]
"""


@pytest.fixture(scope="module")
def measured(server_of) -> Iterator[Serving]:
    models = {"lengths": (LENGTHS, "minWorkers: 1\n")}
    with server_of(models, metrics_mode="prometheus", max_request_size=8_000_000) as server:
        yield server


@pytest.mark.parametrize("size", [1, 4_000_000], ids=["whole frames", "a part of a frame"])
def test_what_a_killed_worker_has_not_read_is_answered_by_the_next(measured, size):
    """The worker stands still: messages to it wait in its socket, which is too small for the larger requests."""
    server = measured
    (pid,) = server.worker_pids("lengths")
    os.kill(pid, signal.SIGSTOP)

    def requests() -> tuple[int, int]:
        """Those that the worker was sent, and those that wait."""
        running, queued = (server.metric(f"ts_{name}_requests", model_name="lengths") for name in ("running", "queued"))
        return int(running), int(queued)

    async def scenario() -> list[str]:
        request = request_for("lengths", b"x" * size)
        url = f"{server.http}/predictions/lengths"
        async with grpc.aio.insecure_channel(server.inference) as channel, httpx.AsyncClient(timeout=GUARD_S) as http:
            stub = InferenceAPIsServiceStub(channel)
            native = [asyncio.ensure_future(stub.Predictions(request, timeout=GUARD_S)) for _ in range(6)]
            plain = [asyncio.ensure_future(http.post(url, content=b"x" * size)) for _ in range(6)]
            await asyncio.to_thread(until, lambda: requests() > (0, 12) and sum(requests()) == 12, requests)
            os.kill(pid, signal.SIGKILL)
            answers = [bytes((await one).prediction).decode() for one in native]
            return answers + [f"{one.status_code} {one.text}" for one in await asyncio.gather(*plain)]

    assert asyncio.run(scenario()) == [str(size)] * 6 + [f"200 {size}"] * 6
    assert pid not in server.worker_pids("lengths")


def test_health_tells_at_once_when_a_model_has_no_worker_and_when_it_has_one_again(shared, add):
    add("watched", PROBE)
    with grpc.insecure_channel(shared.inference) as channel:
        watch = HealthStub(channel).Watch(HealthCheckRequest(service="watched"), timeout=GUARD_S)
        assert next(watch).status == SERVING
        os.kill(shared.worker_pids("watched")[0], signal.SIGKILL)
        assert next(watch).status == NOT_SERVING
        assert next(watch).status == SERVING
        watch.cancel()


@pytest.mark.long
def test_a_handler_that_never_finishes_loading_shows_where_it_is(shared, add):
    """Also where the handler ignores the signal that ends a process."""
    source = (
        "import signal\n\nclass Endless:\n    def initialize(self, context):\n"
        "        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n        self.search()\n\n"
        "    def search(self):\n        while True:\n            pass\n\n"
        "    def handle(self, data, context):\n        return data\n"
    )
    # The worker has to have begun to load by then.
    assert status_of(lambda: add("endless", source, startup_timeout=5))[0] is grpc.StatusCode.INTERNAL
    shared.wait_for_log("in search")
    assert any(re.search(r'handler\.py", line (9|10) in search', line) for line in shared.lines)


BROKEN_RUNTIME = """\
import sys

sys.modules["ts.runtime.tensor_running"] = None  # a module that the worker imports with its first tensors


{kind} handle(data, context):
    return data and ["answered"] * len(data)
"""


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_fault_of_the_runtime_ends_its_worker_and_the_caller_is_told(shared, add, kind):
    name = "broken_" + kind.replace(" ", "_")
    config = "minWorkers: 1\nopenInference: {inputs: [{name: x, datatype: FP32, shape: [-1]}]}\n"
    add(name, BROKEN_RUNTIME.format(kind=kind), config)
    tensor = {"name": "x", "shape": [1], "datatype": "FP32", "data": [1.0]}
    answer = httpx.post(f"{shared.http}/v2/models/{name}/infer", json={"inputs": [tensor]}, timeout=GUARD_S)
    assert (answer.status_code, answer.json()["error"][:12]) == (500, "Worker died."), answer.text
    died = f"of {name}_1.0 died: "
    assert until(lambda: [line for line in shared.lines if died in line and "request ids: " in line])
    assert shared.predict(name, "x") == b"answered"  # by the next worker


def test_a_handler_that_exits_is_told_in_the_log(shared, add):
    add("quitting", "import sys\n\ndef handle(data, context):\n    if data is not None:\n        sys.exit(4)\n")
    assert "exit code 4" in status_of(lambda: shared.predict("quitting", "x"))[1]
    shared.wait_for_log("The handler called sys.exit(4) (handler.py, line 5, in handle), which ends its worker")


def test_a_model_that_fails_after_an_asynchronous_register_shows_its_reason(shared):
    write_model(shared.store, "failing", ARCHIVES / "failing" / "handler.py")
    assert shared.register("failing", synchronous=False) == "Processing worker updates..."
    shared.wait_for_log(" of failing_1.0 ended")
    failure = shared.describe("failing")["lastWorkerFailure"]
    assert "the weights are of another model" in failure["reason"]
    assert any("ValueError" in line for line in failure["lastLines"])
    code, details = status_of(lambda: shared.predict("failing", {}))
    assert code is grpc.StatusCode.UNAVAILABLE and "the weights are of another model" in details
    shared.unregister("failing")


# --- a worker's life

GENERATOR = """
import json, time

def handle(data, context):
    if data is None:
        return
    time.sleep(json.loads(bytes(data[0]["data"]))["seconds"])
    yield ["done"]
"""

#: Requests that come together end together: one that is left alone after its time is ended with its worker.
ASYNC = """
import asyncio, json

end = None

async def handle(data, context):
    global end
    if data is None:
        return
    seconds = json.loads(bytes(data[0]["data"]))["seconds"]
    if seconds and end is None:
        end = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(seconds, end.set_result, None)
    if seconds:
        await end
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


def test_only_what_runs_can_hang(shared, add):
    """Responses may take 1 s: four generators that wait for each other take longer than that in all, and two async
    requests that were late in coming leave a worker that goes on."""
    add("turns", GENERATOR, "responseTimeout: 1\nminWorkers: 1\n")
    add("beside", ASYNC, "responseTimeout: 1\nminWorkers: 1\n")
    before = shared.worker_pids("turns"), shared.worker_pids("beside")
    assert together(shared, "turns", 0.5, 4) == [b"done"] * 4
    assert together(shared, "beside", 2.0, 2) == [b"done"] * 2
    assert shared.predict("beside", {"seconds": 0}, timeout=GUARD_S) == b"done"
    assert (shared.worker_pids("turns"), shared.worker_pids("beside")) == before


def test_a_handler_that_hangs_is_found_on_a_worker_that_is_retiring(shared, add, tmp_path):
    add("hanging", PROBE, "responseTimeout: 1\nminWorkers: 1\n")
    begun = tmp_path / "begun"
    with ThreadPoolExecutor(1) as pool:
        ask = {"op": "hold", "begun": str(begun), "release": str(tmp_path / "never")}
        held = pool.submit(status_of, lambda: shared.predict("hanging", ask, timeout=GUARD_S))
        until(begun.exists)
        shared.scale("hanging", 0)
        code, details = held.result()
    assert code is grpc.StatusCode.INTERNAL and "responseTimeout" in details


def test_a_hung_handler_whose_stream_nobody_reads_is_killed(shared, add, tmp_path):
    add("unread", ROUGH, "responseTimeout: 1\nminWorkers: 1\n")
    pids = shared.worker_pids("unread")
    begun = tmp_path / "begun"
    own_connection = [("grpc.use_local_subchannel_pool", 1)]  # what isn't read would fill the window of all others
    with grpc.insecure_channel(shared.inference, own_connection) as channel:
        ask = {"op": "stream_and_hang", "begun": str(begun)}
        call = InferenceAPIsServiceStub(channel).StreamPredictions(asked(ask, "unread"), timeout=GUARD_S)
        until(begun.exists)
        assert shared.predict("unread", {"op": "ok"}, timeout=GUARD_S) == b"ok"
        call.cancel()
    assert shared.worker_pids("unread") != pids


def test_what_a_worker_leaves_behind_stops_nothing(shared, add):
    add("rough", ROUGH)
    assert "exit code 3" in status_of(lambda: shared.predict("rough", {"op": "flood"}, timeout=GUARD_S))[1]
    assert shared.predict("rough", {"op": "ok"}, timeout=GUARD_S) == b"ok"
    assert "exit code 4" in status_of(lambda: shared.predict("rough", {"op": "no_newline"}, timeout=GUARD_S))[1]
    assert shared.predict("rough", {"op": "ok"}, timeout=GUARD_S) == b"ok"
    assert len(json.dumps(shared.describe("rough")["lastWorkerFailure"])) < 1_000_000

    process = psutil.Process(shared.process.pid)
    before = process.num_fds()
    for number in range(3, 9):
        status_of(lambda: shared.predict("rough", {"op": "exit"}, timeout=GUARD_S))
        assert shared.predict("rough", {"op": "ok"}, timeout=GUARD_S) == b"ok"
        shared.wait_for_log("of rough_1.0 is ready (pid", number + 1)
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
            pool.submit(status_of, partial(server.predict, "probe", ask, timeout=GUARD_S))
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
    code, details = status_of(lambda: server.predict("rough", {"op": "orphan", "child": str(child)}, timeout=GUARD_S))
    assert code is grpc.StatusCode.UNAVAILABLE and "exit code 6" in details
    until(lambda: ended(int(child.read_text())))


def test_a_model_is_registered_once_however_many_ask_and_whoever_leaves(shared):
    write_model(shared.store, "once", PROBE)
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(shared.register, "once") for _ in range(3)]
        errors: list[Any] = [error for call in calls if (error := call.exception()) is not None]
    assert [error.code() for error in errors] == [grpc.StatusCode.ALREADY_EXISTS] * 2
    shared.unregister("once")
    with grpc.insecure_channel(shared.management) as channel:
        request = RegisterModelRequest(url="once", initial_workers=1, synchronous=True)
        call = ManagementAPIsServiceStub(channel).RegisterModel.future(request, timeout=GUARD_S)
        shared.wait_for_log("Model once 1.0 added", 2)
        call.cancel()
    assert shared.predict("once", {}, timeout=GUARD_S) == b"ok"


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
