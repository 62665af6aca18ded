"""The server's end of the bridge to Ray: it starts the process, gives it orders, and knows the state of the cluster.

A bridge that ends is started again. The workers don't depend on it: only new ones wait.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ts.version
import ts_frontend.errors
from ts.protocol.secure import PeerCertificate
from ts_frontend.errors import ServeError
from ts_frontend.tasks import kept
from ts_frontend.workers.cluster.resources import ClusterNode, ClusterState
from ts_frontend.workers.launchers import readable
from ts_frontend.workers.process import LineReader
from ts_frontend.workers.spawning import spawn

log = logging.getLogger(__name__)

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
