"""The address to which workers of other machines connect: TLS with client certificates, and a token for each."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import math
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from ts.protocol.secure import PeerCertificate, SecureSocket, keep_watch, server_context

log = logging.getLogger(__name__)

GREETING_BYTES_MAX = 8192
GREETING_S_MAX = 10.0
GUESTS_MAX = 512
#: Seconds without accepting once the system refuses to: the waiting connection would wake the loop at once.
PAUSE_S = 1.0
#: The least seconds between two lines of the log about the same trouble.
TOLD_EVERY_S = 60.0
#: Seconds for which Ray's processes keep a silent connection at least: minutes. One that ends sooner says nothing.
STAYS_S_MIN = 1.0

#: Called with a process that has sent its token: its role (agent or worker), its socket, and its greeting.
Welcome: TypeAlias = Callable[[str, SecureSocket, dict[str, Any]], None]


class Gate:
    """The listening address. It accepts processes with a token that `expect` has announced."""

    def __init__(self, certificate: PeerCertificate, host: str, port: int) -> None:
        """Begins to listen. Raises OSError."""
        self._context = server_context(certificate)
        self._expected: dict[str, Welcome] = {}
        self._guests: dict[_Guest, None] = {}  # in the order in which they came
        self._paused: asyncio.TimerHandle | None = None
        self._told_s: dict[str, float] = {}
        self._loop = asyncio.get_running_loop()
        self._listener = _listening(host, port)
        self.port = int(self._listener.getsockname()[1])
        self._loop.add_reader(self._listener, self._arrived)

    def expect(self, token: str, welcome: Welcome) -> None:
        self._expected[token] = welcome

    def forget(self, token: str) -> None:
        self._expected.pop(token, None)

    def _arrived(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._pause(error)
                return
            if len(self._guests) >= GUESTS_MAX:
                self._make_room()
            try:
                self._guests[_Guest(self, sock, self._context, str(address[0]))] = None
            except OSError as error:  # it has left already
                sock.close()
                log.debug("A connection from %s to the workers' port ended at once: %s", address, error)

    def _pause(self, error: OSError) -> None:
        """Accepts nothing for PAUSE_S: without a free descriptor, the connection goes on waiting."""
        self._tell("accept", f"Workers' connections can't be accepted, and wait: {error}")
        self._loop.remove_reader(self._listener)
        self._paused = self._loop.call_later(PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._paused = None
        self._loop.add_reader(self._listener, self._arrived)

    def _make_room(self) -> None:
        """Gives up the guest that has said nothing for the longest time, and of those that speak the oldest."""
        oldest = next((guest for guest in self._guests if not guest.speaks), next(iter(self._guests)))
        self._tell("room", f"{len(self._guests)} connections to the workers' port say nothing: the oldest are closed")
        oldest.close()

    def _tell(self, trouble: str, text: str) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s.get(trouble, -math.inf) >= TOLD_EVERY_S:
            self._told_s[trouble] = now_s
            log.warning("%s", text)

    def greeted(self, guest: _Guest, sock: ssl.SSLSocket, hello: dict[str, Any]) -> None:
        """Accepts a guest with a known token. Raises ValueError, OSError."""
        welcome = self._expected.get(str(hello.get("token")))
        if welcome is None:
            raise ValueError("nobody waits for it")
        sock.send(json.dumps({"now": time.monotonic()}).encode() + b"\n")
        self.left(guest)
        welcome(str(hello.get("role")), SecureSocket(sock), hello)

    def left(self, guest: _Guest) -> None:
        self._guests.pop(guest, None)

    def close(self) -> None:
        if self._paused is not None:
            self._paused.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for guest in list(self._guests):
            guest.refuse("the server ends")


class _Guest:
    """A connection that hasn't sent its token yet."""

    def __init__(self, gate: Gate, sock: socket.socket, context: ssl.SSLContext, address: str) -> None:
        sock.setblocking(False)
        keep_watch(sock)
        self._gate, self._address = gate, address
        self._sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        self._loop = asyncio.get_running_loop()
        self._shaken = self.speaks = False
        self._said = b""
        self._limit = self._loop.call_later(GREETING_S_MAX, self.refuse, "it says nothing")
        self._loop.add_reader(self._sock, self._step)

    def _step(self) -> None:
        self.speaks = True
        try:
            if not self._shaken:
                self._sock.do_handshake()
                self._shaken = True
            self._read()
        except ssl.SSLWantReadError:
            self._loop.remove_writer(self._sock)
        except ssl.SSLWantWriteError:
            self._loop.add_writer(self._sock, self._step)
        except (OSError, ValueError, TypeError) as error:
            self.refuse(str(error))

    def _read(self) -> None:
        while not self._said.endswith(b"\n"):
            data = self._sock.recv(GREETING_BYTES_MAX)
            self._said += data
            if not data or len(self._said) > GREETING_BYTES_MAX:
                raise ValueError("its greeting is cut short" if not data else "its greeting is too long")
        hello = json.loads(self._said)
        if not isinstance(hello, dict):
            raise ValueError("its greeting is not an object")
        self._leave()
        try:
            self._gate.greeted(self, self._sock, hello)
        except (OSError, ValueError) as error:
            self.refuse(str(error))

    def _leave(self) -> None:
        self._limit.cancel()
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)

    def refuse(self, why: str) -> None:
        log.warning("A connection from %s to the workers' port was refused: %s", self._address, why)
        self.close()

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._leave()
            self._sock.close()
        self._gate.left(self)


async def ended(host: str, port: int) -> bool:
    """Returns True when the process that listens there has ended: its connection ends, and another one is refused.
    Returns False if that can't be observed from here."""
    reached, ended_soon = False, 0
    while ended_soon < 2:
        begun_s = time.monotonic()
        try:
            reader, writer = await asyncio.open_connection(host, port)
        except ConnectionRefusedError:
            return reached
        except OSError:
            return False
        reached = True
        try:
            with contextlib.suppress(OSError):
                while await reader.read(GREETING_BYTES_MAX):
                    pass
        finally:
            writer.close()
        ended_soon = ended_soon + 1 if time.monotonic() - begun_s < STAYS_S_MIN else 0
    return False


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens there; on all addresses if it isn't this machine's (behind NAT). Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            listener.bind(("", port))
        listener.listen(GUESTS_MAX)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
