"""Clients that stop reading while they are answered: they are disconnected after `write_timeout_s`, their work ends,
and nobody else notices. HTTP/1.1 and HTTP/2."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import grpc
import pytest

LIMIT_S = 1.0
GUARD_S = 60
_names = itertools.count()


@pytest.fixture(scope="module")
def strict(running_server: Callable[..., AbstractContextManager[Any]]) -> Iterator[Any]:
    """Clients may take nothing for LIMIT_S."""
    with running_server({"name": "test", "http": True, "limits": {"write_s_max": LIMIT_S}}) as one:
        yield one


@pytest.fixture
def name() -> str:
    return f"stalled{next(_names)}"


def raw(server: Any, sent: bytes) -> socket.socket:
    """A connection with hardly any room for answers, which nobody reads."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(GUARD_S)
    sock.connect(("127.0.0.1", server.port))
    sock.sendall(sent)
    return sock


def test_a_stream_that_is_not_read_is_reset_and_the_others_of_its_connection_go_on(
    strict: Any, connect: Callable[..., Any], name: str
) -> None:
    """A gRPC client reads its connection all the time: only the stream's window is closed."""
    client = connect(strict)
    stalled = client.stream("Endless", name.encode())
    client.wait(f"{name} closed")
    assert client.unary("Unary", b"still here") == b"still here"
    with pytest.raises(grpc.RpcError) as ended:
        for _ in stalled:
            pass
    assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_an_http1_stream_whose_connection_is_not_read_is_disconnected(
    strict: Any, connect: Callable[..., Any], name: str
) -> None:
    with raw(strict, f"GET /endless/{name} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()) as sock:
        connect(strict).wait(f"{name} closed")
        with pytest.raises(ConnectionError):
            while sock.recv(1 << 20):
                pass
            raise ConnectionError  # an orderly end is an end, too
