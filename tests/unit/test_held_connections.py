"""Connections that are held while a server closes them."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from ts_frontend.listeners import sockets as connections
from ts_frontend.listeners.listener import Listener

ANSWER = bytes(1_000_000)

pytestmark = pytest.mark.skipif(not connections.DESCRIPTORS.exists(), reason="the system lists no descriptors")


@pytest.fixture
def link():
    """(client, server): a connection whose client takes little at a time."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listener.getsockname())
        server, _ = listener.accept()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, len(ANSWER))
    with client, server:
        yield client, server


def answer_and_close(client: socket.socket, server: socket.socket) -> None:
    """Closes a connection as grpcio does, with unread bytes of the client."""
    server.setblocking(False)
    assert server.send(ANSWER) == len(ANSWER)
    client.sendall(b"a ping")
    server.shutdown(socket.SHUT_RDWR)
    server.close()


def received(client: socket.socket) -> int:
    count = 0
    while data := client.recv(65536):
        count += len(data)
    return count


async def received_while_released(client: socket.socket, held: list[socket.socket]) -> int:
    reading = asyncio.create_task(asyncio.to_thread(_read_and_close, client))
    await connections.release(held, 60)
    return await reading


def _read_and_close(client: socket.socket) -> int:
    count = received(client)
    client.close()
    return count


def test_an_answer_is_lost_without_it(link):
    """The reason for this module; should Linux ever behave differently, it can be removed."""
    client, server = link
    answer_and_close(client, server)
    with pytest.raises(ConnectionResetError):
        received(client)


def test_a_held_connection_gets_its_answer(link):
    client, server = link
    held = connections.hold({server.getsockname()[1]})
    assert len(held) == 1
    answer_and_close(client, server)
    assert asyncio.run(received_while_released(client, held)) == len(ANSWER)
    assert held[0].fileno() == -1


def test_only_connections_to_the_ports_are_held(link):
    client, server = link
    before = set(os.listdir(connections.DESCRIPTORS))
    assert connections.hold({client.getsockname()[1] ^ 1, 1}) == []
    assert set(os.listdir(connections.DESCRIPTORS)) == before


def test_a_client_that_never_closes_is_not_waited_for(link):
    client, server = link
    held = connections.hold({server.getsockname()[1]})
    server.shutdown(socket.SHUT_RDWR)
    asyncio.run(connections.release(held, 0.05))
    assert held[0].fileno() == -1
    assert client.recv(1) == b""


def test_the_socket_of_a_killed_server_is_removed_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
        killed.listen()
    with caplog.at_level("INFO"):
        listening = connections.listen(Listener("http_inference", "", 0, {}, path=str(path)))
        listening.close()
        connections.listen(Listener("http_inference", "", 0, {}, path=str(path))).close()
    assert caplog.messages == [f"http_inference: removed {path}, the socket of a server that has ended"]
