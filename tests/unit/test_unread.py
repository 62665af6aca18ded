"""All answers that wait for clients share a limit: the connection that holds most makes room. A client that takes
nothing of an answer loses it. The connections are real ones, on pairs of sockets."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import h2.connection
import h2.events
import pytest
from h2.settings import SettingCodes

import ts_frontend.transport.limits
from support import until_async
from ts_frontend.transport.connection import Connection, Server
from ts_frontend.transport.limits import RETURNED_BYTES_MIN, Arriving, ListenerLimits, Unread, drained
from ts_frontend.transport.stream import Stream

BODY = bytes(range(256)) * 400
SIZE = len(BODY)
HEAD = [(":method", "POST"), (":scheme", "http"), (":authority", "a"), (":path", "/")]
#: More than the socket of a client of HTTP/1.1 takes.
LARGE_BYTES = 2 * RETURNED_BYTES_MIN
OPEN_WINDOW = 1 << 30


class Client:
    """A client of HTTP/2 that takes only what it asks for. `bodies` and `resets` are by stream."""

    def __init__(self, sock: socket.socket, window: int) -> None:
        self.sock = sock
        self.bodies: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self.resets: dict[int, int] = {}
        self._http = h2.connection.H2Connection()
        self._http.initiate_connection()
        self._http.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: window})
        self._http.increment_flow_control_window(OPEN_WINDOW)
        self._listening = asyncio.create_task(self._listen())

    def ask(self) -> int:
        """Returns the number of the request's stream."""
        number = self._http.get_next_available_stream_id()
        self.bodies[number] = b""
        self._http.send_headers(number, HEAD, end_stream=True)
        self._send()
        return number

    def take(self, number: int, size: int = OPEN_WINDOW) -> None:
        """Takes so many bytes more of an answer."""
        self._http.increment_flow_control_window(size, number)
        self._send()

    def _send(self) -> None:
        self.sock.sendall(self._http.data_to_send())

    async def _listen(self) -> None:
        while data := await asyncio.get_running_loop().sock_recv(self.sock, 1 << 16):
            for event in self._http.receive_data(data):
                if isinstance(event, h2.events.DataReceived) and event.stream_id is not None:
                    self.bodies[event.stream_id] += event.data or b""
                elif isinstance(event, h2.events.StreamEnded) and event.stream_id is not None:
                    self.ended.add(event.stream_id)
                elif isinstance(event, h2.events.StreamReset) and event.stream_id is not None:
                    self.resets[event.stream_id] = int(event.error_code or 0)

    async def whole(self, number: int) -> None:
        """An answer arrives to its end."""
        await until_async(lambda: number in self.ended)
        assert self.bodies[number] == BODY

    async def close(self) -> None:
        self._listening.cancel()
        with suppress(asyncio.CancelledError):
            await self._listening
        self.sock.close()


class Place:
    """A server whose answers have this body, without listening sockets."""

    def __init__(self, unread: Unread, body: bytes) -> None:
        self._body = body
        self.server = Server("test", ListenerLimits(unread=unread), self._answer)
        self.clients: list[Client] = []
        self.socks: list[socket.socket] = []

    async def _answer(self, stream: Stream) -> None:
        stream.respond(200, (), self._body)
        if stream.queued:
            await drained(stream)

    async def connection(self) -> socket.socket:
        """The client's end."""
        ours, theirs = socket.socketpair()
        self.socks.append(theirs)
        theirs.setblocking(False)
        make: Callable[[], Any] = lambda: Connection(self.server, ours, tls=False)  # noqa: E731
        await asyncio.get_running_loop().connect_accepted_socket(make, ours)
        return theirs

    async def client(self, window: int = 0) -> Client:
        self.clients.append(Client(await self.connection(), window))
        return self.clients[-1]


@asynccontextmanager
async def serving(unread: Unread, body: bytes = BODY) -> AsyncIterator[Place]:
    place = Place(unread, body)
    try:
        yield place
    finally:
        for client in place.clients:
            await client.close()
        for sock in place.socks:
            sock.close()
        await until_async(lambda: not place.server.connections)
    assert (unread.bytes, len(unread)) == (0, 0)


async def until_waiting(unread: Unread, size: int) -> None:
    await until_async(lambda: unread.bytes == size, lambda: unread.bytes)


async def test_an_answer_that_is_alone_is_never_given_up_for_its_size() -> None:
    unread = Unread(10)
    async with serving(unread) as place:
        client = await place.client()
        number = client.ask()
        await until_waiting(unread, SIZE)
        client.take(number)
        await client.whole(number)
    assert unread.given_up == {"bytes": 0, "time": 0}


async def test_answers_that_clients_take_at_once_are_not_counted() -> None:
    unread = Unread(0)
    async with serving(unread) as place:
        clients = [await place.client(SIZE) for _ in range(2)]
        for _ in range(5):
            numbers = [client.ask() for client in clients]
            for client, number in zip(clients, numbers, strict=True):
                await client.whole(number)
    assert unread.given_up == {"bytes": 0, "time": 0}


@pytest.mark.parametrize("shared", [False, True])
async def test_answers_of_which_nothing_is_taken_are_given_up_and_others_wait_on(shared: bool) -> None:
    """Those of a dead client; `shared`: those of a client that takes only of another answer."""
    unread = Unread(stall_s=0.4)
    async with serving(unread) as place:
        dead, slow = await place.client(), await place.client()
        dead = slow if shared else dead
        stalled, moving = {dead.ask(), dead.ask()}, slow.ask()

        def gone() -> bool:
            slow.take(moving, 1)
            return dead.resets.keys() == stalled

        await until_async(gone)
        assert unread.given_up == {"bytes": 0, "time": 2} and moving not in slow.resets
        slow.take(moving)
        await slow.whole(moving)


@pytest.mark.parametrize("reason", ["bytes", "time"])
async def test_a_client_of_http1_that_does_not_read_loses_its_connection(reason: str) -> None:
    """What its socket doesn't take counts, too."""
    limits = {"bytes": (LARGE_BYTES, 0.0), "time": (math.inf, 0.4)}
    unread = Unread(*limits[reason])
    async with serving(unread, bytes(LARGE_BYTES)) as place:
        socks = [await place.connection() for _ in range(2)]
        for sock in socks:
            sock.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            await until_async(lambda: unread.bytes > 0)
        lost = 1 if reason == "bytes" else 2
        await until_async(lambda: len(place.server.connections) == 2 - lost)
        assert unread.given_up == {"bytes": 0, "time": 0} | {reason: lost}


@pytest.mark.parametrize("kind", ["unread", "arriving", "given up"])
async def test_freed_memory_is_returned(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The C library's function itself is part of the operating system: e2e/test_unread_answers.py sees its effect."""
    returned: list[int] = []
    monkeypatch.setattr(ts_frontend.transport.limits, "_trim", lambda: returned.append)
    monkeypatch.setattr(ts_frontend.transport.limits, "RETURN_S", 0.01)
    if kind == "arriving":
        body = Arriving().body()
        body.hold(LARGE_BYTES)
        body.end()
        await until_async(lambda: returned[:1] == [0])
        return
    size = RETURNED_BYTES_MIN // 2 if kind == "given up" else RETURNED_BYTES_MIN
    unread = Unread(size if kind == "given up" else math.inf)
    async with serving(unread, bytes(size)) as place:
        client = await place.client()
        client.ask()
        await until_waiting(unread, size)
        assert not returned
        if kind == "unread":
            await client.close()
        else:
            for count in (1, 2):  # as much waits as before
                client.ask()
                await until_async(lambda: unread.given_up["bytes"] == count)  # noqa: B023 - it is awaited here
                await until_waiting(unread, size)
        await until_async(lambda: returned[:1] == [0])
