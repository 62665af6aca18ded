"""Connections that outlive their server's close, so that their clients get what was sent.

grpcio closes a drained connection at the end of its last call. When something of the client's is unread then (a ping
that answers bring about), Linux resets the connection and throws away what it hasn't sent yet: answers are lost. A
duplicate of the descriptor keeps the connection, which grpcio has shut down before: what is unsent goes out. What the
client sends after that still resets it, which large answers to slow clients may not survive.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

DESCRIPTORS = Path("/proc/self/fd")
LOOK_EVERY_S = 0.01
_STATE_CLOSED = 7  # TCP_CLOSE of linux/tcp_states.h: the other side has closed, too


def hold(ports: Collection[int]) -> list[socket.socket]:
    """Duplicates of this process's connections to its `ports`: none where the system lists no descriptors, fewer than
    there are when the limit of descriptors is reached."""
    held: list[socket.socket] = []
    for one in _sockets():
        if _is_connection(one, ports):
            held.append(one)
        else:
            one.close()
    return held


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


def _is_connection(one: socket.socket, ports: Collection[int]) -> bool:
    if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
        return False
    try:
        one.getpeername()
        return one.getsockname()[1] in ports
    except OSError:
        return False


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
