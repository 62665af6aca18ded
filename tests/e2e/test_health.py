"""The answers of `/ping`, of readiness and of gRPC's health service while workers load, end and come back."""

from __future__ import annotations

import os
import signal

import grpc
import pytest

from support import GUARD_S, http_call, until
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub
from ts_frontend.protos.grpc_health_v1_health_pb2 import HealthCheckRequest, HealthCheckResponse
from ts_frontend.protos.grpc_health_v1_health_pb2_grpc import HealthStub

#: Its workers load as long as the file isn't there.
GATED = """
import os, time

class Gated:
    def initialize(self, context):
        while not os.path.exists({gate!r}):
            time.sleep(0.01)

    def handle(self, data, context):
        return [b"served"] * len(data)
"""
DYING = "import os\ndef handle(data, context):\n    if data:\n        os._exit(3)\n"


def status(server, path: str) -> int:
    return http_call(server.port("http_inference"), "GET", path).status


def ping(server) -> int:
    return status(server, "/ping")


def serves(server, service: str) -> bool:
    with grpc.insecure_channel(server.inference) as channel:
        answer = HealthStub(channel).Check(HealthCheckRequest(service=service), timeout=GUARD_S)
    return bool(answer.status == HealthCheckResponse.SERVING)


def pids(server) -> list[int]:
    """Of all workers that have a process, whether or not they serve."""
    return [worker["pid"] for worker in server.describe("gated")["workers"] if worker["pid"] > 0]


def kill(server, pid: int, ended: int) -> None:
    """Returns when the server has seen it end, which is the `ended`th."""
    os.kill(pid, signal.SIGKILL)
    server.wait_for_log("of gated_1.0 ended", ended)


@pytest.fixture
def gate(tmp_path, write):
    path = tmp_path / "gate"
    write("gated", GATED.format(gate=str(path)))
    return path


def test_a_server_that_says_it_started_is_healthy_while_its_models_load(start, gate):
    """Also when a worker fails, as long as another one may still come."""
    server = start("--models", "gated=gated", default_workers_per_model=2)
    assert ping(server) == 200 and not serves(server, "gated")
    until(lambda: len(pids(server)) == 2)
    kill(server, pids(server)[0], 1)
    assert ping(server) == 200
    kill(server, pids(server)[-1], 2)
    until(lambda: ping(server) == 500)
    gate.touch()
    until(lambda: ping(server) == 200)
    until(lambda: serves(server, "gated") and len(server.worker_pids("gated")) == 2)
    assert ping(server) == 200


def test_a_worker_that_is_replaced_leaves_the_server_healthy_while_another_serves(start, gate):
    gate.touch()
    server = start()
    server.register("gated", initial_workers=2)
    gate.unlink()
    first, second = server.worker_pids("gated")
    kill(server, first, 1)
    until(lambda: len(pids(server)) == 2)
    assert ping(server) == 200 and serves(server, "") and serves(server, "gated")
    assert server.predict("gated", b"x") == b"served"
    kill(server, second, 2)
    assert ping(server) == 500 and not serves(server, "") and not serves(server, "gated")
    gate.touch()
    until(lambda: ping(server) == 200)
    assert serves(server, "") and serves(server, "gated")
    assert server.predict("gated", b"x") == b"served"


def test_a_worker_that_is_not_started_again_makes_the_server_unhealthy(start, write):
    write("dying", DYING, config="maxRetryTimeoutInSec: 0\n")
    server = start()
    server.register("dying", initial_workers=2)
    while "of dying_1.0 is not started again" not in server.log:
        with pytest.raises(grpc.RpcError):
            server.predict("dying", b"x")
    assert ping(server) == 500 and not serves(server, "")


def test_a_server_is_ready_when_the_models_of_its_start_are(start, gate, write, tmp_path):
    """A loading model is no failure: the server stays healthy."""
    write("later", GATED.format(gate=str(tmp_path / "never")))
    server = start("--models", "gated", default_workers_per_model=1)
    health, readiness = ("/ping", "/v2/health/live"), ("/v2/health/ready", "/v2/models/gated/ready")
    assert [status(server, path) for path in (*health, *readiness)] == [200, 200, 503, 503]
    with grpc.insecure_channel(server.inference) as channel:
        stub = GRPCInferenceServiceStub(channel)
        assert not stub.ServerReady(pb.ServerReadyRequest(), timeout=GUARD_S).ready
        gate.touch()
        until(lambda: stub.ServerReady(pb.ServerReadyRequest(), timeout=GUARD_S).ready)
        assert [status(server, path) for path in (*health, *readiness)] == [200] * 4
        server.register("later", synchronous=False)  # what comes later doesn't take the server out of service
        assert stub.ServerReady(pb.ServerReadyRequest(), timeout=GUARD_S).ready
