"""The server's ends of its connections to a Ray cluster: the address to which workers of other machines connect (TLS
with client certificates, and a token for each), and the bridge to Ray: a process that is started and given orders here,
and that knows the state of the cluster.

A bridge that ends is started again. The workers don't depend on it: only new ones wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import math
import os
import re
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import ts.version
import ts_frontend.errors
from ts.protocol.secure import PeerCertificate, SecureSocket, keep_watch, server_context
from ts_frontend.errors import ServeError
from ts_frontend.tasks import kept
from ts_frontend.workers.cluster.resources import ClusterNode, ClusterState
from ts_frontend.workers.launchers import readable
from ts_frontend.workers.process import LineReader
from ts_frontend.workers.spawning import spawn

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


READ_BYTES = 256 * 1024
#: The most seconds until the first connection, with the imports.
CONNECT_S_MAX = 60.0
RESTART_S, RESTART_S_MAX = 1.0, 30.0
#: The part of Ray's messages about a missing or wrong token.
TOKEN_REFUSED = "InvalidAuthToken"
WANTS_TOKEN = (
    ". The cluster accepts only clients with its token: "
    "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
)


class ClusterUnreachable(ServeError):
    """Ray can't be reached, or isn't installed."""

    remedy = "Check `--ray-address`, and `ray status` there; `pip install torchrelay[ray]` installs Ray."


class BridgeLink:
    """The server's side of the bridge. `on_worker_ended` gets the numbers of actors that have ended or were refused,
    with the reason, and whether their node or process was lost; `on_nodes_gone` gets the nodes that have died;
    `on_told` is called after each update of the cluster's state;
    `on_end` gets the reason of the bridge's end, after which open orders get no answer."""

    def __init__(self, address: str, env: Mapping[str, str]) -> None:
        self.on_worker_ended: Callable[[int, str, bool], None] = lambda number, reason, lost: None
        self.on_nodes_gone: Callable[[list[ClusterNode]], None] = lambda nodes: None
        self.on_told: Callable[[], None] = lambda: None
        self.on_end: Callable[[str], None] = lambda reason: None
        self.state = ClusterState(address)
        self.certificates: dict[str, str] = {}
        self.host = ""
        self._address = address
        roots = (str(Path(module.__file__ or "").parents[1]) for module in (ts_frontend.errors, ts.version))
        self._env = {**env, "PYTHONPATH": os.pathsep.join((*roots, env.get("PYTHONPATH", "")))}
        self._sock: socket.socket | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._wants_token = False
        self._unsent = bytearray()

    async def start(self) -> None:
        """Starts the bridge and returns when Ray has been reached. Raises ClusterUnreachable."""
        self._task = kept(self._keep, "The bridge to Ray")
        try:
            await asyncio.wait_for(asyncio.shield(self._connected), CONNECT_S_MAX)
        except TimeoutError:
            raise ClusterUnreachable(f"Ray at {self._address} wasn't reached in {CONNECT_S_MAX:g} s") from None

    # --- its process

    async def _keep(self) -> None:
        pause_s = RESTART_S
        while not self._closing:
            begun_s = time.monotonic()
            reason = await self._live()
            if self._closing:
                return
            if not self._connected.done():
                hint = WANTS_TOKEN if self._wants_token else ""
                self._connected.set_exception(
                    ClusterUnreachable(f"Ray at {self._address} can't be used: {reason}{hint}")
                )
                return
            log.error("Ray is away: %s. Workers that live go on; new ones wait", reason)
            self.state.lost(reason)
            self.on_end(reason)
            pause_s = RESTART_S if time.monotonic() - begun_s > RESTART_S_MAX else min(2 * pause_s, RESTART_S_MAX)
            await asyncio.sleep(pause_s)

    async def _live(self) -> str:
        """One life of the bridge; returns the reason of its end."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        errors, their_errors = os.pipe()
        last = [""]

        def heard(_: str, line: str) -> None:
            log.info("Ray's bridge: %s", line)
            last[0] = line or last[0]
            self._wants_token = self._wants_token or TOKEN_REFUSED in line

        reader = LineReader(errors, "stderr", heard)
        argv = [sys.executable, "-m", "ts_frontend.workers.cluster.bridge"]
        argv += ["--fd", str(theirs.fileno()), "--address", self._address]
        try:
            child = self._child = await asyncio.to_thread(
                spawn,
                argv,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=their_errors,
                pass_fds=(theirs.fileno(),),
            )
        finally:
            theirs.close()
            os.close(their_errors)
        self._sock = ours
        self._unsent.clear()
        try:
            refusal = await self._read(ours)
        finally:
            self._sock = None
            asyncio.get_running_loop().remove_writer(ours)
            ours.close()
            child.kill()
            status = await asyncio.to_thread(child.wait)
            reader.finish()
        return refusal or f"the bridge ended with status {status}" + (f": {sentence(last[0])}" if last[0] else "")

    async def _read(self, sock: socket.socket) -> str:
        rest = b""
        refusal = ""
        while True:
            await readable(sock.fileno())
            try:
                data = sock.recv(READ_BYTES)
            except BlockingIOError:
                continue
            except OSError:
                return refusal
            if not data:
                return refusal
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                refusal = self._heard(json.loads(line)) or refusal

    def _heard(self, news: dict[str, Any]) -> str:
        """Handles an event; returns the reason if Ray refuses the connection."""
        event = news.pop("event")
        if event == "certificates":
            self.certificates = self.certificates or news
        elif event == "connected":
            self.host = news["host"]
            self.state.connected, self.state.away_at = True, None
            self.state.told_s = time.monotonic()
            log.info("Connected to Ray %s at %s.", news["version"], self._address)
            if not self._connected.done():
                self._connected.set_result(None)
        elif event == "cluster":
            nodes = tuple(ClusterNode(**node) for node in news["nodes"])
            gone = self.state.told(nodes, time.monotonic())
            if gone:
                self.on_nodes_gone(gone)
            self.on_told()
        elif event == "ended":
            self.on_worker_ended(news["id"], news["reason"], news["lost"])
        elif event == "refused":
            return str(news["reason"])
        return ""

    # --- orders

    def order(self, order: str, **more: Any) -> None:
        """Gives an order. Without a bridge the order is lost, as `on_end` has reported."""
        if self._sock is None:
            return
        self._unsent += json.dumps({"order": order, **more}).encode() + b"\n"
        self._write()

    def _write(self) -> None:
        sock = self._sock
        if sock is None:
            return
        loop = asyncio.get_running_loop()
        try:
            while self._unsent:
                del self._unsent[: sock.send(self._unsent)]
        except BlockingIOError:
            loop.add_writer(sock, self._write)
            return
        except OSError:
            self._unsent.clear()  # its reader sees the end
        loop.remove_writer(sock)

    @property
    def usable(self) -> bool:
        return self._sock is not None and self.state.connected

    def worker_certificate(self) -> PeerCertificate:
        return PeerCertificate(
            self.certificates["authority"], self.certificates["worker"], self.certificates["worker_key"]
        )

    def server_certificate(self) -> PeerCertificate:
        return PeerCertificate(
            self.certificates["authority"], self.certificates["server"], self.certificates["server_key"]
        )

    async def close(self) -> None:
        self._closing = True
        if self._sock is not None:
            self._sock.shutdown(socket.SHUT_RDWR)
        if self._task is not None:
            done, _ = await asyncio.wait({self._task}, timeout=5.0)
            if not done:
                self._task.cancel()
                await asyncio.wait({self._task})
        if self._child is not None:
            self._child.kill()


def sentence(line: str) -> str:
    """The first sentence of a line of Ray's log, without its prefix of time, processes and file."""
    text = re.sub(r"^\[[^\]]*\]\s*(\S+:\d+:\s*)?", "", line)
    return text.split(". ")[0].rstrip(".")
