"""Launchers, ids, devices and the clock that all workers of the server share."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ts_frontend.scheduling.queues import WorkQueue
from ts_frontend.tasks import kept
from ts_frontend.workers.cluster.launcher import ClusterLauncher
from ts_frontend.workers.cluster.resources import ClusterRequest
from ts_frontend.workers.devices import CPU, Device, Inventory, Placement
from ts_frontend.workers.failures import Backoff
from ts_frontend.workers.forkserver import ForkLauncher
from ts_frontend.workers.holder import HolderLauncher
from ts_frontend.workers.launchers import ExecLauncher, InProcessLauncher, Launcher, TorchrunLauncher, tool_output
from ts_frontend.workers.pool import Clock, Pool, PoolResources
from ts_frontend.workers.process import LineSink, ProcessSpec, WorkerPlan, reap_orphans
from ts_frontend.workers.scaling import PoolScaler, ScalingRule
from ts_frontend.workers.spawning import StartedForkserver

log = logging.getLogger(__name__)

TICK_S = 0.1
#: A longer time between two ticks means that the server stood still: it was suspended, or its container paused.
STILL_S = 1.0
TOOL_S_MAX = 10.0

#: (worker id, name of the model's workers, stream, line)
OnLine = Callable[[int, str, str, str], None]


class Supervisor:
    """Makes pools and ticks them. `launcher` replaces the launcher that `fork` and `in_process` select; `clock` is
    the clock of restarts; `cluster` starts workers on other machines. `frontend`: the number of this one of the
    `frontends`, whose workers have different ids."""

    def __init__(
        self,
        env: Mapping[str, str],
        *,
        work_dir: Path,
        first_worker_id: int,
        first_distribution_id: int,
        fork: bool,
        preload_torch: bool = True,
        forkserver: StartedForkserver | None = None,
        in_process: bool = False,
        inventory: Inventory,
        on_line: OnLine,
        launcher: Launcher | None = None,
        clock: Clock | None = None,
        cluster: ClusterLauncher | None = None,
        frontend: int = 0,
        frontends: int = 1,
    ) -> None:
        self.placement = Placement(inventory, frontend / frontends)
        self._exec = ExecLauncher()
        self._torchrun = TorchrunLauncher(work_dir, self._exec)
        self._fork: ForkLauncher | None = None
        if fork and not in_process and launcher is None:
            self._fork = ForkLauncher(env, self._exec, preload_torch=preload_torch, started=forkserver)
        self._launcher: Launcher = launcher or (InProcessLauncher() if in_process else self._fork or self._exec)
        self._clock = clock
        self.cluster = cluster
        self._ids = itertools.count(first_worker_id + frontend, frontends)
        self._distribution_id = first_distribution_id
        self._on_line = on_line
        self._pools: set[Pool] = set()
        #: The pools with workers or requests, which need ticks.
        self._busy: set[Pool] = set()
        self._scalers: dict[Pool, PoolScaler] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Starts the forkservers (before any listener exists) and the clock."""
        if self._fork is not None:
            await self._fork.start()
        if self.cluster is not None:
            await self.cluster.start()
        self._tasks.append(kept(self._tick, "The clock of the workers"))
        if os.getpid() == 1:
            self._tasks.append(kept(reap_orphans, "The wait for orphaned processes"))

    def next_worker_id(self) -> int:
        return next(self._ids)

    def next_distribution_id(self, level: int) -> int:
        """Returns the first of `level` new ids, one for each process or device of a worker."""
        self._distribution_id += level
        return self._distribution_id - level

    def pool(
        self,
        name: str,
        plan: WorkerPlan,
        queue: WorkQueue,
        *,
        device_type: str,
        device_ids: tuple[int, ...],
        level: int,
        give_up_s: float,
        restart_delay_s_max: float,
        on_change: Callable[[], None],
    ) -> Pool:
        def next_device() -> Device:
            if plan.spec.cluster is not None:
                return device_of(plan.spec.cluster)
            return self.placement.next(plan, device_type, device_ids, level)

        def line_sink(worker_id: int) -> LineSink:
            return lambda stream, line: self._on_line(worker_id, plan.spec.name, stream, line)

        next_id = partial(self.next_distribution_id, level) if level else self.next_worker_id
        launcher = self._launcher_of(plan.spec)
        sharing = plan.sharing
        holder = HolderLauncher(launcher, plan) if sharing.wanted and not sharing.refusal else None
        resources = PoolResources(holder or launcher, next_id, next_device, line_sink, holder)
        if self.cluster is not None and plan.spec.cluster is not None:
            resources = replace(resources, waiting=self.cluster.waiting, cluster=self.cluster.bridge.state)
        backoff = partial(Backoff, give_up_s, restart_delay_s_max)
        pool = Pool(name, plan, queue, resources, backoff, on_change, self._clock)
        pool.on_busy = partial(self._busy.add, pool)
        pool.on_gpus = bool(self.placement.usable(device_type, device_ids))
        self._pools.add(pool)
        return pool

    def scaler(self, pool: Pool, rule: ScalingRule, batch_size: int) -> PoolScaler:
        scaler = self._scalers[pool] = PoolScaler(pool, rule, batch_size)
        return scaler

    def _launcher_of(self, spec: ProcessSpec) -> Launcher:
        """Returns the cluster's launcher for a worker that is placed there, torchrun's for one of several processes,
        exec's for one with an interpreter of its own, else the usual one."""
        if spec.cluster is not None and self.cluster is not None:
            return self.cluster
        if spec.torchrun is not None:
            return self._torchrun
        return self._exec if spec.python else self._launcher

    async def dismiss(self, pool: Pool, drain_s: float | None) -> None:
        scaler = self._scalers.pop(pool, None)
        if scaler is not None:
            await scaler.close()
        await pool.close(drain_s)
        self._pools.discard(pool)
        self._busy.discard(pool)
        self.placement.forget(pool.plan)
        if self.cluster is not None and pool.plan.spec.cluster is not None:
            self.cluster.forget(pool.plan.spec)

    async def _tick(self) -> None:
        """Ticks the busy pools. After a standstill it leaves one tick out: answers that have come meanwhile are read
        first, and their workers aren't taken for hanging ones."""
        before_s, left_out = time.monotonic(), False
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            left_out = not left_out and now_s - before_s > STILL_S
            before_s = now_s
            if left_out:
                continue
            for pool in list(self._busy):
                self._tick_one(pool, now_s)

    def _tick_one(self, pool: Pool, now_s: float) -> None:
        """Ticks one pool; its failure must not end the clock of all."""
        if not pool.busy:
            self._busy.discard(pool)
            return
        try:
            pool.tick(now_s)
            if (scaler := self._scalers.get(pool)) is not None:
                scaler.tick(now_s)
        except Exception:
            log.exception("Workers of %s could not be supervised", pool.name)

    async def close(self, *, leave_forkserver: bool = False) -> dict[str, Any] | None:
        """Closes the pools, whose workers get no more time, and the launchers. `leave_forkserver`: to the next server
        in this process; returns it then, if that is possible."""
        await asyncio.gather(*(scaler.close() for scaler in list(self._scalers.values())))
        await asyncio.gather(*(pool.close(0.0) for pool in list(self._pools)))
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        left = None
        if self._fork is not None:
            left = self._fork.leave() if leave_forkserver else None
            await self._fork.close()
        if self.cluster is not None:
            await self.cluster.close()
        await self._exec.close()
        return left


def device_of(request: ClusterRequest) -> Device:
    """The device of a worker in a cluster, in its own numbering: Ray shows it only its own GPUs."""
    return Device("cuda", 0, tuple(range(max(1, int(request.num_gpus))))) if request.num_gpus else CPU


async def find_accelerators(wanted: int | None, platform: str, machine: str) -> Inventory:
    """The accelerators that exist, at most `wanted` of them (None: all). `platform`: sys.platform."""
    if wanted == 0:
        return Inventory()
    if platform == "darwin" and machine == "arm64":
        return Inventory("mps", 1)
    listing = await tool_output(["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"], TOOL_S_MAX)
    count = len(listing.split()) if listing else 0
    return Inventory("cuda", count if wanted is None else min(count, wanted)) if count else Inventory()
