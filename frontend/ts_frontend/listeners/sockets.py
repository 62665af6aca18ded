"""Listening sockets, made here so that a failure names the address, and a port has one owner."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import logging
import math
import os
import select
import socket
import struct
import sys
import termios
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import psutil

from ts_frontend.listeners.listener import Listener

log = logging.getLogger(__name__)

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
        self._sockets = sockets
        self._path = path
        self._file = _identity(path) if path else None
        #: The port; 0 for a Unix socket.
        self.port = 0 if path else int(sockets[0].getsockname()[1])

    def descriptors(self) -> list[int]:
        """Duplicates for an engine, which closes them. While the originals are open, no connection is refused between
        two engines."""
        return [os.dup(one.fileno()) for one in self._sockets]

    async def refuse(self) -> None:
        """Refuses new connections, and returns when the engine has accepted those that the system already holds. Later
        clients are refused once all sockets are closed."""
        self._remove_path()
        await refuse(self._sockets)

    def waiting(self) -> int:
        """Returns the number of clients that wait for their connection to be accepted (Linux, TCP)."""
        if sys.platform != "linux":
            return 0
        return sum(_waiting(one) for one in self._sockets if one.family != socket.AF_UNIX)

    def close(self) -> None:
        """Closes the originals; an engine listens on its duplicates until it is drained."""
        self._remove_path()
        for one in self._sockets:
            one.close()

    def _remove_path(self) -> None:
        """Deletes the Unix socket's file before the sockets are closed: while this process listens, no other server
        takes its name."""
        if self._file is not None and self._file == _identity(self._path):
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        self._file = None


async def refuse(listening: Sequence[socket.socket]) -> None:
    """On Linux, drops new connection attempts to these listening sockets and waits at most TAKEN_S_MAX seconds until
    all waiting connections have been accepted. Does nothing for Unix sockets and on other systems.

    Closing a listening socket resets its waiting connections, whose clients may have sent requests.
    """
    inet = [one for one in listening if one.family != socket.AF_UNIX]
    if sys.platform != "linux":
        return
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
    """Returns the number of connections that wait to be accepted from a listening socket."""
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
                one = _listen_on(
                    family,
                    _with_port(address, sockets),
                    listener.limits.write_s_max,
                    last_chance=not sockets and len(found) == 1,
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


def _holder(port: int) -> str:
    """Returns a port's owner, ` by NAME (process PID)`, or "" if this user may not see it."""
    try:
        pids = {one.pid for one in psutil.net_connections("tcp") if one.laddr and one.laddr.port == port and one.pid}
        return "".join(f" by {psutil.Process(pid).name()} (process {pid})" for pid in sorted(pids)[:1])
    except (psutil.Error, OSError, RuntimeError):  # other users' processes, or an unsupported system
        return ""


def _elsewhere(name: str) -> str:
    """Returns the advice for giving the listener of that name another port."""
    flag = _PORT_FLAGS.get(name)
    return f"{flag} sets another port" if flag else "Take another address, or end what listens there"


def check_free(listeners: Iterable[Listener]) -> None:
    """Raises ListenFailed if a listener's address is unavailable: a check before a long start."""
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
    """Locks the directory, or waits LOCK_S_MAX seconds: a process that holds the lock for longer isn't a starting
    server, and is ignored."""
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
    family: int, address: tuple[object, ...], write_s_max: float, *, last_chance: bool
) -> socket.socket | None:
    """Returns a listening socket; None if the address family isn't available, unless `last`."""
    one = None
    try:
        one = socket.socket(family, socket.SOCK_STREAM)
        _set_options(one, family)
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


DESCRIPTORS = Path("/proc/self/fd")
CONNECTIONS_LOOK_EVERY_S = 0.01
#: The pause between two scans of all connections, as a multiple of a scan's duration.
REST_FACTOR = 10
#: A connection silent for this many seconds isn't in the middle of a request's head.
QUIET_S = 0.1
#: Seconds in which clients of a drained connection may read their answers.
LINGER_S_MAX = 2.0
_STATE_ESTABLISHED = 1
_STATE_CLOSED = 7  # TCP_CLOSE of linux/tcp_states.h: the other side has closed, too
_BYTES_ACKED = 120  # tcp_info.tcpi_bytes_acked
_SETTINGS_BYTES_MIN = 10
#: More than a client sends without an answer; the system lowers it to half of its largest buffer.
_UNTOLD_BYTES = 1 << 30
#: HTTP/2's GOAWAY (RFC 9113, 6.8) with the highest stream id and no error: a warning before the last one.
_GOAWAY = bytes([0, 0, 8, 7, 0, 0, 0, 0, 0, 0x7F, 0xFF, 0xFF, 0xFF, 0, 0, 0, 0])
_LAST_DATA_SENT, _LAST_DATA_RECV = 44, 52  # of tcp_info: ms since then


def hold(ports: Collection[int], paths: Collection[str] = (), *, silent_s: float = math.inf) -> list[socket.socket]:
    """Duplicates of this process's connections to its `ports` and its Unix sockets at `paths`: none on systems that
    list no descriptors, and not all at the limit of descriptors. Leaves out connections without any data for `silent_s`
    seconds, except for Unix sockets."""
    return [one for one in _ours(ports, paths) if not _kept_if(one, _listens(one) or _silent(one, silent_s))]


def listening(ports: Collection[int]) -> list[socket.socket]:
    """Duplicates of the sockets with which this process listens on `ports`."""
    return [one for one in _ours(ports, ()) if not _kept_if(one, not _listens(one))]


def _silent(one: socket.socket, silent_s: float) -> bool:
    if one.family == socket.AF_UNIX:
        return False
    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return min(_since_s(info, _LAST_DATA_SENT), _since_s(info, _LAST_DATA_RECV)) >= silent_s


def _since_s(info: bytes, at: int) -> float:
    return int.from_bytes(info[at : at + 4], sys.byteorder) / 1000


def _kept_if(one: socket.socket, unwanted: bool) -> bool:
    if unwanted:
        one.close()
    return unwanted


def cut(ports: Collection[int], paths: Collection[str] = (), clients: Collection[str] | None = None) -> None:
    """Shuts down the connections that keep an engine from ending; with `clients` those of the TCP clients at these
    addresses. Sent data is still delivered."""
    remote = {address.rpartition(":")[2] for address in clients or ()}
    for one in hold(ports, paths):
        with one, contextlib.suppress(OSError):
            if clients is None or str(_remote_port(one)) in remote:
                one.shutdown(socket.SHUT_RDWR)


def finish(
    ports: Collection[int], paths: Collection[str], busy: Collection[str] | None, finished: dict[int, socket.socket]
) -> None:
    """Shuts down the sending half of the connections, except those of clients at the `busy` addresses (None: of none;
    clients of a Unix socket all have the address "unix") and of Unix sockets with unread data. Sent data is still
    delivered, and received data still read. `finished` gets duplicates, by inode: they keep a connection open whose
    engine closes it when it can't write, before its client has read everything.

    The engine isn't told of further data over TCP: it would answer, fail, and shut down both halves, after which the
    system answers any data of the client with a reset. The client may have answers that it hasn't read."""
    remote = {address.rpartition(":")[2] for address in busy or ()}
    for one in hold(ports, paths):
        inode = os.fstat(one.fileno()).st_ino
        if inode in finished or _is_spared(one, busy, remote):
            one.close()
            continue
        finished[inode] = one
        with contextlib.suppress(OSError):
            if one.family != socket.AF_UNIX:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _UNTOLD_BYTES)
            one.shutdown(socket.SHUT_WR)


def _is_spared(one: socket.socket, busy: Collection[str] | None, remote: Collection[str]) -> bool:
    if one.family == socket.AF_UNIX:
        return busy is not None and (bool(busy) or _unsent(one))
    try:
        return str(_remote_port(one)) in remote
    except OSError:  # the connection has just ended
        return True


def unread(paths: Collection[str]) -> bool:
    """Returns whether a client of these Unix sockets has unread data."""
    held = hold((), paths) if paths else []
    try:
        return any(map(_unsent, held))
    finally:
        for one in held:
            one.close()


def _unsent(one: socket.socket) -> bool:
    """Returns whether sent data isn't acknowledged yet; on a Unix socket, isn't read yet."""
    waiting = bytearray(4)
    fcntl.ioctl(one, termios.TIOCOUTQ, waiting)
    return any(waiting)


def _remote_port(one: socket.socket) -> int:
    """The client's port, which identifies a connection well enough: addresses have several notations."""
    return int(one.getpeername()[1])


def deafen(paths: Collection[str]) -> None:
    """Makes this process's Unix sockets refuse new connections."""
    for one in _ours((), paths):
        with one, contextlib.suppress(OSError):
            if _listens(one):
                one.shutdown(socket.SHUT_RD)


async def say_goaway(ports: Collection[int], limit_s: float) -> None:
    """Sends a GOAWAY to the HTTP/2 clients on `ports`, for engines without a call for it; calls that they begin before
    they read it are still served. Without TLS only. Returns when it was sent to all, at the latest after `limit_s`.

    The frame must not split one of the engine's frames, which it writes whole while the kernel accepts them: so it is
    only sent when nothing is unsent, and after the engine's first frame.
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
            await asyncio.sleep(CONNECTIONS_LOOK_EVERY_S)
    finally:
        for one in untold:
            one.close()


def _told(one: socket.socket) -> bool:
    try:
        info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
        acknowledged = int.from_bytes(info[_BYTES_ACKED : _BYTES_ACKED + 8], sys.byteorder)
        if info[0] != _STATE_ESTABLISHED:
            return True
        if _unsent(one) or acknowledged < _SETTINGS_BYTES_MIN:
            return False
        one.send(_GOAWAY, socket.MSG_DONTWAIT)
    except OSError:
        pass  # the connection has just ended
    return True


async def quiet(ports: Collection[int], paths: Collection[str], least_s: float, limit_s: float) -> None:
    """Returns when no connection has received data for QUIET_S and no received data is unread: after at least `least_s`
    seconds (at once without connections) and at most `limit_s`."""
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
    return info[0] != _STATE_CLOSED and _since_s(info, _LAST_DATA_RECV) < QUIET_S


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
                return  # a closed descriptor doesn't stop the scan, this does


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


async def all_closed(held: Sequence[socket.socket], limit_s: float) -> None:
    """Returns when the clients have closed their ends, or after `limit_s` seconds."""
    latest_s = time.monotonic() + limit_s
    while not all(_closed(one) for one in held) and time.monotonic() < latest_s:  # noqa: ASYNC110 - the kernel tells nobody
        await asyncio.sleep(CONNECTIONS_LOOK_EVERY_S)


async def release(held: Sequence[socket.socket], limit_s: float) -> None:
    """Closes connections when the clients have closed their ends, or after `limit_s` seconds."""
    try:
        await all_closed(held, limit_s)
    finally:
        for one in held:
            one.close()


async def keep(held: Sequence[socket.socket]) -> None:
    """Keeps held connections open for their clients after the engine has closed its descriptors: shuts down the sending
    half, and closes each when its client has, or LINGER_S_MAX later. Returns when all are closed."""
    left_s: dict[socket.socket, float] = {}
    try:
        while held:
            now_s = time.monotonic()
            ours = Counter(_links())
            for one in held:
                if one not in left_s and ours[f"socket:[{os.fstat(one.fileno()).st_ino}]"] == 1:
                    left_s[one] = now_s
                    with contextlib.suppress(OSError):
                        one.shutdown(socket.SHUT_WR)
                if one in left_s and (_closed(one) or now_s - left_s[one] >= LINGER_S_MAX):
                    one.close()
            held = [one for one in held if one.fileno() >= 0]
            await asyncio.sleep(max(CONNECTIONS_LOOK_EVERY_S, REST_FACTOR * (time.monotonic() - now_s)))
    finally:
        for one in held:
            one.close()


def _links() -> Iterator[str]:
    """The target of each descriptor of this process (/proc/self/fd)."""
    for name in _names():
        with contextlib.suppress(OSError):  # closed since it was listed
            yield os.readlink(DESCRIPTORS / name)


def _closed(one: socket.socket) -> bool:
    if one.family == socket.AF_UNIX:
        ended = select.poll()
        ended.register(one, 0)
        return bool(ended.poll(0))  # POLLHUP is always reported
    return one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _STATE_CLOSED
