"""The parts that all workers of the server share: launchers, ids, devices, the clock; and autoscaling: the number of
workers that a model's load needs. `Scaling` is pure, time is an argument; `PoolScaler` samples a pool and scales it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ts_frontend.scheduling.queues import WorkQueue
from ts_frontend.tasks import kept, watched
from ts_frontend.workers.cluster.launcher import ClusterLauncher
from ts_frontend.workers.cluster.resources import ClusterRequest
from ts_frontend.workers.forkserver import ForkLauncher, HolderLauncher
from ts_frontend.workers.launchers import ExecLauncher, InProcessLauncher, Launcher, TorchrunLauncher, tool_output
from ts_frontend.workers.pool import Clock, Pool, PoolResources
from ts_frontend.workers.process import Backoff, LineSink, ProcessSpec, StartFailed, WorkerPlan, reap_orphans
from ts_frontend.workers.resources import CPU, Device, Inventory, Placement
from ts_frontend.workers.spawning import StartedForkserver
from ts_frontend.workers.worker import WorkerState

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """The rule of autoscaling. `target_queue`: requests that may wait for each worker; `target_wait_s`: seconds that
    90 % of the requests may wait (0: any time). Exceeding either for `up_after_s` adds workers; workers that were
    not needed for `down_after_s` are ended."""

    target_queue: float = 1.0
    target_wait_s: float = 0.0
    up_after_s: float = 1.0
    down_after_s: float = 60.0


class LoadSample(NamedTuple):
    """The load of a pool at one time. `queued`: requests that wait, `held` of them in engines; `wait_p90_s`: of the
    waiting and running requests; `at_once`: requests that one worker runs together; `ready`: the number of `workers`
    that accept requests."""

    queued: int
    running: int
    wait_p90_s: float
    workers: int
    ready: int
    at_once: int = 1
    held: int = 0

    @property
    def needed(self) -> int:
        """The number of workers with which none of these requests would wait."""
        return math.ceil((self.queued + self.running) / self.at_once)


class ScalingDecision(NamedTuple):
    """A change of the number of workers, `at` seconds since the epoch."""

    at: float
    before: int
    workers: int
    reason: str


class Scaling:
    """Decides between `least` and `most` workers. After a decision, the next one needs its full time again, so a
    constant load causes at most one correction downwards."""

    def __init__(self, rule: ScalingRule) -> None:
        self.rule = rule
        self._crowded_since_s: float | None = None
        #: (time, needed workers) of the samples in the window, without those that a later one exceeds: the first is the
        #: largest.
        self._needs: deque[tuple[float, int]] = deque()
        self._begun_s: float | None = None

    def decide(self, now_s: float, sample: LoadSample, least: int, most: int) -> tuple[int, str] | None:
        """Takes a sample; returns the wanted workers and the reason, None for no change. `now_s` never decreases."""
        rule = self.rule
        self._remember(now_s, sample)
        if sample.workers < least or sample.workers > most:
            return self._decided(now_s, min(max(sample.workers, least), most), f"between {least} and {most} workers")
        if self._crowded(sample):
            if self._crowded_since_s is None:
                self._crowded_since_s = now_s
            long_s = now_s - self._crowded_since_s
            if long_s >= rule.up_after_s and sample.ready == sample.workers < most:
                fits = math.ceil((sample.queued + sample.running) / (sample.at_once + rule.target_queue))
                wanted = min(max(fits, sample.workers + 1), 2 * sample.workers, most)
                reason = f"{sample.queued} requests wait, 90 % of all for {sample.wait_p90_s:.3g} s or less"
                return self._decided(now_s, wanted, reason)
            return None
        self._crowded_since_s = None
        if self._begun_s is None or now_s - self._begun_s < rule.down_after_s:
            return None
        wanted = max(least, min(self._needs[0][1], most))
        if wanted >= sample.workers:
            return None
        return self._decided(now_s, wanted, f"no more than {wanted} were busy in {rule.down_after_s:g} s")

    def _crowded(self, sample: LoadSample) -> bool:
        if not sample.queued:
            return False
        late = 0 < self.rule.target_wait_s < sample.wait_p90_s
        return late or sample.queued > self.rule.target_queue * max(1, sample.workers)

    def _remember(self, now_s: float, sample: LoadSample) -> None:
        if self._begun_s is None:
            self._begun_s = now_s
        needs = self._needs
        while needs and needs[-1][1] <= sample.needed:
            needs.pop()
        needs.append((now_s, sample.needed))
        while needs[0][0] < now_s - self.rule.down_after_s:
            needs.popleft()

    def _decided(self, now_s: float, wanted: int, reason: str) -> tuple[int, str]:
        self._crowded_since_s = None
        self._needs.clear()
        self._begun_s = now_s
        return wanted, reason


def percentile(values: Sequence[float], part: float) -> float:
    """The value that `part` (0 to 1) of the values don't exceed; 0 without values."""
    if not values:
        return 0.0
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


class PoolScaler:
    """Scales a pool by its load, between `least` and `most`; inactive while they are equal or `least` is 0.
    `batch_size`: of the handler's batches."""

    def __init__(self, pool: Pool, rule: ScalingRule, batch_size: int) -> None:
        self.pool = pool
        self.rule = rule
        self.least = self.most = 0
        self.last: ScalingDecision | None = None
        self.ups = self.downs = 0
        self._batch_size = batch_size
        #: The requests that a full engine ran when workers were added for those that waited in it, until none is there.
        self._fitted: int | None = None
        self._scaling = Scaling(rule)
        self._changing: asyncio.Task[None] | None = None

    @property
    def active(self) -> bool:
        return 0 < self.least < self.most

    def between(self, least: int, most: int) -> int:
        """Scales between these numbers; returns those to begin with: the present one, if it is within them."""
        self.least, self.most = least, most
        return min(max(len(self.pool.slots), least), most) if self.active else least

    def sample(self, now_s: float) -> LoadSample:
        waiting = self.pool.queue.waiting()
        workers = [slot.worker for slot in self.pool.slots if slot.worker is not None]
        running = [job for worker in workers if worker.state is WorkerState.READY for job in worker.jobs()]
        held = sum(worker.waiting for worker in workers if worker.state is WorkerState.READY)
        waits = [now_s - job.queued_at_s for job in waiting]
        waits += [job.sent_at_s - job.queued_at_s for job in running]
        at_once = next((worker.concurrency for worker in workers if worker.info), 0) or self._batch_size
        if not running:
            self._fitted = None
        kept = sum(not slot.gave_up for slot in self.pool.slots)
        ready = self.pool.ready_count
        return LoadSample(
            len(waiting) + held,
            len(running) - held,
            percentile(waits, 0.9),
            kept,
            ready,
            min(at_once, self._fitted or at_once),
            held,
        )

    def tick(self, now_s: float) -> None:
        """Takes a sample, and begins a change that is due, unless one is under way."""
        if not self.active or not self.pool.slots:
            return
        if self._changing is not None and not self._changing.done():
            return
        sample = self.sample(now_s)
        found = self._scaling.decide(now_s, sample, self.least, self.most)
        if found is None:
            return
        wanted, reason = found
        if sample.held and wanted > sample.workers:
            self._fitted = max(1, sample.running // max(1, sample.ready))
        self.last = ScalingDecision(time.time(), sample.workers, wanted, reason)
        self.ups += wanted > sample.workers
        self.downs += wanted < sample.workers
        log.info("%s gets %s workers instead of %s: %s.", self.pool.name, wanted, sample.workers, reason)
        self._changing = watched(self._change(wanted), f"The scaling of {self.pool.name}")

    async def _change(self, wanted: int) -> None:
        try:
            await self.pool.scale(wanted)
        except StartFailed as error:
            log.warning("%s does not get all of its %s workers yet: %s", self.pool.name, wanted, error.message)

    async def close(self) -> None:
        """Ends a change under way; the pool's own end follows."""
        self.least = self.most = 0
        if self._changing is not None:
            self._changing.cancel()
            await asyncio.wait({self._changing})


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
