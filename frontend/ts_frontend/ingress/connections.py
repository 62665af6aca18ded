"""The server's connections as the system sees them, for the end of an engine that tells nothing of them.

Some have to outlive their engine's close, so that their clients get what was sent:
grpcio closes a drained connection at the end of its last call. When something of the client's is unread then (a ping
that answers bring about), Linux resets the connection and throws away what it hasn't sent yet: answers are lost. A
duplicate of the descriptor keeps the connection, which grpcio has shut down before: what is unsent goes out. What the
client sends after that still resets it, which large answers to slow clients may not survive.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import socket
import sys
import termios
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

DESCRIPTORS = Path("/proc/self/fd")
LOOK_EVERY_S = 0.01
#: A connection on which nothing has come for so long isn't in the middle of a request's head.
QUIET_S = 0.1
_STATE_ESTABLISHED = 1
_STATE_CLOSED = 7  # TCP_CLOSE of linux/tcp_states.h: the other side has closed, too
_BYTES_ACKED = 120  # tcp_info.tcpi_bytes_acked
_SETTINGS_BYTES_MIN = 10
#: HTTP/2's frame (RFC 9113, 6.8) with the highest stream and no error: "begin no more streams", without a limit yet.
_GOAWAY = bytes([0, 0, 8, 7, 0, 0, 0, 0, 0, 0x7F, 0xFF, 0xFF, 0xFF, 0, 0, 0, 0])
_LAST_DATA_RECV = 52  # tcp_info.tcpi_last_data_recv: ms since then


def hold(ports: Collection[int], paths: Collection[str] = ()) -> list[socket.socket]:
    """Duplicates of this process's connections to its `ports` and Unix sockets' `paths`: none where the system lists no
    descriptors, fewer than there are when the limit of descriptors is reached."""
    return [one for one in _ours(ports, paths) if not _kept_if(one, _listens(one))]


def listening(ports: Collection[int]) -> list[socket.socket]:
    """Duplicates of the sockets with which this process listens on `ports`."""
    return [one for one in _ours(ports, ()) if not _kept_if(one, not _listens(one))]


def _kept_if(one: socket.socket, unwanted: bool) -> bool:
    if unwanted:
        one.close()
    return unwanted


def cut(ports: Collection[int], paths: Collection[str] = ()) -> None:
    """Shuts the connections down whose clients don't let an engine end. What was sent still goes out."""
    for one in hold(ports, paths):
        with one, contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


async def say_goaway(ports: Collection[int], limit_s: float) -> None:
    """Tells the HTTP/2 clients on `ports` to begin nothing new, where their engine has no call for it; what they begin
    until they have read that is served. Without TLS only; returns when all have been told, or after `limit_s`.

    A frame of ours must not stand inside one of the engine's, which writes whole frames as long as the system takes
    them: so nothing may be unsent, nor the engine's first frame still to come.
    """
    latest_s = time.monotonic() + limit_s
    untold = hold(ports)
    try:
        while untold:
            still = [one for one in untold if not _told(one)]
            for one in untold:
                if one not in still:
                    one.close()
            untold = still
            if time.monotonic() >= latest_s:
                break
            await asyncio.sleep(LOOK_EVERY_S)
    finally:
        for one in untold:
            one.close()


def _told(one: socket.socket) -> bool:
    try:
        info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
        acknowledged = int.from_bytes(info[_BYTES_ACKED : _BYTES_ACKED + 8], sys.byteorder)
        if info[0] != _STATE_ESTABLISHED:
            return True
        unsent = bytearray(4)
        fcntl.ioctl(one, termios.TIOCOUTQ, unsent)
        if any(unsent) or acknowledged < _SETTINGS_BYTES_MIN:
            return False
        one.send(_GOAWAY, socket.MSG_DONTWAIT)
    except OSError:
        pass  # it has just ended
    return True


async def quiet(ports: Collection[int], paths: Collection[str], least_s: float, limit_s: float) -> None:
    """Returns when nothing has come on any connection for QUIET_S and nothing waits to be read, after `least_s` seconds
    at the earliest (at once without connections) and `limit_s` at the latest."""
    begun_s = time.monotonic()
    while (elapsed_s := time.monotonic() - begun_s) < limit_s:
        held = hold(ports, paths)
        try:
            if not held or (elapsed_s >= least_s and not any(map(_talks, held))):
                return
        finally:
            for one in held:
                one.close()
        await asyncio.sleep(QUIET_S / 4)


def _talks(one: socket.socket) -> bool:
    unread = bytearray(4)
    fcntl.ioctl(one, termios.FIONREAD, unread)
    if any(unread) or one.family == socket.AF_UNIX:
        return any(unread)
    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    last_ms = int.from_bytes(info[_LAST_DATA_RECV : _LAST_DATA_RECV + 4], sys.byteorder)
    return info[0] != _STATE_CLOSED and last_ms < QUIET_S * 1000


def _ours(ports: Collection[int], paths: Collection[str]) -> Iterator[socket.socket]:
    for one in _sockets():
        if _is_ours(one, ports, paths):
            yield one
        else:
            one.close()


def _sockets() -> Iterator[socket.socket]:
    for name in _names():
        try:
            if os.readlink(DESCRIPTORS / name).startswith("socket:"):
                yield socket.socket(fileno=os.dup(int(name)))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                return  # what was closed meanwhile is no reason to stop, this is


def _names() -> list[str]:
    try:
        return os.listdir(DESCRIPTORS)
    except OSError:
        return []


def _is_ours(one: socket.socket, ports: Collection[int], paths: Collection[str]) -> bool:
    if one.type != socket.SOCK_STREAM:
        return False
    try:
        name = one.getsockname()
    except OSError:
        return False
    if one.family == socket.AF_UNIX:
        return name in paths
    return one.family in (socket.AF_INET, socket.AF_INET6) and name[1] in ports


def _listens(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


async def release(held: Sequence[socket.socket], limit_s: float) -> None:
    """Closes them when the clients have closed theirs, or after `limit_s` seconds."""
    latest_s = time.monotonic() + limit_s
    try:
        while not all(_closed(one) for one in held) and time.monotonic() < latest_s:  # noqa: ASYNC110 - the kernel tells nobody
            await asyncio.sleep(LOOK_EVERY_S)
    finally:
        for one in held:
            one.close()


def _closed(one: socket.socket) -> bool:
    return one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _STATE_CLOSED
