"""Streams that rest, on both engines: what they keep in memory, and the limits on their number."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import psutil
import pytest

from support import GUARD_S, until
from ts_frontend.protos.grpc_health_v1_health_pb2 import HealthCheckRequest
from ts_frontend.protos.grpc_reflection_v1_reflection_pb2 import ServerReflectionRequest
from ts_frontend.protos.inference_pb2 import PredictionsRequest
from ts_frontend.transport.limits import STREAMS_PER_CONNECTION_MAX

WATCH = "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
PREDICTIONS = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/StreamPredictions2"
MESSAGE_BYTES = 3_000_000
STREAMS = 24
#: A long head, which the client sends once: HTTP/2 repeats it in a byte or two.
METADATA = [("x-long", "v" * 3900)] * 14
HEADS_MAX = 8
SETTINGS, MAX_CONCURRENT_STREAMS = 4, 3


@pytest.fixture(scope="module")
def server(server_of: Any) -> Iterator[Any]:
    with server_of({}, arriving_bytes_max=HEADS_MAX * 75_000) as found:
        yield found


class Streams:
    """Calls that rest after their first message and its answer. They end with the block."""

    def __init__(self, server: Any, compression: grpc.Compression = grpc.Compression.NoCompression) -> None:
        options = [("grpc.max_receive_message_length", -1)]
        self._channel = grpc.insecure_channel(server.inference, options, compression)
        self._over = threading.Event()
        self._calls: list[Any] = []

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for call in self._calls:
            call.cancel()
        self._channel.close()

    def open(self, path: str, message: bytes, metadata: Any = ()) -> grpc.StatusCode | None:
        """The status of a call that was refused."""

        def messages() -> Iterator[bytes]:
            yield message
            self._over.wait(GUARD_S)

        if path == WATCH:
            call = self._channel.unary_stream(path)(message, metadata=metadata, timeout=GUARD_S)
        else:
            call = self._channel.stream_stream(path)(messages(), metadata=metadata, timeout=GUARD_S)
        self._calls.append(call)
        try:
            next(call)
        except grpc.RpcError as error:
            return error.code()
        return None


def resident_bytes(server: Any) -> int:
    return int(psutil.Process(server.process.pid).memory_info().rss)


LARGE = {
    REFLECTION: ServerReflectionRequest(host="a" * MESSAGE_BYTES, list_services="").SerializeToString(),
    PREDICTIONS: PredictionsRequest(model_name="none", input={"x": b"a" * MESSAGE_BYTES}).SerializeToString(),
}


@pytest.mark.parametrize("path", LARGE)
def test_resting_streams_keep_no_message(server: Any, path: str) -> None:
    """Some kilobytes of a compressed message are three megabytes here."""
    with Streams(server, grpc.Compression.Gzip) as streams:
        assert streams.open(path, LARGE[path]) is None
        before = resident_bytes(server)
        for _ in range(STREAMS):
            assert streams.open(path, LARGE[path]) is None
        assert resident_bytes(server) - before < STREAMS * MESSAGE_BYTES / 2


def test_a_watcher_keeps_no_large_message(server: Any) -> None:
    with Streams(server) as streams:
        code = streams.open(WATCH, HealthCheckRequest(service="a" * 5000).SerializeToString())
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert streams.open(WATCH, HealthCheckRequest(service="a" * 4000).SerializeToString()) is None


SMALL = {
    WATCH: b"",
    REFLECTION: ServerReflectionRequest(list_services="").SerializeToString(),
    PREDICTIONS: PredictionsRequest(model_name="none").SerializeToString(),
}


@pytest.mark.parametrize("path", SMALL)
def test_further_streams_are_refused_until_others_end(server: Any, path: str) -> None:
    """The heads of those that still need them count with their size, as do those of calls with one answer never."""
    with Streams(server) as streams:
        found = [streams.open(path, SMALL[path], METADATA) for _ in range(6 * HEADS_MAX)]
        count = found.index(grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert set(found[:count]) == {None}
        assert count == HEADS_MAX if path == PREDICTIONS else count > 3 * HEADS_MAX
        with grpc.insecure_channel(server.inference) as channel:
            channel.unary_unary("/grpc.health.v1.Health/Check")(b"", metadata=METADATA, timeout=GUARD_S)
    with Streams(server) as streams:
        until(lambda: streams.open(path, SMALL[path], METADATA) is None, "the others have ended")


def test_a_connection_may_have_so_many_streams(server: Any) -> None:
    with socket.create_connection(("127.0.0.1", server.port("grpc_inference")), GUARD_S) as sock:
        sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, SETTINGS, 0, 0, 0, 0, 0)))
        reader = sock.makefile("rb")
        head = reader.read(9)
        assert head[3] == SETTINGS
        settings = dict(struct.iter_unpack(">HI", reader.read(int.from_bytes(head[:3], "big"))))
        reader.close()
    assert settings[MAX_CONCURRENT_STREAMS] == STREAMS_PER_CONNECTION_MAX
