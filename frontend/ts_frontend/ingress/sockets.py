"""Listening sockets of our own making, so that a failure names the address, and a port has one owner."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import struct
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ts_frontend.ingress.call import Listener

#: Dead peers of idle connections are noticed after about KEEPALIVE_IDLE_S + 5 * KEEPALIVE_EVERY_S seconds.
KEEPALIVE_IDLE_S = 60
KEEPALIVE_EVERY_S = 15
CONNECTIONS_PENDING_MAX = 1024
LOCK_S_MAX = 1.0
TAKEN_S_MAX = 1.0
LOOK_EVERY_S = 0.005
#: A socket's filter of one instruction (`struct sock_filter`): return 0, which drops every packet.
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)
_SO_ATTACH_FILTER = 26

#: An address family that this machine resolves but doesn't have, usually IPv6 of `localhost`.
_NO_SUCH_FAMILY = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class ListenFailed(OSError):
    """A listener's address can't be had: in use, not of this machine, or not allowed."""

    def __init__(self, listener: Listener, reason: str) -> None:
        where = listener.path or f"{listener.host}:{listener.port}"
        super().__init__(f"{listener.name}: cannot listen on {where}: {reason}")


class Listening:
    """The sockets of one listener, all on one port, and their end."""

    def __init__(self, sockets: list[socket.socket], path: str = "") -> None:
        self._sockets = sockets
        self._path = path
        self._file = _identity(path) if path else None
        #: 0 for a Unix socket.
        self.port = 0 if path else int(sockets[0].getsockname()[1])

    def descriptors(self) -> list[int]:
        """Duplicates for an engine, which closes them. While ours are open, too, no connection is refused between two
        engines."""
        return [os.dup(one.fileno()) for one in self._sockets]

    async def refuse(self) -> None:
        """No new connection from now on, while those that the system has accepted for us stay to be taken; returns
        when the engine has taken them. A client that comes later is refused once everybody has closed."""
        self._remove_path()
        await refuse(self._sockets)

    def close(self) -> None:
        """Closes our own sockets; engines listen on theirs until they are told otherwise."""
        self._remove_path()
        for one in self._sockets:
            one.close()

    def _remove_path(self) -> None:
        """As long as somebody listens on a Unix socket nobody else takes its name, so it is ours: hence before the
        sockets are closed.

        """
        if self._file is not None and self._file == _identity(self._path):
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        self._file = None


async def refuse(listening: Sequence[socket.socket]) -> None:
    """Linux: drops what asks these listening sockets for a connection, and waits, TAKEN_S_MAX seconds at most, until
    all connections that wait in them have been taken. Elsewhere, and for Unix sockets, it does nothing.

    A listening socket that is closed resets the connections that wait in it, whose clients may have sent requests.
    """
    inet = [one for one in listening if one.family != socket.AF_UNIX]
    if sys.platform != "linux":
        return
    for one in inet:
        with contextlib.suppress(OSError):  # a sandbox may forbid filters; then the wait is all there is
            drop = ctypes.create_string_buffer(_DROP)
            one.setsockopt(
                socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", len(_DROP) // 8, ctypes.addressof(drop))
            )
    latest_s = time.monotonic() + TAKEN_S_MAX
    while any(map(_waiting, inet)) and time.monotonic() < latest_s:  # noqa: ASYNC110 - the kernel tells nobody
        await asyncio.sleep(LOOK_EVERY_S)


def _waiting(one: socket.socket) -> int:
    """How many connections wait in a listening socket."""
    at = 24  # tcp_info.tcpi_unacked, which is that of a listening socket
    return int.from_bytes(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)[at : at + 4], sys.byteorder)


def _identity(path: str) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        return status.st_dev, status.st_ino
    return None


def listen(listener: Listener) -> Listening:
    """Non-blocking listening sockets: one for each address of the host, or one at a path.

    Raises ListenFailed.
    """
    if listener.path:
        return _listen_at(listener)
    host = listener.host.strip("[]") or None
    with contextlib.ExitStack() as opened:
        sockets: list[socket.socket] = []
        try:
            found = socket.getaddrinfo(host, listener.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, _, _, _, address in dict.fromkeys(found):
                one = _listen_on(family, _with_port(address, sockets), last_chance=not sockets and len(found) == 1)
                if one is not None:
                    sockets.append(opened.enter_context(one))
        except OSError as error:
            raise ListenFailed(listener, error.strerror or str(error)) from error
        if not sockets:
            raise ListenFailed(listener, "no address of that name is of this machine")
        opened.pop_all()
        return Listening(sockets)


def check_free(listeners: Iterable[Listener]) -> None:
    """Raises ListenFailed when the port of one can't be had now: for before what takes long."""
    for listener in listeners:
        if listener.port and not listener.path:
            listen(listener).close()


def _listen_at(listener: Listener) -> Listening:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with path_claimed(listener):
            one.setblocking(False)
            one.bind(listener.path)
            os.chmod(listener.path, listener.path_mode)  # before `listen`: until then nobody can connect
            one.listen(CONNECTIONS_PENDING_MAX)
            return Listening([one], listener.path)
    except OSError as error:
        one.close()
        if isinstance(error, ListenFailed):
            raise
        raise ListenFailed(listener, error.strerror or str(error)) from error


@contextlib.contextmanager
def path_claimed(listener: Listener) -> Iterator[None]:
    """Makes room at the listener's path: a socket on which nobody listens any more is deleted; anything else stays, and
    is an error. Two servers that start at once don't delete each other's: they take turns by a lock on the directory.

    Raises ListenFailed.
    """
    path = Path(listener.path)
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ListenFailed(listener, f"{path.parent}: {error.strerror}") from error
    try:
        _lock(directory)
        _make_room(listener, path)
        yield
    finally:
        os.close(directory)


def _lock(directory: int) -> None:
    """Waits LOCK_S_MAX; who holds the lock for longer isn't a server that starts, and doesn't matter."""
    end_s = time.monotonic() + LOCK_S_MAX
    while time.monotonic() < end_s:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.01)


def _make_room(listener: Listener, path: Path) -> None:
    if not os.path.lexists(path):
        return
    if not path.is_socket() or path.is_symlink():
        raise ListenFailed(listener, "something that isn't a socket has this name; delete it, or take another name")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        number = probe.connect_ex(str(path))
    if number == errno.ECONNREFUSED:
        path.unlink()
    elif number in (0, errno.EAGAIN):  # EAGAIN: so many are waiting there that we couldn't
        raise ListenFailed(listener, "another server listens there")
    else:
        raise ListenFailed(listener, os.strerror(number))


def _with_port(address: tuple[object, ...], sockets: list[socket.socket]) -> tuple[object, ...]:
    if not sockets:
        return address
    return (address[0], sockets[0].getsockname()[1], *address[2:])


def _listen_on(family: int, address: tuple[object, ...], *, last_chance: bool) -> socket.socket | None:
    """None when this machine lacks the address family, unless there is no other to try."""
    one = None
    try:
        one = socket.socket(family, socket.SOCK_STREAM)
        _set_options(one, family)
        one.bind(address)
        one.listen(CONNECTIONS_PENDING_MAX)
    except OSError as error:
        if one is not None:
            one.close()
        if error.errno in _NO_SUCH_FAMILY and not last_chance:
            return None
        raise
    return one


def _set_options(one: socket.socket, family: int) -> None:
    one.setblocking(False)
    # Not SO_REUSEPORT: with it, a second server would silently take half of the connections.
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted connections inherit these on Linux.
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S)
    if family == socket.AF_INET6:
        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
