"""Starts workers by forking: which forkserver is asked, and what happens when one has ended or doesn't answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from ts_frontend.workers.forkserver import Forkserver, ForkserverLost
from ts_frontend.workers.process import ExecLauncher
from ts_frontend.workers.started import Ends, LineSink, Process, Spec

log = logging.getLogger(__name__)

#: Until a new forkserver has imported torch, on a cold disk.
READY_S_MAX = 120.0
#: Until it has forked a worker: usually some 10 ms.
FORK_S_MAX = 15.0


class ForkLauncher:
    """One forkserver at a time. One that dies takes the workers it had forked with it (on Linux the kernel ends them);
    the next launch starts a new one, and what those had not started runs on their successors.

    One that lives and doesn't answer is set aside: its workers go on, it ends with the last of them, and the start that
    found out is exec'd by `fallback`.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        fallback: ExecLauncher,
        *,
        ready_s_max: float = READY_S_MAX,
        fork_s_max: float = FORK_S_MAX,
    ) -> None:
        self._env = env
        self._fallback = fallback
        self._ready_s_max, self._fork_s_max = ready_s_max, fork_s_max
        self._current: Forkserver | None = None
        self._all: set[Forkserver] = set()
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        """Starts the forkserver; returns at once, `launch` waits until it has imported torch."""
        await self._server()

    async def _server(self) -> Forkserver:
        async with self._lock:
            if self._current is None or not self._current.usable:
                self._current = await Forkserver.start(self._env)
                self._all.add(self._current)
                self._current.reader.add_done_callback(self._forget)
            return self._current

    def _forget(self, _: object) -> None:
        self._all = {server for server in self._all if not server.reader.done()}

    async def launch(self, spec: Spec, sink: LineSink) -> Process:
        server = await self._server()
        try:
            return await self._fork(server, spec, sink)
        except asyncio.TimeoutError:
            server.set_aside()
            log.error(
                "The forkserver (pid %s) doesn't answer: worker of %s is exec'd, the next start makes a new forkserver",
                server.pid,
                spec.name,
            )
        except ForkserverLost as error:
            log.error("%s: worker of %s is exec'd, the next start makes a new forkserver", error, spec.name)
        return await self._fallback.launch(spec, sink)

    async def _fork(self, server: Forkserver, spec: Spec, sink: LineSink) -> Process:
        await asyncio.wait_for(asyncio.shield(server.ready), self._ready_s_max)
        ends = Ends()
        try:
            pid = await asyncio.wait_for(server.fork(spec, ends), self._fork_s_max)
        except BaseException:
            ends.close()
            raise
        ends.close_worker_side()
        return server.adopt(pid, spec, ends, sink)

    async def close(self) -> None:
        """Ends the forkservers; workers they forked are the supervisor's to end first."""
        await asyncio.gather(*(server.close() for server in self._all))
