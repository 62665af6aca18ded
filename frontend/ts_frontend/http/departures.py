"""Detects HTTP/1.1 clients that disconnect while they wait for an answer; h2corn reports it only for HTTP/2.

Linux reports it to epoll (EPOLLRDHUP) without taking bytes from the engine that reads the connection. The engine runs
in this process: a scan of its descriptors finds the connections of the watched requests, once for each connection. As
in most servers, a client that shuts down only its sending side counts as gone. A client that resets its connection
before the first scan isn't found, and counts as connected."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from ts_frontend.tasks import kept

DESCRIPTORS = Path("/proc/self/fd")
LOOK_EVERY_S = 0.01
#: Seconds before a request is watched, since watching costs more than a short answer. The watch begins after at most
#: twice as long.
WATCH_AFTER_S = 0.0075
#: The pause between two scans, as a multiple of a scan's duration.
REST_FACTOR: Final = 10
#: A connection that this many scans didn't find isn't ours: a proxy reports its client's address.
LOOKS_MAX: Final = 2
_MAPPED: Final = bytes(10) + b"\xff\xff"
#: The peer's shutdown, reported once. Zero on systems without epoll.
_ENDS: Final[int] = getattr(select, "EPOLLRDHUP", 0) | getattr(select, "EPOLLET", 0)


class ConnectionKey(NamedTuple):
    """A TCP connection: the client's address and port, and the server's port."""

    host: bytes
    port: int
    own_port: int


class Watched:
    """A watched request. `looks`: the number of scans that didn't find its connection."""

    __slots__ = ("act", "connection", "looks")

    def __init__(self, connection: ConnectionKey, act: Callable[[], None]) -> None:
        self.connection = connection
        self.act = act
        self.looks = 0


class Lingering:
    """Calls each added function after `after_s` to twice `after_s` seconds, unless it was discarded before. All
    functions share one timer, which costs less than one each: most are discarded in time."""

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
        """Removes a function that wasn't called yet; does nothing for others."""
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
    """Calls a function when the client of a watched request disconnects. `lingering`: delays the watch of new
    requests."""

    def __init__(self, descriptors: Path = DESCRIPTORS, look_every_s: float = LOOK_EVERY_S) -> None:
        self._descriptors = descriptors
        self._look_every_s = look_every_s
        self._watched: dict[ConnectionKey, set[Watched]] = {}
        self._unknown: set[Watched] = set()
        self._looking: asyncio.Task[None] | None = None
        self.lingering = Lingering(WATCH_AFTER_S)
        #: The watched connections and their descriptors, both ways. They stay watched between requests.
        self._numbers: dict[ConnectionKey, int] = {}
        self._keys: dict[int, ConnectionKey] = {}
        self._events = _Events(self._left) if sys.platform == "linux" else None

    def watch(self, client: tuple[str, int], own_port: int, act: Callable[[], None]) -> Watched | None:
        """Calls `act`, once, if the client disconnects before `forget`. Returns None if that can't be detected: for
        clients without an IP address, and outside Linux."""
        host = packed(client[0])
        if host is None or self._events is None:
            return None
        one = Watched(ConnectionKey(host, client[1], own_port), act)
        self._watched.setdefault(one.connection, set()).add(one)
        number = self._numbers.get(one.connection)
        if number is None or not self._events.again(number):
            self._unknown.add(one)
            if self._looking is None or self._looking.done():
                self._looking = kept(self._look, "The scan for connections of watched requests")
        return one

    def forget(self, one: Watched) -> None:
        self._unknown.discard(one)
        others = self._watched.get(one.connection)
        if others is not None:
            others.discard(one)
            if not others:
                del self._watched[one.connection]

    async def _look(self) -> None:
        while self._unknown:
            begun_s = time.monotonic()
            wanted = {one.connection for one in self._unknown}
            found = await asyncio.to_thread(self._found, wanted)
            for key, number in found.items():
                self._follow(key, number)
            for one in list(self._unknown):
                one.looks += 1
                if one.connection in found or one.looks >= LOOKS_MAX:
                    self._unknown.discard(one)
            took_s = time.monotonic() - begun_s
            await asyncio.sleep(max(self._look_every_s, REST_FACTOR * took_s))

    def _found(self, wanted: set[ConnectionKey]) -> dict[ConnectionKey, int]:
        return {key: number for key, number in connections(self._descriptors) if key in wanted}

    def _follow(self, key: ConnectionKey, number: int) -> None:
        """Watches a connection; an end that came before is reported, too."""
        assert self._events is not None
        if connection_of(number) not in (key, None):
            return  # closed since the scan, and its number was reused
        former = self._keys.get(number)
        if former is not None and self._numbers.get(former) == number:
            del self._numbers[former]
        with contextlib.suppress(OSError):  # closed since the scan
            self._events.follow(number)
            self._keys[number], self._numbers[key] = key, number

    def _left(self, number: int) -> None:
        """Handles the disconnection reported for this descriptor."""
        key = self._keys.pop(number, None)
        if key is None:
            return
        if self._numbers.get(key) == number:
            del self._numbers[key]
        if connection_of(number) in (key, None):  # else the number was reused; None: it was reset
            for one in self._watched.pop(key, ()):
                one.act()


class _Events:
    """epoll within the running loop: reports once for each connection that its peer has closed it."""

    def __init__(self, left: Callable[[int], None]) -> None:
        self._left = left
        self._epoll: select.epoll | None = None

    def follow(self, number: int) -> None:
        if self._epoll is None:
            self._epoll = select.epoll()
            asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._tell)
        try:
            self._epoll.register(number, _ENDS)
        except FileExistsError:
            self._epoll.modify(number, _ENDS)  # reports an end again

    def again(self, number: int) -> bool:
        """Returns whether the descriptor still belongs to the watched connection, and lets its end be reported again.
        epoll knows connections, not numbers: a new connection with this number isn't watched."""
        if self._epoll is None:
            return False
        try:
            self._epoll.modify(number, _ENDS)
        except OSError:
            return False
        return True

    def _tell(self) -> None:
        assert self._epoll is not None
        for number, _ in self._epoll.poll(0):
            self._left(number)


def connections(descriptors: Path = DESCRIPTORS) -> Iterator[tuple[ConnectionKey, int]]:
    """The connections of this process, with their descriptors; none on systems without `descriptors`."""
    try:
        names = os.listdir(descriptors)
    except OSError:
        return
    for name in names:
        key = connection_of(int(name))
        if key is not None:
            yield key, int(name)


def connection_of(number: int) -> ConnectionKey | None:
    """The TCP connection with this descriptor; None if it isn't a TCP connection, or no longer connected.

    The descriptor belongs to the engine, which may close it at any time; it stays open here.
    """
    try:
        one = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=number)  # works for IPv4 sockets, too
    except OSError:
        return None
    try:
        own, other = one.getsockname(), one.getpeername()
    except OSError:
        return None
    finally:
        one.detach()
    if not isinstance(other, tuple) or not isinstance(other[0], str):
        return None
    host = packed(other[0])
    return None if host is None else ConnectionKey(host, other[1], own[1])


def packed(host: str) -> bytes | None:
    """Returns an IP address in the form of `ConnectionKey`; None for any other text."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            return unmapped(socket.inet_pton(family, host.partition("%")[0]))
    return None


def unmapped(host: bytes) -> bytes:
    """Returns an IPv4-mapped IPv6 address as IPv4, any other unchanged."""
    return host.removeprefix(_MAPPED) if len(host) == 16 else host
