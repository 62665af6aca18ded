"""A cluster that the tests play: the launcher, the address, the agents and the workers are the server's own; only Ray
is not there. Its orders are carried out by processes of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stage import Skipping
from support import GUARD_S, openssl
from ts_frontend.config.table import ServerConfig
from ts_frontend.scheduling.batcher import Policy
from ts_frontend.scheduling.queues import JobQueue
from ts_frontend.workers.cluster.launcher import ClusterLauncher
from ts_frontend.workers.cluster.link import BridgeLink
from ts_frontend.workers.cluster.resources import ClusterNode, ClusterRequest
from ts_frontend.workers.pool import Pool, PoolResources
from ts_frontend.workers.process import Backoff, LineSink, ProcessSpec, WorkerPlan
from ts_frontend.workers.resources import CPU
from ts_frontend.workers.spawning import worker_env

#: What an actor does with its instructions.
AGENT = "import json, sys; from ts.runtime.agent import Agent; Agent(*json.load(sys.stdin)).run()"
SIGNED = (
    ("server", "extendedKeyUsage=serverAuth"),
    ("worker", "extendedKeyUsage=clientAuth"),
)


def certificates(folder: Path) -> dict[str, str]:
    """The certificates that the bridge makes."""

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(
        folder, "req", "-x509", *curve, "-subj", "/CN=authority", "-days", "2", "-keyout", "ca.key", "-out", "ca.pem"
    )
    found = {"authority": (folder / "ca.pem").read_text()}
    for name, usage in SIGNED:
        openssl(folder, "req", *curve, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        (folder / "usage").write_text(usage)
        openssl(
            folder,
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-days", "2", "-extfile", "usage", "-out", f"{name}.pem"),
        )
        found |= {name: (folder / f"{name}.pem").read_text(), f"{name}_key": (folder / f"{name}.key").read_text()}
    return found


class PlayedBridge(BridgeLink):
    """Ray, played: nodes are numbers, and an order starts an agent at once unless there is no `room`."""

    def __init__(self, certificates_: dict[str, str]) -> None:
        super().__init__("played:1", {})
        self.certificates, self.host = certificates_, "127.0.0.1"
        self.orders: list[dict[str, Any]] = []
        self.actors: dict[int, subprocess.Popen[bytes]] = {}
        self.room = True
        self.here = True
        self.port = 0

    async def start(self) -> None:
        self.tell()

    def tell(self) -> None:
        """Ray's news."""
        free = {"CPU": 4.0 if self.room else 0.0}
        nodes = tuple(
            ClusterNode(f"node{number}", f"10.0.0.{number}", True, {"CPU": 4.0}, free, port=self.port)
            for number in (1, 2)
        )
        self.state.told(nodes, time.monotonic())
        self.on_told()

    @property
    def usable(self) -> bool:
        return self.here

    def order(self, order: str, **more: Any) -> None:
        self.orders.append({"order": order, **more})
        if order == "place" and self.room:
            self.carry_out(self.orders[-1])
        elif order == "end":
            self.end(more["id"])

    def carry_out(self, order: dict[str, Any]) -> None:
        node = order["node"] or next(name for name in ("node1", "node2") if name not in order["avoid"])
        instructions = {**order["instructions"], "model_dir": order["instructions"]["origin"], "metrics_config": ""}
        child = subprocess.Popen(
            [sys.executable, "-c", AGENT], env=worker_env(ServerConfig()), stdin=subprocess.PIPE, start_new_session=True
        )
        assert child.stdin is not None
        with child.stdin as given:
            given.write(json.dumps([instructions, {"id": node, "address": "10.0.0.1", "host": "h"}]).encode())
        self.actors[order["id"]] = child

    def end(self, number: int) -> None:
        """Ends an actor as Ray does, or as a node's death does: without a word."""
        child = self.actors.pop(number, None)
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()

    async def close(self) -> None:
        for number in list(self.actors):
            self.end(number)


class PlayedCluster:
    """The bridge, the launcher and a pool of workers of a model whose handler is in `folder`."""

    def __init__(self, folder: Path, certificates_: dict[str, str], **plan: Any) -> None:
        self.bridge = PlayedBridge(certificates_)
        self.launcher = ClusterLauncher("played:1", {}, ("", 0), "", self.bridge)
        self.lines: list[str] = []
        spec = ProcessSpec("m_1.0", {}, cwd=str(folder), cluster=ClusterRequest())
        load = {"model_name": "m", "model_version": "1.0", "model_dir": str(folder), "handler": "handler.py"}
        usual: dict[str, Any] = {
            "startup_timeout_s": GUARD_S,
            "response_timeout_s": GUARD_S,
            "message_bytes_max": 1 << 20,
        }
        ids = iter(range(9000, 9999))
        resources = PoolResources(
            self.launcher,
            lambda: next(ids),
            lambda: CPU,
            self._sink,
            waiting=self.launcher.waiting,
            cluster=self.bridge.state,
        )
        backoff: Callable[[], Backoff] = lambda: Backoff(300.0)  # noqa: E731
        queue = JobQueue(Policy())
        self.pool = Pool(
            "m_1.0", WorkerPlan(spec, load, **{**usual, **plan}), queue, resources, backoff, lambda: None, Skipping()
        )

    def _sink(self, worker_id: int) -> LineSink:
        return lambda stream, line: self.lines.append(f"{stream}: {line}")

    async def __aenter__(self) -> PlayedCluster:
        await self.launcher.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.pool.close(0.0)
        await self.launcher.close()
        await asyncio.sleep(0)
