"""Who has left, read from the kernel's tables of connections."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import struct
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ts_frontend.http.departures import ConnectionKey, Departures, Lingering, Watched, read_table

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
REST = "00000000:00000000 00:00000000 00000000     0        0 1 1 0 20 4 30 10 -1\n"
GUARD_S = 20


def line(local: str, remote: str, state: str) -> str:
    return f"   0: {local} {remote} {state} {REST}"


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


def test_tables_are_read() -> None:
    text = (
        HEAD
        + line("0100007F:1F90", "00000000:0000", "0A")
        + line("0100007F:1F90", "0100007F:D431", "01")
        + line("0500000A:1F90", "0601A8C0:0016", "08")
        + line("0100007F:1F91", "0100007F:D432", "01")
        + line("00000000000000000000000001000000:1F90", "00000000000000000000000001000000:D433", "01")
        + line("0000000000000000FFFF00000100007F:1F90", "0000000000000000FFFF00000100007F:D434", "06")
    )
    local = socket.inet_pton(socket.AF_INET, "127.0.0.1")
    assert dict(read_table(text, {8080})) == {
        ConnectionKey(b"\0\0\0\0", 0, 8080): "0A",
        ConnectionKey(local, 0xD431, 8080): "01",
        ConnectionKey(socket.inet_pton(socket.AF_INET, "192.168.1.6"), 22, 8080): "08",
        ConnectionKey(socket.inet_pton(socket.AF_INET6, "::1"), 0xD433, 8080): "01",
        ConnectionKey(local, 0xD434, 8080): "06",
    }
    assert list(read_table(HEAD, {8080})) == []


class Table:
    """A file in place of the kernel's table."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def says(self, *states: str) -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_text(HEAD + "".join(line("0100007F:1F90", "0100007F:D431", state) for state in states))
        fresh.replace(self.path)


async def left(table: Table, *steps: Callable[[], None]) -> bool:
    """Whether the client counts as gone after these steps, each of which is seen."""
    departures = Departures((table.path,), look_every_s=0.001)
    gone = asyncio.Event()
    assert departures.watch(("127.0.0.1", 0xD431), 8080, gone.set) is not None
    for step in steps:
        step()
        seen = departures._states
        looked = asyncio.Event()
        loop = asyncio.get_running_loop()
        looks = 0

        def look(ports: set[int]) -> dict[ConnectionKey, str] | None:
            nonlocal looks
            states = seen(ports)  # noqa: B023 - called in this round only
            looks += 1
            if looks == 3:
                loop.call_soon_threadsafe(looked.set)  # noqa: B023
            return states

        departures._states = look  # type: ignore[method-assign]
        waits = [asyncio.ensure_future(looked.wait()), asyncio.ensure_future(gone.wait())]
        await asyncio.wait_for(asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED), GUARD_S)
        for wait in waits:
            wait.cancel()
        departures._states = seen  # type: ignore[method-assign]
    return gone.is_set()


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([("01",)], False),
        ([("01",), ("08",)], True),
        ([("01",), ()], True),
        ([()], False),
        ([("08",)], True),
    ],
)
def test_a_client_has_left_when_its_connection_was_there(
    states: list[tuple[str, ...]], expected: bool, tmp_path: Path
) -> None:
    """What was never there may be rewritten by a proxy."""
    table = Table(tmp_path / "tcp")
    table.says("01" if states[0] == ("01",) else "0A")
    steps = [lambda state=state: table.says(*state) for state in states]  # type: ignore[misc]
    assert asyncio.run(left(table, *steps)) is expected


def test_a_table_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    """As when no descriptor is left: nobody's request is cancelled for it."""
    table = Table(tmp_path / "tcp")
    table.says("01")

    def unreadable() -> None:
        table.path.rename(tmp_path / "away")
        table.path.mkdir()

    assert asyncio.run(left(table, lambda: table.says("01"), unreadable)) is False


def test_one_look_may_miss_a_connection(tmp_path: Path) -> None:
    departures = Departures((tmp_path / "tcp",))
    one = Watched(ConnectionKey(b"host", 1, 2), lambda: None)
    there, away = {one.connection: "01"}, dict[ConnectionKey, str]()
    assert [departures._has_left(one, states) for states in (there, away, there, away, away)] == [False] * 4 + [True]


def test_nobody_looks_when_nobody_is_watched(tmp_path: Path) -> None:
    async def scenario() -> None:
        departures = Departures((tmp_path / "none",), look_every_s=0.001)
        one = departures.watch(("127.0.0.1", 5), 8080, lambda: None)
        assert one is not None and departures._looking is not None
        departures.forget(one)
        await asyncio.wait_for(departures._looking, GUARD_S)
        assert departures.watch(("a name", 5), 8080, lambda: None) is None

    asyncio.run(scenario())


#: Of each family, as far as this process may have descriptors.
EACH = min(1000, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200) // 4)
HOSTS = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]


def crowd(family: socket.AddressFamily, host: str, stack: contextlib.ExitStack) -> list[tuple[socket.socket, int]]:
    """EACH clients of a port, each with it."""
    listener = stack.enter_context(socket.create_server((host, 0), family=family, backlog=EACH))
    address = listener.getsockname()
    clients = []
    for _ in range(EACH):
        clients.append((stack.enter_context(socket.create_connection(address[:2])), address[1]))
        stack.enter_context(listener.accept()[0])
    return clients


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's tables")
def test_thousands_of_clients_over_both_families() -> None:
    """Every third one leaves, half of those with a reset: exactly those count as gone."""

    async def scenario(clients: list[tuple[socket.socket, int]]) -> None:
        departures = Departures(look_every_s=0.001)
        gone: list[int] = []
        for number, (client, own_port) in enumerate(clients):
            host, port = client.getsockname()[:2]
            assert departures.watch((host, port), own_port, partial(gone.append, number)) is not None
        while not all(one.seen for one in departures._watched):  # noqa: ASYNC110 - a look by another thread
            await asyncio.sleep(0.01)
        leaving = list(range(0, len(clients), 3))
        for number in leaving:
            if number % 2:
                clients[number][0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            clients[number][0].close()
        while len(gone) < len(leaving):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # some more looks
        assert sorted(gone) == leaving
        for one in list(departures._watched):
            departures.forget(one)

    with contextlib.ExitStack() as stack:
        hosts = HOSTS if has_ipv6() else HOSTS[:1]
        clients = [client for family, host in hosts for client in crowd(family, host, stack)]
        asyncio.run(asyncio.wait_for(scenario(clients), 60))
