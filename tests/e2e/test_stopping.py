"""The end of a server: signals, clients that don't leave, and files left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import h2.config
import h2.connection
import httpx
import psutil
import pytest

from support import GUARD_S, until
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub
from ts_frontend.config.snapshot import SnapshotFiles, SnapshotKind
from ts_frontend.protos.grpc_health_v1_health_pb2 import HealthCheckRequest, HealthCheckResponse
from ts_frontend.protos.grpc_health_v1_health_pb2_grpc import HealthStub
from ts_frontend.protos.inference_pb2 import PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub

DRAIN_S = 2
FOREGROUND = (
    sys.executable,
    "-c",
    "import sys; from ts_frontend.cli.main import main; sys.exit(main())",
    "--start",
    "--foreground",
    "--ts-config",
    "config.properties",
    "--ncs",
)
PING = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"
PIPELINED = PING * 100


def request_for(value: object) -> PredictionsRequest:
    return PredictionsRequest(model_name="probe", input={"data": json.dumps(value).encode()})


# --- clients that don't read


def link_to(port: int) -> socket.socket:
    link = socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    link.settimeout(1)
    link.connect(("127.0.0.1", port))
    return link


def pipelined_pings(server: Any, left: Path) -> socket.socket:
    """As many requests as the server takes without any of its answers being read."""
    link = link_to(server.port("http_inference"))
    try:
        while True:
            link.sendall(PIPELINED)
    except TimeoutError:
        return link


def http_stream(server: Any, left: Path) -> socket.socket:
    link = link_to(server.port("http_inference"))
    part = b'--B\r\nContent-Disposition: form-data; name="data"; filename="f"\r\n\r\n%s\r\n--B--\r\n'
    body = part % json.dumps({"op": "stream_until_left", "left": str(left)}).encode()
    head = "POST /predictions/probe HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=B\r\n"
    link.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    assert link.recv(12) == b"HTTP/1.1 200"
    return link


def grpc_stream(server: Any, left: Path) -> socket.socket:
    link = link_to(server.port("grpc_inference"))
    message = request_for({"op": "stream_until_left", "left": str(left)}).SerializeToString()
    http2 = h2.connection.H2Connection(h2.config.H2Configuration())
    http2.initiate_connection()
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":authority": "test",
        ":path": "/org.pytorch.serve.grpc.inference.InferenceAPIsService/StreamPredictions",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    http2.send_headers(1, list(headers.items()))
    http2.send_data(1, b"\0" + len(message).to_bytes(4, "big") + message, end_stream=True)
    link.sendall(http2.data_to_send())
    received = 0
    while received < 1000:  # the stream has begun
        received += len(link.recv(100))
    return link


def assert_nothing_left(server: Any, children: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(children, timeout=GUARD_S)
    assert not alive
    assert not list((server.directory / "tmp").iterdir())


def test_the_stop_is_the_last_snapshot(start: Any, tmp_path: Path) -> None:
    server = start("--models", "probe=probe", snapshots=True)
    assert server.terminate() == 0
    found, skipped = SnapshotFiles(tmp_path / "logs" / "config").newest()
    assert found is not None and not skipped
    assert SnapshotKind.SHUTDOWN.value in str(found.path) and list(found.snapshot.models) == ["probe"]


@pytest.mark.parametrize("client", [pipelined_pings, pytest.param(http_stream, marks=pytest.mark.long), grpc_stream])
def test_who_does_not_read_holds_no_server_up(
    start: Any, tmp_path: Path, client: Callable[[Any, Path], socket.socket]
) -> None:
    server = start(drain_timeout_s=DRAIN_S)
    server.register("probe")
    with client(server, tmp_path / "left"):
        children = server.processes()
        assert server.terminate() == 0, server.log
        assert_nothing_left(server, children)


def test_a_second_signal_ends_at_once(start: Any, tmp_path: Path) -> None:
    server = start(drain_timeout_s=600)
    server.register("probe")
    with grpc_stream(server, tmp_path / "left"):
        children = server.processes()
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_log("Draining")
        time.sleep(1.1)  # a sooner one counts as the same
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 128 + signal.SIGTERM, server.log
        assert_nothing_left(server, children)


# --- a server that is killed

PARENT = """
import subprocess

child = None

def handle(data, context):
    global child
    if child is None:
        child = subprocess.Popen(["sleep", "3600"])
    if data:
        open(bytes(data[0]["body"]).decode(), "w").close()
        child.wait()
"""


@pytest.mark.parametrize("worker", ["idle", "busy", "stopped"])
def test_what_a_worker_started_ends_with_a_killed_server(
    start: Any, write: Callable[..., str], tmp_path: Path, worker: str
) -> None:
    """As the processes of an engine, which hold a GPU's memory. A worker that can't end them itself is stopped here."""
    write("parent", PARENT)
    server = start()
    server.register("parent")
    (pid,) = server.worker_pids("parent")
    processes = server.processes()
    assert psutil.Process(pid).children(), "sleep"
    if worker == "stopped":
        psutil.Process(pid).suspend()
    if worker == "busy":
        begun = tmp_path / "begun"
        sent = b"POST /predictions/parent HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"
        with link_to(server.port("http_inference")) as link:
            link.sendall(sent % (len(str(begun)), str(begun).encode()))
            until(begun.exists, lambda: server.log)
            server.process.kill()
    server.process.kill()
    _, alive = psutil.wait_procs(processes, timeout=GUARD_S)
    assert not alive


# --- whom signals reach


def group(server: Any) -> None:
    """supervisord's stopasgroup, `kill -TERM -- -PGID`; `timeout` passes its own on to the server and the group."""
    os.killpg(server.process.pid, signal.SIGTERM)


def every_process(server: Any) -> None:
    """systemd's KillMode=control-group."""
    for process in [*server.processes(), server.process]:
        process.send_signal(signal.SIGTERM)


def timeout_alone(server: Any) -> None:
    server.process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    "stop", [group, *(pytest.param(stop, marks=pytest.mark.long) for stop in (every_process, timeout_alone))]
)
def test_a_signal_to_all_processes_loses_no_accepted_request(
    start: Any, store: Path, tmp_path: Path, stop: Callable[[Any], None]
) -> None:
    command = ["timeout", "600", *FOREGROUND, "--model-store", str(store)]
    server = start(command=command)
    server.register("probe", initial_workers=2)
    ran = tmp_path / "ran"

    async def scenario() -> tuple[int, list[grpc.aio.AioRpcError]]:
        answered = 0
        failures: list[grpc.aio.AioRpcError] = []

        async def client(stub: Any) -> None:
            nonlocal answered
            while not failures:
                try:
                    await stub.Predictions(
                        request_for({"op": "work", "seconds": 0.02, "ran": str(ran)}), timeout=GUARD_S
                    )
                    answered += 1
                except grpc.aio.AioRpcError as error:
                    failures.append(error)
                if answered == 100:
                    stop(server)

        async with grpc.aio.insecure_channel(server.inference) as channel:
            await asyncio.gather(*(client(InferenceAPIsServiceStub(channel)) for _ in range(16)))
        return answered, failures

    children = server.processes()
    answered, failures = asyncio.run(scenario())
    assert server.wait() == 0, server.log
    assert {failure.code() for failure in failures} <= {grpc.StatusCode.UNAVAILABLE}, failures
    assert answered == ran.stat().st_size
    assert_nothing_left(server, children)


def test_a_terminal_that_goes_away_drains(start: Any) -> None:
    server = start()
    server.process.send_signal(signal.SIGHUP)
    assert server.wait() == 0, server.log
    assert "Draining" in server.log
    assert_nothing_left(server, [])


@pytest.mark.parametrize("by", ["nohup", pytest.param("setsid", marks=pytest.mark.long)])
def test_nohup_and_daemons_outlive_a_terminal(start: Any, store: Path, by: str) -> None:
    server = start(command=[by, *FOREGROUND, "--model-store", str(store)])
    server.process.send_signal(signal.SIGHUP)
    server.register("probe")
    assert json.loads(server.predict("probe", {"value": 1})) == 1
    assert "Draining" not in server.log


# --- readiness first


#: The paths that a router may ask, with their status while the server ends.
PROBES = {
    "/ping": 500,
    "/v2/health/ready": 503,
    "/v2/models/probe/ready": 503,
    "/v2/models/probe/versions/1.0/ready": 503,
    "/v1/models/probe": 503,
    "/v2/health/live": 200,
}


def readiness(server: Any) -> tuple[dict[str, int], list[bool]]:
    """What probes get over HTTP, and over gRPC: the server's readiness, the model's, and the health of both."""
    over_http = {path: httpx.get(server.http + path, timeout=GUARD_S).status_code for path in PROBES}
    with grpc.insecure_channel(server.inference) as channel:
        tensors, health = GRPCInferenceServiceStub(channel), HealthStub(channel)
        asked = [health.Check(HealthCheckRequest(service=name), timeout=GUARD_S) for name in ("", "probe")]
        over_grpc = [
            tensors.ServerReady(pb.ServerReadyRequest(), timeout=GUARD_S).ready,
            tensors.ModelReady(pb.ModelReadyRequest(name="probe"), timeout=GUARD_S).ready,
            *(one.status == HealthCheckResponse.SERVING for one in asked),
        ]
    return over_http, over_grpc


def test_readiness_fails_first_while_serving_goes_on(start: Any) -> None:
    server = start(drain_grace_s=4)
    server.register("probe")
    assert readiness(server) == (dict.fromkeys(PROBES, 200), [True] * 4)
    server.process.send_signal(signal.SIGTERM)
    server.wait_for_log("No longer ready")
    assert readiness(server) == (PROBES, [False] * 4)
    managed = httpx.get(f"{server.http_management}/v1/models/probe", timeout=GUARD_S)
    assert managed.json() == {"name": "probe", "ready": False}
    with link_to(server.port("http_inference")) as link:
        link.sendall(PING)
        answer = link.recv(4096)
        assert b'"Unhealthy"' in answer, answer
    assert json.loads(server.predict("probe", {"value": 1})) == 1  # on a new connection
    assert "Draining:" not in server.log
    assert server.wait() == 0, server.log
