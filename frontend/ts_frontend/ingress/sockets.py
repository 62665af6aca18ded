"""Listening sockets of our own making, so that a failure names the address, and a port has one owner."""

from __future__ import annotations

import contextlib
import errno
import socket
from pathlib import Path

from ts_frontend.ingress.call import Listener

#: Dead peers of idle connections are noticed after about KEEPALIVE_IDLE_S + 5 * KEEPALIVE_EVERY_S seconds.
KEEPALIVE_IDLE_S = 60
KEEPALIVE_EVERY_S = 15
CONNECTIONS_PENDING_MAX = 1024

#: An address family that this machine resolves but doesn't have, usually IPv6 of `localhost`.
_NO_SUCH_FAMILY = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class ListenFailed(OSError):
    """A listener's address can't be had: in use, not of this machine, or not allowed."""

    def __init__(self, listener: Listener, reason: str) -> None:
        where = listener.path or f"{listener.host}:{listener.port}"
        super().__init__(f"{listener.name}: cannot listen on {where}: {reason}")


def listen(listener: Listener) -> list[socket.socket]:
    """Non-blocking listening sockets, one for each address of the host, all on one port.

    Raises ListenFailed.
    """
    if listener.path:
        return [_listen_at(listener)]
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
        return sockets


def _listen_at(listener: Listener) -> socket.socket:
    """A Unix socket; one that a server left behind makes room, one that a server listens on doesn't."""
    path = Path(listener.path)
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and one.connect_ex(str(path)) == errno.ECONNREFUSED:
            path.unlink()
            one.close()
            one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        one.setblocking(False)
        one.bind(str(path))
        one.listen(CONNECTIONS_PENDING_MAX)
    except OSError as error:
        one.close()
        raise ListenFailed(listener, error.strerror or str(error)) from error
    return one


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
