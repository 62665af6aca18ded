"""A server that gets no requests before it can answer them: readiness, beside health, while models load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx

from support import GUARD_S, until
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub as Stub

#: Loads once the file is there.
WAITS = """
import pathlib, time

class Handler:
    def initialize(self, context):
        while not pathlib.Path("GO").exists():
            time.sleep(0.02)

    def handle(self, data, context):
        return ["here"] * len(data)
"""


def statuses(server: Any) -> dict[str, int]:
    paths = ("/ping", "/v2/health/live", "/v2/health/ready", "/v2/models/waits/ready")
    return {path: httpx.get(server.http + path, timeout=GUARD_S).status_code for path in paths}


def test_a_server_is_ready_when_its_models_are(
    start: Callable[..., Any], write: Callable[..., str], tmp_path: Path
) -> None:
    """A loading model is no failure: the server stays healthy."""
    go = tmp_path / "go"
    write("waits", WAITS.replace("GO", str(go)))
    write("later", WAITS.replace("GO", str(tmp_path / "never")))
    server = start("--models", "waits", default_workers_per_model=1)
    with grpc.insecure_channel(server.inference) as channel:
        stub = Stub(channel)
        assert statuses(server) == {
            "/ping": 200,
            "/v2/health/live": 200,
            "/v2/health/ready": 503,
            "/v2/models/waits/ready": 503,
        }
        assert not stub.ServerReady(pb.ServerReadyRequest(), timeout=GUARD_S).ready
        go.touch()
        until(lambda: stub.ServerReady(pb.ServerReadyRequest(), timeout=GUARD_S).ready)
        assert set(statuses(server).values()) == {200}
        server.register("later", synchronous=False)  # what comes later doesn't take the server out of service
        assert stub.ServerReady(pb.ServerReadyRequest(), timeout=GUARD_S).ready
