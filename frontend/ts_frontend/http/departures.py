"""Clients of HTTP/1.1 that leave while they wait for an answer: h2corn tells that only of HTTP/2.

Linux knows: a connection whose client has closed it is in state CLOSE_WAIT, one that was reset is in no table any more.
One look at the tables serves all requests that are watched; nobody looks while none is. A client that closes only its
own half of the connection counts as gone, as it does with most servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from ts_frontend.tasks import kept

LOOK_EVERY_S = 0.5
#: An answer that takes no longer isn't watched.
WATCH_AFTER_S = 0.1
#: The kernel's tables are read in pieces, and one look may miss a connection while others come and go.
MISSED_MIN = 2
TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_ESTABLISHED, _CLOSE_WAIT = "01", "08"
_MAPPED = bytes(10) + b"\xff\xff"


class ConnectionKey(NamedTuple):
    """As the server sees it: the client's address and port, and the server's port."""

    host: bytes
    port: int
    own_port: int


class Watched:
    """A request whose client may leave. One that was never seen in the tables can't be said to have gone from them: its
    address may be what a proxy says."""

    __slots__ = ("act", "connection", "missed", "seen")

    def __init__(self, connection: ConnectionKey, act: Callable[[], None]) -> None:
        self.connection = connection
        self.act = act
        self.seen = False
        self.missed = 0  # looks in a row that didn't find it


class Lingering:
    """Calls what has been here for `after_s` to twice that: one timer for all, where each paid for one of its own and
    nearly all are gone before."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._young: dict[Callable[[], None], None] = {}
        self._old: dict[Callable[[], None], None] = {}
        self._ticking = False

    def add(self, act: Callable[[], None]) -> None:
        self._young[act] = None
        if not self._ticking:
            self._tick_later()

    def discard(self, act: Callable[[], None]) -> None:
        """It is called no more, if it is here at all."""
        self._young.pop(act, None)
        self._old.pop(act, None)

    def _tick_later(self) -> None:
        self._ticking = True
        asyncio.get_running_loop().call_later(self._after_s, self._tick)

    def _tick(self) -> None:
        due, self._old, self._young = self._old, self._young, {}
        self._ticking = False
        if self._old:
            self._tick_later()
        for act in due:
            act()


class Departures:
    """Calls back when the client of a watched request has left. `lingering` has the requests that aren't watched yet:
    whether a client is still there costs a task to find out."""

    def __init__(self, tables: tuple[Path, ...] = TABLES, look_every_s: float = LOOK_EVERY_S) -> None:
        self._tables = tables
        self._look_every_s = look_every_s
        self._watched: set[Watched] = set()
        self._looking: asyncio.Task[None] | None = None
        self.lingering = Lingering(WATCH_AFTER_S)

    def watch(self, client: tuple[str, int], own_port: int, act: Callable[[], None]) -> Watched | None:
        """Calls `act`, once, should the client leave before `forget`. None where addresses aren't those of IP."""
        host = packed(client[0])
        if host is None:
            return None
        one = Watched(ConnectionKey(host, client[1], own_port), act)
        self._watched.add(one)
        if self._looking is None or self._looking.done():
            self._looking = kept(self._look, "The look for clients that have left")
        return one

    def forget(self, one: Watched) -> None:
        self._watched.discard(one)

    async def _look(self) -> None:
        while self._watched:
            ports = {one.connection.own_port for one in self._watched}
            states = await asyncio.to_thread(self._states, ports)
            for one in list(self._watched):
                if states is not None and self._has_left(one, states):
                    self._watched.discard(one)
                    one.act()
            await asyncio.sleep(self._look_every_s)

    def _has_left(self, one: Watched, states: dict[ConnectionKey, str]) -> bool:
        state = states.get(one.connection)
        if state == _ESTABLISHED:
            one.seen, one.missed = True, 0
            return False
        one.missed += 1
        return state == _CLOSE_WAIT or (one.seen and one.missed >= MISSED_MIN)

    def _states(self, own_ports: set[int]) -> dict[ConnectionKey, str] | None:
        """None when a table that is there can't be read (no descriptor is left): that says nothing of anybody."""
        found: dict[ConnectionKey, str] = {}
        for table in self._tables:
            try:
                found.update(read_table(table.read_text(), own_ports))
            except FileNotFoundError:
                continue
            except OSError:
                return None
        return found


def read_table(text: str, own_ports: set[int]) -> Iterator[tuple[ConnectionKey, str]]:
    """The connections to `own_ports` in a table of the kernel, each with its state (proc(5): /proc/net/tcp)."""
    ends = {f":{port:04X}": port for port in own_ports}
    for line in text.splitlines()[1:]:
        _, local, remote, state, *_ = line.split(maxsplit=4)
        own_port = ends.get(local[-5:])
        if own_port is not None:
            address, _, port = remote.partition(":")
            yield ConnectionKey(_in_network_order(address), int(port, 16), own_port), state


def _in_network_order(text: str) -> bytes:
    """An address as the tables have it: words of 32 bits in the machine's order, which is little-endian."""
    raw = bytes.fromhex(text)
    words = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    return words.removeprefix(_MAPPED) if len(words) == 16 else words


def packed(host: str) -> bytes | None:
    """An address as `ConnectionKey` has it; None for what is none of IP."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            packed = socket.inet_pton(family, host.partition("%")[0])
            return packed.removeprefix(_MAPPED) if len(packed) == 16 else packed
    return None
