"""Who has left, as the kernel tells it of this process's connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import struct
import sys
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support import GUARD_S, until_async
from ts_frontend.http.departures import LOOKS_MAX, Departures, Lingering, Watched, connection_of, connections

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells")


class Port:
    """A port of this process."""

    def __init__(self, stack: contextlib.ExitStack, family: socket.AddressFamily = socket.AF_INET) -> None:
        self._stack = stack
        host = "127.0.0.1" if family == socket.AF_INET else "::1"
        self._listener = stack.enter_context(socket.create_server((host, 0), family=family))
        self.number: int = self._listener.getsockname()[1]

    def connect(self) -> tuple[socket.socket, socket.socket]:
        """The client's end of a connection, and the server's."""
        client = self._stack.enter_context(socket.create_connection(self._listener.getsockname()[:2]))
        return client, self._stack.enter_context(self._listener.accept()[0])

    def watch(self, departures: Departures, client: socket.socket, act: Callable[[], None]) -> Watched:
        host, number = client.getsockname()[:2]
        one = departures.watch((host, number), self.number, act)
        assert one is not None
        return one


def test_what_lingers_is_called_once_and_what_left_never_is() -> None:
    async def scenario() -> None:
        lingering, called = Lingering(0.01), []
        ended = asyncio.Event()

        def stays() -> None:
            called.append("stays")
            lingering.add(later)

        def later() -> None:
            called.append("later")
            ended.set()

        def leaves() -> None:
            called.append("leaves")

        for act in (stays, leaves):
            lingering.add(act)
        lingering.discard(leaves)
        lingering.discard(leaves)
        await asyncio.wait_for(ended.wait(), GUARD_S)
        assert called == ["stays", "later"]
        ended.clear()
        lingering.add(later)  # its timer had stopped
        await asyncio.wait_for(ended.wait(), GUARD_S)
        assert called == ["stays", "later", "later"]

    asyncio.run(scenario())


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def half_close(client: socket.socket) -> None:
    client.shutdown(socket.SHUT_WR)


@pytest.fixture
def port() -> Iterator[Port]:
    with contextlib.ExitStack() as stack:
        yield Port(stack)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, GUARD_S))


@pytest.mark.parametrize("leave", [socket.socket.close, reset, half_close])
def test_a_client_that_leaves_is_told_once(port: Port, leave: Callable[[socket.socket], None]) -> None:
    async def scenario() -> None:
        departures = Departures()
        gone: list[str] = []
        for name, (client, _) in {"leaves": (pair := port.connect()), "stays": port.connect()}.items():
            port.watch(departures, client, partial(gone.append, name))
        await until_async(lambda: not departures._unknown)
        leave(pair[0])
        await until_async(lambda: gone)
        other = asyncio.Event()  # one more round: nothing else has come by then
        client, _ = port.connect()
        port.watch(departures, client, other.set)
        client.close()
        await other.wait()
        assert gone == ["leaves"]

    run(scenario())


def test_who_left_before_the_first_look_is_told(port: Port) -> None:
    async def scenario() -> None:
        gone = asyncio.Event()
        client, _ = port.connect()
        port.watch(Departures(), client, gone.set)
        client.close()
        await gone.wait()

    run(scenario())


def test_what_has_sent_bytes_that_nobody_reads_is_there(port: Port) -> None:
    async def scenario() -> None:
        departures, gone = Departures(), asyncio.Event()
        client, _ = port.connect()
        port.watch(departures, client, gone.set)
        await until_async(lambda: not departures._unknown)
        client.sendall(b"the next request")
        other, _ = port.connect()
        left = asyncio.Event()
        port.watch(departures, other, left.set)
        other.close()
        await left.wait()
        assert not gone.is_set()

    run(scenario())


def test_a_known_connection_needs_no_further_look(port: Port) -> None:
    async def scenario() -> None:
        departures = Departures()
        client, _ = port.connect()
        departures.forget(port.watch(departures, client, lambda: None))
        assert not departures._unknown and not departures._watched
        departures.forget(port.watch(departures, client, lambda: None))
        one = port.watch(departures, client, lambda: None)
        await until_async(lambda: not departures._unknown)
        departures.forget(one)
        gone = asyncio.Event()
        port.watch(departures, client, gone.set)
        assert not departures._unknown
        client.close()
        await gone.wait()

    run(scenario())


def test_a_connection_that_was_told_is_followed_again(port: Port) -> None:
    """A client may close its own half and go on reading: each of its requests counts as left."""

    async def scenario() -> None:
        departures = Departures()
        client, _ = port.connect()
        half_close(client)
        for _ in range(3):
            gone = asyncio.Event()
            port.watch(departures, client, gone.set)
            await gone.wait()

    run(scenario())


def test_a_descriptor_of_another_connection_by_now_says_nothing_of_the_former_one(port: Port) -> None:
    async def scenario() -> None:
        departures, gone = Departures(), asyncio.Event()
        first, served = port.connect()
        port.watch(departures, first, gone.set)
        await until_async(lambda: not departures._unknown)
        second, again = port.connect()
        number = served.detach()
        os.dup2(again.fileno(), number)  # the engine has closed its end, and taken another connection
        again.close()
        left = asyncio.Event()
        port.watch(departures, second, left.set)
        second.close()
        await left.wait()
        assert not gone.is_set()
        os.close(number)

    run(scenario())


def test_what_is_not_found_is_not_said_to_have_left(port: Port) -> None:
    """Its address may be the one that a proxy reports."""

    async def scenario() -> None:
        departures, gone = Departures(look_every_s=0.001), asyncio.Event()
        one = departures.watch(("192.0.2.1", 5), port.number, gone.set)
        assert one is not None
        await until_async(lambda: not departures._unknown)
        assert one.looks == LOOKS_MAX and not gone.is_set()
        departures.forget(one)
        assert not departures._watched

    run(scenario())


def test_descriptors_that_are_not_listed_say_nothing(port: Port, tmp_path: Path) -> None:
    async def scenario() -> None:
        departures, gone = Departures(tmp_path / "none", look_every_s=0.001), asyncio.Event()
        client, _ = port.connect()
        port.watch(departures, client, gone.set)
        client.close()
        await until_async(lambda: not departures._unknown)
        assert not gone.is_set()

    run(scenario())


def test_nobody_looks_when_nobody_is_watched(port: Port) -> None:
    async def scenario() -> None:
        departures = Departures(look_every_s=0.001)
        client, _ = port.connect()
        one = port.watch(departures, client, lambda: None)
        assert departures._looking is not None
        departures.forget(one)
        await departures._looking
        assert departures.watch(("a name", 5), port.number, lambda: None) is None

    run(scenario())


def test_only_connections_have_addresses_of_connections(port: Port, tmp_path: Path) -> None:
    client, served = port.connect()
    ours = {number: key for key, number in connections()}
    assert ours[served.fileno()].own_port == port.number and ours[client.fileno()].port == port.number
    with contextlib.ExitStack() as stack:
        file = stack.enter_context((tmp_path / "file").open("w"))
        pair = [stack.enter_context(one) for one in socket.socketpair()]
        things: tuple[Any, ...] = (file, *pair, port._listener)
        assert [connection_of(thing.fileno()) for thing in things] == [None] * 4
        number = file.fileno()
    assert connection_of(number) is None


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


#: Of each family, as far as this process may have descriptors.
EACH = min(500, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200) // 4)


def test_hundreds_of_clients_over_both_families() -> None:
    """Every third one leaves, half of those with a reset: exactly those count as gone."""

    async def scenario(clients: list[tuple[Port, socket.socket]]) -> None:
        departures = Departures()
        gone: list[int] = []
        for number, (port, client) in enumerate(clients):
            port.watch(departures, client, partial(gone.append, number))
        await until_async(lambda: not departures._unknown)
        leaving = list(range(0, len(clients), 3))
        for number in leaving:
            (reset if number % 2 else socket.socket.close)(clients[number][1])
        await until_async(lambda: len(gone) >= len(leaving))
        assert sorted(gone) == leaving

    with contextlib.ExitStack() as stack:
        families = [socket.AF_INET, socket.AF_INET6] if has_ipv6() else [socket.AF_INET]
        ports = [Port(stack, family) for family in families]
        run(scenario([(port, port.connect()[0]) for port in ports for _ in range(EACH)]))
