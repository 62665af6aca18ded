"""Workers that are forked from their model version's holder, a process that has loaded the model once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ts_frontend.tasks import owned
from ts_frontend.workers.forkserver import FORK_S_MAX, Forkserver, ForkserverLost
from ts_frontend.workers.launchers import Launcher, LaunchFailed
from ts_frontend.workers.process import ExitStatus, LineSink, ProcessSpec, WorkerPlan, WorkerProcess

log = logging.getLogger(__name__)

WHAT = "the process that holds the weights of {name}"


@dataclass(frozen=True, slots=True)
class _Held:
    """A holder's process, which was launched as workers are."""

    what: str
    process: WorkerProcess

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        self.process.kill()

    async def end(self) -> ExitStatus:
        how = await asyncio.shield(self.process.exited)
        self.process.release()
        return how


class HolderLauncher:
    """Starts the workers of one model version from its holder. The holder is started with the first worker, and again
    with the next worker after a failed load or after its death, which also ends its workers; `rest` and `close` end it.

    A holder whose handler can't be forked reports the reason: from then on `below`, which started the holder, starts
    the workers, and they load the model themselves.
    """

    def __init__(self, below: Launcher, plan: WorkerPlan) -> None:
        self._below, self._plan = below, plan
        self._what = WHAT.format(name=plan.spec.name)
        self._loading: asyncio.Task[Forkserver | None] | None = None
        self._holders: set[Forkserver] = set()
        self._failed = False
        #: The reason why the workers load the model themselves; "" as long as they don't.
        self.refusal = ""
        #: The seconds of the latest load, and the number of loads.
        self.load_s = 0.0
        self.loads = 0

    @property
    def pid(self) -> int:
        """The process id of the holder; 0 without a ready one."""
        holder = self._current()
        return holder.pid if holder is not None else 0

    def _current(self) -> Forkserver | None:
        task = self._loading
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        holder = task.result()
        return holder if holder is not None and holder.usable else None

    async def launch(self, spec: ProcessSpec, sink: LineSink) -> WorkerProcess:
        """Forks a worker that already has the model. Raises OSError, LaunchFailed."""
        holder = await self._holder(spec, sink) if not self.refusal else None
        if holder is None:
            return await self._below.launch(spec, sink)
        try:
            return await holder.worker(spec, sink, None, FORK_S_MAX)
        except ForkserverLost as error:
            raise LaunchFailed(str(error)) from error

    async def _holder(self, spec: ProcessSpec, sink: LineSink) -> Forkserver | None:
        """Returns the holder when it has loaded the model, None when it refuses to fork."""
        if self._loading is None or (self._loading.done() and (self._failed or self._current() is None)):
            self.rest()
            self._failed = False
            self._loading = owned(self._loaded(spec, sink))
        loading = self._loading
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            if loading.cancelled():
                raise LaunchFailed(f"{self._what} was ended while it loaded the model") from None
            raise

    async def _loaded(self, spec: ProcessSpec, sink: LineSink) -> Forkserver | None:
        process = await self._below.launch(replace(spec, holds=True), sink)
        process.sock.setblocking(False)
        holder = Forkserver(process.sock, _Held(self._what, process))
        self._holders.add(holder)
        holder.reader.add_done_callback(lambda _: self._holders.discard(holder))
        limit_s = self._plan.startup_timeout_s
        try:
            reply = await asyncio.wait_for(holder.ask("load", settings=self._settings()), limit_s)
        except TimeoutError:
            holder.set_aside()
            raise LaunchFailed(f"{self._what} didn't load it within {limit_s:g} s (startupTimeout)") from None
        except ForkserverLost as error:
            raise LaunchFailed(f"{error}, while it loaded the model") from error
        except BaseException:
            holder.set_aside()
            raise
        return self._judged(holder, reply)

    def _settings(self) -> Mapping[str, Any]:
        return {**self._plan.load, "gpu_id": None, "device_type": "cpu"}

    def _judged(self, holder: Forkserver, reply: Mapping[str, Any]) -> Forkserver | None:
        self.loads += 1
        self.load_s = float(reply["load_s"])
        self._failed = bool(reply["failed"])
        self.refusal = str(reply["refusal"])
        if self.refusal:
            log.warning(
                "%s: shareWeights has no effect, each worker loads the model: %s", self._plan.spec.name, self.refusal
            )
            holder.set_aside()
            return None
        if not self._failed:
            log.info("%s holds them (pid %s), loaded in %.1f s.", _first_upper(self._what), holder.pid, self.load_s)
        return holder

    async def renewed(self, anew: str) -> str:
        """Makes the next workers use the model's present source files, and load the model again if the holder's
        loaded state is outdated, or for the reason `anew`. Returns the reason, "" if the loaded state stays valid."""
        anew = anew or await self._refused()
        if anew:
            self.rest()
            self.refusal = ""  # it is tried again whether it can be forked
        return anew

    async def _refused(self) -> str:
        if self.refusal:
            return f"each worker loads it: {self.refusal}"
        holder = self._current()
        if holder is None or self._failed:
            return "it wasn't loaded"
        try:
            reply = await asyncio.wait_for(holder.ask("renewal"), FORK_S_MAX)
        except (TimeoutError, ForkserverLost, LaunchFailed) as error:
            return f"{self._what} gave no answer: {error}"
        return str(reply["refusal"])

    # --- its end

    def rest(self) -> None:
        """Releases the model's memory: the holder ends with its last worker. The next worker starts a new one."""
        task, self._loading = self._loading, None
        if task is not None:
            task.cancel()
        for holder in self._holders:
            holder.set_aside()

    async def close(self) -> None:
        task = self._loading
        self.rest()
        if task is not None:
            await asyncio.wait({task})
        await asyncio.gather(*(holder.close() for holder in list(self._holders)))


def _first_upper(text: str) -> str:
    return text[:1].upper() + text[1:]
