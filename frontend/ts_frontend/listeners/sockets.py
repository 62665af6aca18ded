"""A listener's description: its address, its routes and limits, and its TLS files; and its sockets, made here so that a
failure names the address, and a port has one owner."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import logging
import math
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from ts_frontend.grpc.call import Routes
from ts_frontend.http.request import HttpService
from ts_frontend.transport.limits import ListenerLimits

log = logging.getLogger(__name__)


def _nothing() -> None:
    """Does nothing: the default of `flooded`."""


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files; `client_ca_file` makes clients present certificates signed by it (mTLS). `check_s`: seconds between
    two checks for changed files; 0: none."""

    certificate_file: str
    key_file: str
    client_ca_file: str | None = None
    check_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Listener:
    """One address and its services. `port` 0 takes a free one (`Serving.port` returns it); `path`: a Unix socket's, in
    place of host and port, and `path_mode` its file mode. `http` answers requests other than gRPC (without it: 404);
    with it and without `routes` there is no gRPC. `flooded` is called for each connection whose client resets too many
    streams. `shared`: several frontends listen there; `sibling`: this one got its sockets from the lead."""

    name: str
    host: str
    port: int
    routes: Routes
    limits: ListenerLimits = ListenerLimits()
    tls: Tls | None = None
    http: HttpService | None = None
    path: str = ""
    path_mode: int = 0o600
    flooded: Callable[[], None] = _nothing
    shared: bool = False
    sibling: bool = False

    @property
    def where(self) -> str:
        return f"{self.name} {self.path or f'{self.host}:{self.port}'}"


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

#: The flags that set the port of a listener, by its name.
_PORT_FLAGS = {
    "http_inference": "--http-port",
    "http_management": "--set management_address=http://HOST:PORT",
    "http_metrics": "--metrics-port",
    "grpc_inference": "--set grpc_inference_port=PORT",
    "grpc_management": "--set grpc_management_port=PORT",
}

#: Errors for an address family that resolves but isn't available, usually IPv6 of `localhost`.
_NO_SUCH_FAMILY = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class ListenFailed(OSError):
    """A listener's address is unavailable: in use, not of this machine, or not permitted."""

    def __init__(self, listener: Listener, reason: str) -> None:
        where = listener.path or f"{listener.host}:{listener.port}"
        super().__init__(f"{listener.name}: cannot listen on {where}: {reason}")


class Listening:
    """The sockets of one listener, all on one port."""

    def __init__(self, sockets: list[socket.socket], path: str = "") -> None:
        self.sockets = sockets
        self._path = path
        self._file = _identity(path) if path else None
        #: The port; 0 for a Unix socket.
        self.port = 0 if sockets[0].family == socket.AF_UNIX else int(sockets[0].getsockname()[1])

    def leave(self) -> list[int]:
        """Leaves the sockets to the next server in this process, whose clients wait meanwhile: descriptors of them."""
        self._file = None
        found = [os.dup(one.fileno()) for one in self.sockets]
        for fd in found:
            os.set_inheritable(fd, True)
        return found

    def another(self) -> list[socket.socket]:
        """Sockets at the same address for another frontend, bound and not listening yet: the system divides new clients
        among the frontends. At a path they are these sockets themselves."""
        return [_another(one) for one in self.sockets]

    async def refuse(self) -> None:
        """Refuses new connections, and returns when those that the system already holds have been accepted."""
        self._remove_path()
        await refuse(self.sockets)

    def waiting(self) -> int:
        """Returns the number of clients that wait for their connection to be accepted (Linux, TCP)."""
        if sys.platform != "linux":
            return 0
        return sum(_waiting(one) for one in self.sockets if one.family != socket.AF_UNIX)

    def close(self) -> None:
        self._remove_path()
        for one in self.sockets:
            one.close()

    def _remove_path(self) -> None:
        """Deletes the Unix socket's file while this process listens, so that no other server has taken its name."""
        if self._file is not None and self._file == _identity(self._path):
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        self._file = None


async def refuse(listening: Sequence[socket.socket]) -> None:
    """On Linux, refuses new connections to these listening sockets and waits at most TAKEN_S_MAX seconds until all
    waiting connections have been accepted. Does nothing on other systems.

    Closing a listening socket resets its waiting connections, whose clients may have sent requests.
    """
    if sys.platform != "linux":
        return
    inet = [one for one in listening if one.family != socket.AF_UNIX]
    for one in listening:
        if one.family == socket.AF_UNIX:
            one.shutdown(socket.SHUT_RD)
    for one in inet:
        with contextlib.suppress(OSError):  # a sandbox may forbid filters: only the wait is left
            drop = ctypes.create_string_buffer(_DROP)
            one.setsockopt(
                socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", len(_DROP) // 8, ctypes.addressof(drop))
            )
    latest_s = time.monotonic() + TAKEN_S_MAX
    while any(map(_waiting, inet)) and time.monotonic() < latest_s:  # noqa: ASYNC110 - the kernel has no event for it
        await asyncio.sleep(LOOK_EVERY_S)


def _waiting(one: socket.socket) -> int:
    at = 24  # tcp_info.tcpi_unacked, which is that of a listening socket
    return int.from_bytes(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)[at : at + 4], sys.byteorder)


def _identity(path: str) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        return status.st_dev, status.st_ino
    return None


def listen(listener: Listener, left: Sequence[int] = ()) -> Listening:
    """Non-blocking listening sockets: one for each address of the host, or one at a path. `left`: those that the server
    which this one replaces had for this address.

    Raises ListenFailed.
    """
    if left:
        path = "" if listener.sibling else listener.path
        return Listening([_taken(fd, listener.limits.write_s_max, shared=listener.shared) for fd in left], path)
    if listener.path:
        return _listen_at(listener)
    host = listener.host.strip("[]") or None
    with contextlib.ExitStack() as opened:
        sockets: list[socket.socket] = []
        try:
            found = socket.getaddrinfo(host, listener.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, _, _, _, address in dict.fromkeys(found):
                one = _listen_on(
                    family,
                    _with_port(address, sockets),
                    listener.limits.write_s_max,
                    last_chance=not sockets and len(found) == 1,
                    shared=listener.shared,
                )
                if one is not None:
                    sockets.append(opened.enter_context(one))
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno == errno.EADDRINUSE:
                reason += f"{_holder(listener.port)}. {_elsewhere(listener.name)}"
            raise ListenFailed(listener, reason) from error
        if not sockets:
            raise ListenFailed(listener, "no address of that name is of this machine")
        opened.pop_all()
        return Listening(sockets)


def _another(one: socket.socket) -> socket.socket:
    if one.family == socket.AF_UNIX or not hasattr(socket, "SO_REUSEPORT"):
        return one.dup()
    other = socket.socket(one.family, socket.SOCK_STREAM)
    try:
        _set_options(other, one.family, shared=True)
        other.bind(one.getsockname())
    except BaseException:
        other.close()
        raise
    return other


def _taken(fd: int, write_s_max: float, *, shared: bool) -> socket.socket:
    """The socket that another server has left, or that the lead has made; it listens from now on."""
    one = socket.socket(fileno=fd)
    if shared and one.family != socket.AF_UNIX and hasattr(socket, "SO_REUSEPORT"):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        one.listen(CONNECTIONS_PENDING_MAX)
    one.setblocking(False)
    one.set_inheritable(False)
    limit_writes(one, write_s_max)
    return one


def _holder(port: int) -> str:
    """Returns a port's owner, ` by NAME (process PID)`, or "" if this user may not see it."""
    try:
        pids = {one.pid for one in psutil.net_connections("tcp") if one.laddr and one.laddr.port == port and one.pid}
        return "".join(f" by {psutil.Process(pid).name()} (process {pid})" for pid in sorted(pids)[:1])
    except (psutil.Error, OSError, RuntimeError):  # other users' processes, or an unsupported system
        return ""


def _elsewhere(name: str) -> str:
    flag = _PORT_FLAGS.get(name)
    return f"{flag} sets another port" if flag else "Take another address, or end what listens there"


def check_free(listeners: Iterable[Listener], left: Container[str] = ()) -> None:
    """Raises ListenFailed if a listener's address is unavailable: a check before a long start. `left`: the sockets of
    the server that this one replaces, by the listeners' `where`, which are there already."""
    for listener in listeners:
        if listener.port and not listener.path and listener.where not in left:
            listen(replace(listener, shared=False)).close()


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
    """Deletes an abandoned socket at the listener's path; raises for anything else there. A lock on the directory keeps
    two starting servers from deleting each other's socket.

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
    """Locks the directory, or waits LOCK_S_MAX seconds: no starting server holds the lock for longer."""
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
        log.info("%s: removed %s, the socket of a server that has ended", listener.name, path)
    elif number in (0, errno.EAGAIN):  # EAGAIN: its queue of connections is full
        raise ListenFailed(listener, "another server listens there")
    else:
        raise ListenFailed(listener, os.strerror(number))


def _with_port(address: tuple[object, ...], sockets: list[socket.socket]) -> tuple[object, ...]:
    if not sockets:
        return address
    return (address[0], sockets[0].getsockname()[1], *address[2:])


def limit_writes(one: socket.socket, write_s_max: float) -> None:
    """Makes the kernel reset accepted connections of a listening socket whose clients acknowledge or read no sent data
    for `write_s_max` seconds (0: the kernel's default). On Linux, accepted connections inherit the option."""
    if hasattr(socket, "TCP_USER_TIMEOUT") and one.family != socket.AF_UNIX:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(math.ceil(write_s_max * 1000), 2**31 - 1))


def _listen_on(
    family: int, address: tuple[object, ...], write_s_max: float, *, last_chance: bool, shared: bool
) -> socket.socket | None:
    """Returns a listening socket; None if the address family isn't available, unless `last`."""
    one = None
    try:
        one = socket.socket(family, socket.SOCK_STREAM)
        _set_options(one, family, shared=shared)
        limit_writes(one, write_s_max)
        one.bind(address)
        one.listen(CONNECTIONS_PENDING_MAX)
    except OSError as error:
        if one is not None:
            one.close()
        if error.errno in _NO_SUCH_FAMILY and not last_chance:
            return None
        raise
    return one


def _set_options(one: socket.socket, family: int, *, shared: bool) -> None:
    one.setblocking(False)
    # SO_REUSEPORT only for several frontends: with it, a second server would silently take half of the connections.
    if shared and hasattr(socket, "SO_REUSEPORT"):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted connections inherit these on Linux.
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S)
    if family == socket.AF_INET6:
        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
