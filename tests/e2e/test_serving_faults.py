"""Handlers that misbehave, workers that die and callers that leave: one accepted request, one final status."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2

from support import GUARD_S, until
from ts_frontend.protos.google_rpc_status_pb2 import Status
from ts_frontend.protos.grpc_health_v1_health_pb2 import HealthCheckRequest
from ts_frontend.protos.grpc_health_v1_health_pb2_grpc import HealthStub
from ts_frontend.protos.inference_pb2 import PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub

SERVING, NOT_SERVING = 1, 2


def request_for(value: object, model: str = "probe") -> PredictionsRequest:
    return PredictionsRequest(model_name=model, input={"data": json.dumps(value).encode()})


def status_of(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as failure:
        call()
    return failure.value.code(), failure.value.details()


def test_callers_of_a_dead_worker_are_told_when_to_ask_again(shared):
    """In the trailers, and in the status of StreamPredictions2; the delay is a google.rpc.RetryInfo."""
    request = request_for({"op": "exit", "code": 9})
    with grpc.insecure_channel(shared.inference) as channel:
        stub = InferenceAPIsServiceStub(channel)
        with pytest.raises(grpc.RpcError) as failed:
            stub.Predictions(request, timeout=GUARD_S)
        trailing = dict(failed.value.trailing_metadata())
        (answer,) = stub.StreamPredictions2(iter([request]), timeout=GUARD_S)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Predictions(request_for({"op": "refuse"}), timeout=GUARD_S)
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
    request = request_for({"op": "raise"})
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
        InferenceAPIsServiceStub(channel).Predictions(request_for({"op": "exit", "code": 6}), timeout=GUARD_S)
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


def test_an_answer_that_came_while_the_server_stood_still_is_given(start, write, probe_handler, tmp_path):
    """A paused container, a virtual machine that was moved: the worker went on, or its time has stood still too."""
    write("patient", probe_handler, config="responseTimeout: 1\nminWorkers: 1\n")
    server = start()
    server.register("patient")
    begun, release = tmp_path / "begun", tmp_path / "release"
    before = server.worker_pids("patient")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.predict, "patient", {"op": "hold", "begun": str(begun), "release": str(release)})
        until(begun.exists)
        stand_still(server, release, STANDSTILL_S)
        assert answer.result(GUARD_S)
    assert server.worker_pids("patient") == before


SLOW_LOAD = """
import pathlib, time
pathlib.Path({begun!r}).touch()
while not pathlib.Path({release!r}).exists():
    time.sleep(0.01)

def handle(data, context):
    return data and [b"loaded"] * len(data)
"""


@pytest.mark.long
def test_a_model_that_loaded_while_the_server_stood_still_is_there(start, write, tmp_path):
    begun, release = tmp_path / "begun", tmp_path / "release"
    server = start()
    code = SLOW_LOAD.format(begun=str(begun), release=str(release))
    write("slow", code, config=f"startupTimeout: {STANDSTILL_S:g}\nminWorkers: 1\n")
    with ThreadPoolExecutor(1) as pool:
        registered = pool.submit(server.register, "slow")
        until(begun.exists)
        stand_still(server, release, STANDSTILL_S + 1)
        registered.result(GUARD_S)
    assert "didn't load" not in server.log
    assert server.predict("slow", {}) == b"loaded"


def test_killing_a_worker_under_load_costs_only_what_it_had_started(start, tmp_path):
    server = start()
    server.register("probe", initial_workers=4)
    pids = set(server.worker_pids("probe"))
    victim = min(pids)
    ran = tmp_path / "ran"

    async def scenario() -> list[grpc.aio.AioRpcError]:
        failures: list[grpc.aio.AioRpcError] = []
        done = 0

        async def client(stub: Any) -> None:
            nonlocal done
            for _ in range(100):
                try:
                    answer = await stub.Predictions(request_for({"op": "work", "ran": str(ran)}), timeout=GUARD_S)
                    assert answer.prediction == b"worked"
                except grpc.aio.AioRpcError as error:
                    failures.append(error)
                done += 1
                if done == 400:
                    os.kill(victim, signal.SIGKILL)

        async with grpc.aio.insecure_channel(server.inference) as channel:
            await asyncio.gather(*(client(InferenceAPIsServiceStub(channel)) for _ in range(16)))
        return failures

    failures = asyncio.run(scenario())
    assert len(failures) <= 1, [failure.details() for failure in failures]
    assert all("SIGKILL" in failure.details() for failure in failures)
    server.wait_for_log("is ready (pid", 5)
    after = set(server.worker_pids("probe"))
    assert len(after) == 4 and victim not in after and len(after & pids) == 3


LENGTHS = """
def handle(data, context):
    return None if data is None else [str(len(row.get("data") or row.get("body"))) for row in data]
"""


@pytest.mark.parametrize("size", [1, 4_000_000], ids=["whole frames", "a part of a frame"])
def test_what_a_killed_worker_has_not_read_is_answered_by_the_next(start, write, size):
    """The worker stands still: messages to it wait in its socket, which is too small for the larger requests."""
    write("lengths", LENGTHS, config="minWorkers: 1\n")
    server = start(metrics_mode="prometheus", max_request_size=8_000_000)
    server.register("lengths")
    (pid,) = server.worker_pids("lengths")
    os.kill(pid, signal.SIGSTOP)

    def requests() -> tuple[int, int]:
        """Those that the worker was sent, and those that wait."""
        running, queued = (server.metric(f"ts_{name}_requests", model_name="lengths") for name in ("running", "queued"))
        return int(running), int(queued)

    async def scenario() -> list[str]:
        request = PredictionsRequest(model_name="lengths", input={"data": b"x" * size})
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


def test_health_tells_at_once_when_a_model_has_no_worker_and_when_it_has_one_again(start):
    server = start()
    server.register("probe")

    with grpc.insecure_channel(server.inference) as channel:
        watch = HealthStub(channel).Watch(HealthCheckRequest(service="probe"), timeout=GUARD_S)
        assert next(watch).status == SERVING
        os.kill(server.worker_pids("probe")[0], signal.SIGKILL)
        assert next(watch).status == NOT_SERVING
        assert next(watch).status == SERVING
        watch.cancel()


@pytest.mark.long
def test_a_handler_that_never_finishes_loading_shows_where_it_is(start, write, tmp_path):
    """Also where the handler ignores the signal that ends a process."""
    source = tmp_path / "endless.py"
    source.write_text(
        "import signal\n\nclass Endless:\n    def initialize(self, context):\n"
        "        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n        self.search()\n\n"
        "    def search(self):\n        while True:\n            pass\n\n"
        "    def handle(self, data, context):\n        return data\n"
    )
    write("endless", source)
    server = start()
    # The worker has to have begun to load by then.
    assert status_of(lambda: server.register("endless", startup_timeout=5))[0] is grpc.StatusCode.INTERNAL
    server.wait_for_log("in search")
    assert any(re.search(r'handler\.py", line (9|10) in search', line) for line in server.lines)


def test_a_handler_that_exits_is_told_in_the_log(start, write, tmp_path):
    source = tmp_path / "quitting.py"
    source.write_text("import sys\n\ndef handle(data, context):\n    if data is not None:\n        sys.exit(4)\n")
    write("quitting", source)
    server = start()
    server.register("quitting")
    assert "exit code 4" in status_of(lambda: server.predict("quitting", "x"))[1]
    server.wait_for_log("The handler called sys.exit(4) (handler.py, line 5, in handle), which ends its worker")


def test_a_model_that_fails_after_an_asynchronous_register_shows_its_reason(start):
    server = start()
    assert server.register("failing", synchronous=False) == "Processing worker updates..."
    server.wait_for_log("Worker 9000 of failing_1.0 ended")
    failure = server.describe("failing")["lastWorkerFailure"]
    assert "the weights are of another model" in failure["reason"]
    assert any("ValueError" in line for line in failure["lastLines"])
    code, details = status_of(lambda: server.predict("failing", {}))
    assert code is grpc.StatusCode.UNAVAILABLE and "the weights are of another model" in details
    server.unregister("failing")
