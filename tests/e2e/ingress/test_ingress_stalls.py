"""Clients that stop reading while they are answered: they are disconnected after `write_timeout_s`, their work ends,
and nobody else notices. HTTP/1.1 and HTTP/2."""

from __future__ import annotations

import itertools
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import grpc
import pytest

from ts_frontend.transport.connection import LINGER_S_MAX

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


@pytest.mark.parametrize("half", [False, True])
def test_an_answer_that_is_the_last_of_its_connection_is_read_as_slowly_as_its_client_likes(
    run_server: Callable[..., AbstractContextManager[Any]], half: bool
) -> None:
    """It is larger than what the system takes, and the client begins to read after the time that it has for closing the
    connection. `half`: it closed its own half at once."""
    size = 20_000_000
    head = f"GET /zeros/{size} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    with run_server({"name": "test", "http": True}) as server, raw(server, head) as sock:
        if half:
            sock.shutdown(socket.SHUT_WR)
        look = select.poll()
        look.register(sock, 0)  # a broken connection is told without being asked for
        assert not look.poll(1500 * LINGER_S_MAX), "the connection broke"
        answer = b"".join(iter(lambda: sock.recv(1 << 20), b""))
        assert len(answer.partition(b"\r\n\r\n")[2]) == size
