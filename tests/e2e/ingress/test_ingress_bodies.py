"""Large bodies, which are read into their places: whole, cut anywhere, with a request right behind, and broken off."""

from __future__ import annotations

import os
import random
import socket
import ssl
import struct
from collections.abc import Iterator

import grpc
import pytest

from support import GUARD_S, until

LIMIT = 6_553_500
SIZES = (65_535, 65_536, 65_537, 300_000, 1 << 20, LIMIT)


@pytest.fixture(scope="module")
def server(running_server, certificates):
    files = {"certificate_file": str(certificates / "server.crt"), "key_file": str(certificates / "server.key")}
    plain = {"name": "plain", "http": True}
    with running_server(plain, {"name": "tls", "http": True, "tls": files}) as one:
        yield one


@pytest.fixture(params=["plain", "tls"])
def wire(request, server) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.ports[request.param]), GUARD_S) as plain:
        if request.param == "plain":
            yield plain
        else:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            with context.wrap_socket(plain) as secured:
                yield secured


def request(body: bytes, *more: str) -> bytes:
    lines = ["POST /echo HTTP/1.1", "Host: a", f"Content-Length: {len(body)}", *more]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Answers:
    """The answers on a connection, one after the other."""

    def __init__(self, wire: socket.socket) -> None:
        self._wire, self._rest = wire, b""

    def next(self) -> tuple[int, bytes]:
        while b"\r\n\r\n" not in self._rest:
            self._read()
        head, _, self._rest = self._rest.partition(b"\r\n\r\n")
        size = next(int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"content-length: "))
        while len(self._rest) < size:
            self._read()
        body, self._rest = self._rest[:size], self._rest[size:]
        return int(head.split()[1]), body

    def _read(self) -> None:
        data = self._wire.recv(1 << 20)
        assert data, "the connection has ended"
        self._rest += data


def test_bodies_of_all_sizes_one_after_the_other(wire):
    answers = Answers(wire)
    for size in (*SIZES, 3):
        body = os.urandom(size)
        wire.sendall(request(body))
        assert answers.next() == (200, body)


def test_a_request_right_behind_a_large_body(wire):
    """The end of the body, and all of the next requests, are in one piece."""
    first, second, third = os.urandom(200_001), os.urandom(5), os.urandom(100_000)
    data = request(first) + request(second) + request(third)
    answers = Answers(wire)
    for cut in (len(request(first)) - 1, len(request(first)), 70_000):
        wire.sendall(data[:cut])
        wire.sendall(data[cut:])
        assert [answers.next() for _ in range(3)] == [(200, first), (200, second), (200, third)]


def test_a_body_in_pieces_of_any_size(wire):
    chance = random.Random(7)
    body = os.urandom(400_000)
    data, answers = request(body), Answers(wire)
    while data:
        count = chance.choice((1, 10, 1000, 30_000, 100_000))
        wire.sendall(data[:count])
        data = data[count:]
    assert answers.next() == (200, body)


def test_a_client_that_waits_before_its_body(wire):
    body = os.urandom(300_000)
    wire.sendall(request(body, "Expect: 100-continue")[: -len(body)])
    assert wire.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
    wire.sendall(body)
    assert Answers(wire).next() == (200, body)


def test_clients_that_leave_within_their_bodies(server):
    """The server takes the next bodies, and counts nothing of the former."""
    port = server.ports["plain"]
    for sent in (100, 70_000, 500_000):
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", port), GUARD_S) as leaving:
                leaving.sendall(request(bytes(1 << 20))[:sent])
    body = os.urandom(1 << 20)
    with socket.create_connection(("127.0.0.1", port), GUARD_S) as staying:
        answers = Answers(staying)
        staying.sendall(request(body))
        assert answers.next() == (200, body)

        def arriving() -> int:
            staying.sendall(b"GET /arriving HTTP/1.1\r\nHost: a\r\n\r\n")
            return int(answers.next()[1])

        until(lambda: arriving() == 0)


@pytest.mark.parametrize("encoding", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_grpc_messages_of_all_sizes(server, connect, encoding):
    client = connect(server.ports["plain"])
    for size in (*(size - 5 for size in SIZES), 3):
        body = os.urandom(size // 2) + bytes(size - size // 2)
        assert client.unary("Unary", body, compression=encoding) == body


def test_large_messages_of_a_stream(server, connect):
    messages = [os.urandom(size) for size in (10, 200_000, 70_000, 3, 1 << 20, 0, 66_000)]
    answers = connect(server.ports["plain"]).bidi("Bidi", iter(messages))
    assert list(answers) == [message for message in messages for _ in range(2)]


def test_a_request_that_ends_inside_a_large_message(raw_call):
    answer = raw_call("Unary", struct.pack(">BI", 0, 100_000) + bytes(50_000))
    assert answer.status == "13"
    assert "after 50005 of its bytes" in answer.headers["grpc-message"]
