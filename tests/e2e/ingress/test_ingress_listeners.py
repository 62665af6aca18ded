"""Listening, draining, and clients that don't read."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from support import GUARD_S

STALLED = 64
PIECES = 300


def test_several_listeners(run_server, connect):
    small = {"name": "small", "limits": {"request_bytes_max": 10}}
    with run_server({"name": "usual"}, small) as server:
        assert len(set(server.ports.values())) == 2
        assert connect(server.ports["usual"]).unary("Unary", bytes(11)) == bytes(11)
        with pytest.raises(grpc.RpcError) as caught:
            connect(server.ports["small"]).unary("Unary", bytes(11))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_port_in_use_is_an_error_that_names_it(server, start_server):
    said = start_server({"name": "second", "port": server.port})
    assert "second" in said["error"]
    assert f"127.0.0.1:{server.port}" in said["error"]


def test_ports_of_other_programs_are_not_shared(start_server):
    with socket.create_server(("127.0.0.1", 0)) as other:
        said = start_server({"name": "second", "port": other.getsockname()[1]})
    assert "error" in said


def test_a_failed_start_leaves_no_listener(start_server, run_server):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    with socket.create_server(("127.0.0.1", 0)) as other:
        said = start_server({"name": "first", "port": free}, {"name": "second", "port": other.getsockname()[1]})
    assert "second" in said["error"]
    with run_server({"name": "first", "port": free}) as server:
        assert server.port == free


def test_drain_under_load_loses_nothing(run_server, connect):
    """Every call that began is answered OK; the others are refused."""
    with run_server() as server:
        clients = [connect(server) for _ in range(4)]
        outcomes: list[str] = []
        enough = threading.Event()

        def ask(client) -> None:
            while True:
                future = client.start_unary("Slow", b"0.01")
                if future.exception() is not None:
                    outcomes.append(f"{future.code().name}: {future.details()}")
                    return
                outcomes.append("OK")
                if len(outcomes) > 200:
                    enough.set()

        with ThreadPoolExecutor(16) as pool:
            for number in range(16):
                pool.submit(ask, clients[number % len(clients)])
            assert enough.wait(60)
            server.drain(30)
            printed, status = server.end()
    assert status == 0
    failed = [outcome for outcome in outcomes if outcome != "OK"]
    answered = len(outcomes) - len(failed)
    assert json.loads(printed) == {"begun": answered, "ended": answered}, failed
    assert all(outcome.startswith("UNAVAILABLE") for outcome in failed), failed


def test_drain_waits_for_running_calls(run_server, connect):
    with run_server() as server:
        client = connect(server)
        futures = [client.start_unary("Slow", b"1") for _ in range(20)]
        client.wait("20 begun")
        server.drain(30)
        assert [future.result() for future in futures] == [b"1"] * 20
        assert server.end()[1] == 0


def test_drain_ends_what_takes_too_long(run_server, connect):
    with run_server() as server:
        client = connect(server)
        hanging = client.start_unary("Hang", b"too long")
        stream = client.stream("HangStream", b"too long 2")
        client.wait("too long started")
        assert next(stream) == b"first"
        server.drain(0.1)
        for call in (hanging, stream):
            assert call.exception().code() is grpc.StatusCode.UNAVAILABLE
        assert server.end()[1] == 0


def read_whole_stream(client) -> None:
    """A stream that is read as fast as it comes."""
    assert len(list(client.stream("Stream", json.dumps([1] * PIECES).encode()))) == PIECES


def settled(client, names: list[str]) -> dict[str, int]:
    """How much was sent to each reader, once that has stopped growing."""
    before: dict[str, int] = {}
    while True:
        now = {name: int(client.unary("Sent", name.encode())) for name in names}
        read_whole_stream(client)
        if now == before:
            return now
        before = now


def test_stalled_readers_hold_nobody_else_up(run_server, connect):
    """Each stalled reader has a connection of its own and reads one message of an endless stream."""
    with run_server() as server:
        client = connect(server)
        read_whole_stream(client)
        names = [f"stalled {number}" for number in range(STALLED)]
        # Without bandwidth probing a client's window stays small, so that it's full at once.
        stalled = [connect(server, options=(("grpc.http2.bdp_probe", 0),)) for _ in names]
        streams = [one.stream("Endless", name.encode()) for one, name in zip(stalled, names, strict=True)]
        for stream in streams:
            next(stream)
        sent = settled(client, names)
        assert max(sent.values()) * 65_536 < 32_000_000, "a reader that doesn't read must stop its sender"
        read_whole_stream(client)
        assert client.unary("Unary", b"still here") == b"still here"
        for stream in streams:
            stream.cancel()
        for name in names:
            client.wait(f"{name} closed")


OPEN_FILES = 128
CONNECTIONS = 300


@contextlib.contextmanager
def idle(port: int):
    """CONNECTIONS clients that ask for nothing, and don't wait for the server."""
    with contextlib.ExitStack() as ends:
        for _ in range(CONNECTIONS):
            one = ends.enter_context(socket.socket())
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                one.connect(("127.0.0.1", port))
        yield


def open_files(server) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are counted in /proc")
def test_idle_connections_leave_descriptors_to_the_server(run_server, connect):
    """A listener stops accepting at its share of the open files: the other listeners go on, and it does when clients
    have left."""
    with run_server({"name": "inference", "http": True}, {"name": "management"}, open_files=OPEN_FILES) as server:
        with idle(server.ports["inference"]):
            others = connect(server.ports["management"])
            for _ in range(20):
                assert others.unary("Unary", b"others") == b"others"
            assert open_files(server) < OPEN_FILES
        assert connect(server).unary("Unary", b"again", wait_for_ready=True) == b"again"
        server.drain(1.0)
        assert server.end()[1] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of another process is changed")
def test_a_listener_without_descriptors_serves_again(run_server, connect):
    """Something else than its clients took the descriptors."""
    with run_server(open_files=OPEN_FILES) as server:
        usual = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (open_files(server), usual[1]))
        with socket.create_connection(("127.0.0.1", server.port)) as refused:
            refused.settimeout(GUARD_S)
            with contextlib.suppress(ConnectionResetError, TimeoutError):
                refused.settimeout(0.5)
                refused.recv(1)
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, usual)
        assert connect(server).unary("Unary", b"again", wait_for_ready=True) == b"again"
        server.drain(1.0)
        assert server.end()[1] == 0
