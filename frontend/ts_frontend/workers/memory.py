"""The memory of workers, measured of a pool's processes in the machine and on GPUs, and of each worker in turn; the
admission of models by register calls, within a limit for all models together; and models on demand: a first request
starts their workers, which end when idle or when others need the memory."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from ts_frontend.errors import MemoryFull, NoWorker
from ts_frontend.job import Ledger
from ts_frontend.tasks import Notifier, watched
from ts_frontend.workers.pool import Clock, Pool
from ts_frontend.workers.process import StartFailed, resident_bytes
from ts_frontend.workers.resources import memory_bytes
from ts_frontend.workers.worker import Worker

log = logging.getLogger(__name__)


#: The most workers whose memory is read at once: each costs some system calls between requests.
MEMORY_READS_MAX = 16
_PSS = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)


def proportional_bytes(pid: int) -> int:
    """The memory of a process, each shared page divided among those that share it (PSS); its resident memory if that
    can't be read, 0 if it has ended. Blocking: the kernel walks all its pages."""
    if sys.platform == "linux":
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
                found = _PSS.search(file.read())
        except OSError:
            found = None
        if found is not None:
            return int(found[1]) * 1024
    return resident_bytes(pid)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a model's processes, in the machine and on GPUs."""

    host: int = 0
    gpus: int = 0

    def plus(self, other: Memory) -> Memory:
        return Memory(self.host + other.host, self.gpus + other.gpus)

    def most(self, other: Memory) -> Memory:
        return Memory(max(self.host, other.host), max(self.gpus, other.gpus))

    def excess(self, limit: Memory) -> str:
        """The setting whose limit is exceeded, "" for none. A limit of 0 is no limit."""
        if 0 < limit.host < self.host:
            return "model_memory_max"
        return "model_gpu_memory_max" if 0 < limit.gpus < self.gpus else ""


NOTHING = Memory()


def pids_of(pool: Pool) -> list[int]:
    """The processes of a pool, with its holder."""
    pids = [pid for slot in list(pool.slots) if slot.worker is not None for pid in slot.worker.pids]
    holder = pool.resources.holder
    if holder is not None and holder.pid:
        pids.append(holder.pid)
    return pids


def processes_memory(pools: Sequence[Pool]) -> list[Memory]:
    """The memory of all processes of each pool; pages that they share count once. Blocking."""
    return [Memory(sum(map(proportional_bytes, pids_of(pool)))) for pool in pools]


def megabytes(count: int) -> str:
    return f"{count / (1 << 20):.0f} MiB"


class WorkerMemory:
    """Resident bytes of the workers, read for a few of them at a time: new ones first, then in turn."""

    def __init__(self, reads_max: int = MEMORY_READS_MAX) -> None:
        self._reads_max = reads_max
        self._bytes: dict[Worker, int] = {}

    def look(self, workers: Iterable[Worker]) -> None:
        """Reads the memory of at most `reads_max` workers, and forgets workers that have ended."""
        here = list(workers)
        known = {worker: size for worker, size in self._bytes.items() if worker in set(here)}
        turn = [*(worker for worker in here if worker not in known), *known]
        for worker in turn[: self._reads_max]:
            known.pop(worker, None)  # to the end, until all others have had their turn
            known[worker] = worker.memory_bytes
        self._bytes = known

    def of(self, worker: Worker) -> int:
        return self._bytes.get(worker, 0)


#: The share of the machine's or the container's memory for models, with the limit `auto` (-1).
AUTO_SHARE = 0.85
#: Seconds for which a reading of a model's memory counts.
READ_AGAIN_S = 1.0

#: Called with the name of a loaded model, and what withdraws it. Raises MemoryFull.
Check = Callable[[str, Callable[[], Awaitable[None]]], Awaitable[None]]


class Admission:
    """`limit`: bytes, 0 for none, -1 for AUTO_SHARE of all memory. `pools`: returns the pools of all models. `measure`:
    the memory of the processes of each; it may block."""

    def __init__(
        self,
        limit: int = 0,
        pools: Callable[[], Sequence[Pool]] = list,
        measure: Callable[[Sequence[Pool]], list[Memory]] = processes_memory,
    ) -> None:
        self.limit = int(memory_bytes() * AUTO_SHARE) if limit < 0 else limit
        self._pools, self._measure = pools, measure
        self._entry, self._turn = asyncio.Lock(), asyncio.Lock()
        #: Each pool's bytes, with the time of the reading and the number of its ready workers then.
        self._read: dict[Pool, tuple[int, float, int]] = {}
        self._changes = Notifier()
        #: The expected bytes of each model that is being loaded, and the least and most measured of a loaded one.
        self._expected: dict[object, int] = {}
        self._least = self._most = 0

    @asynccontextmanager
    async def room(self, files: Path) -> AsyncIterator[Check]:
        """Waits for room for a model with these files, which is loaded in the block. The block calls what it gets when
        the model is loaded: if all models are over the limit, this one is withdrawn. Both raise MemoryFull.

        A model certainly needs its files' size, and as much as the smallest one. A load that may need more than there
        is goes on alone, and is measured after it."""
        if not self.limit:
            yield _unlimited
            return
        one = object()
        await self._enter(one, await asyncio.to_thread(_size_of, files))
        try:
            yield self._check
        finally:
            del self._expected[one]
            self._changes.notify()

    async def _enter(self, one: object, files_bytes: int) -> None:
        async with self._entry:  # in the order of the calls
            while True:
                async with self._turn:
                    held = await self._held()
                    least, expected = max(files_bytes, self._least), max(files_bytes, self._most)
                    if held + least > self.limit:
                        raise MemoryFull(self._said("A further model", held + least, "at least"))
                    if not self._expected or held + sum(self._expected.values()) + expected <= self.limit:
                        self._expected[one] = expected
                        return
                await self._changes.wait()

    async def _check(self, name: str, withdraw: Callable[[], Awaitable[None]]) -> None:
        async with self._turn:  # one at a time, so that not two are withdrawn where one is too much
            held = await self._held()
            if held > self.limit:
                await withdraw()
                raise MemoryFull(self._said(f'Model "{name}"', held, ""))

    async def _held(self) -> int:
        """The memory of all models. Reading a process costs milliseconds: what was read just now counts."""
        pools, now_s = list(self._pools()), time.monotonic()
        known = {pool: one for pool in pools if (one := self._read.get(pool)) is not None}
        stale = [
            pool
            for pool in pools
            if pool not in known or known[pool][1] < now_s - READ_AGAIN_S or known[pool][2] != pool.ready_count
        ]
        ready = [pool.ready_count for pool in stale]
        sizes = await asyncio.to_thread(self._measure, stale)
        found = zip(stale, sizes, ready, strict=True)
        self._read = known | {pool: (size.host, now_s, count) for pool, size, count in found}
        loaded = [size for size, _, count in self._read.values() if count and size]
        if loaded:
            self._least, self._most = min(loaded), max(self._most, *loaded)
        return sum(size for size, _, _ in self._read.values())

    def _said(self, what: str, needed: int, about: str) -> str:
        needs = " ".join(filter(None, (about, megabytes(needed))))
        return (
            f"{what} doesn't fit: all models would use {needs}, over registered_memory_max of {megabytes(self.limit)}"
        )


async def _unlimited(name: str, withdraw: Callable[[], Awaitable[None]]) -> None:
    """The check without a limit."""


def _size_of(files: Path) -> int:
    """The bytes of a file, or of all files of a folder. Blocking."""
    if not files.is_dir():
        return files.stat().st_size if files.is_file() else 0
    return sum(
        Path(folder, name).lstat().st_size for folder, _, names in os.walk(files, onerror=None) for name in names
    )


#: Seconds between two checks of memory and idle times.
LOOK_S = 1.0
#: The least seconds for which a model with requests keeps its memory while others wait for it.
STAY_S = 1.0
#: The state, to others, of a model whose workers can't load it.
FAILING = "failing"


@dataclass(frozen=True, slots=True)
class DemandRule:
    """The rule for loading and unloading a model. `keep_alive_s`: seconds after its last request until it is
    unloaded, 0 for never; `pinned`: it stays once loaded; `memory`: its configured need, 0 where it is unknown
    before the first load."""

    keep_alive_s: float = 300.0
    pinned: bool = False
    memory: Memory = NOTHING


class UnloadCause(Enum):
    """The cause of an unload."""

    IDLE = "idle"
    MEMORY = "memory"
    GROWN = "grown"
    FAILED = "failed"
    SCALED = "scaled"


class ResidentState(Enum):
    """KNOWN: without a process. WARM: its workers were started, also while they fail and are started again."""

    KNOWN = "known"
    LOADING = "loading"
    WARM = "warm"
    UNLOADING = "unloading"


class Resident:
    """One model on demand. `workers`: the number of workers that a load starts."""

    def __init__(
        self, demand: Demand, pool: Pool, ledger: Ledger, rule: DemandRule, workers: Callable[[], int]
    ) -> None:
        self.pool, self.ledger, self.rule, self.workers = pool, ledger, rule, workers
        #: The jobs that other frontends have handed over, None if there are none.
        self.guests: Ledger | None = None
        self.state = ResidentState.KNOWN
        self.loads = self.unloads = 0
        self.load_s = 0.0  # of the last load, with its wait for memory
        self.unloaded_because = ""
        #: Its share of the limit (measured, or expected while it loads), and its largest measured need.
        self.held = NOTHING
        self.known = rule.memory
        #: A ready worker's description of its handler, which is kept when no worker is left.
        self.info: Mapping[str, Any] = {}
        self.used_s = self.warm_s = self.asked_s = 0.0
        self.task: asyncio.Task[None] | None = None
        self._demand = demand
        pool.on_demand = True
        self._on_ready = pool.on_ready
        pool.on_ready = self._ready

    @property
    def status(self) -> str:
        """The state: known, loading, warm, unloading, or failing (its workers can't load it)."""
        return FAILING if self.pool.load_failure is not None else self.state.value

    @property
    def live(self) -> bool:
        """Whether it has requests, or those of other frontends."""
        return bool(self.ledger.live or (self.guests is not None and self.guests.live))

    def asked(self) -> None:
        """Notes that a request is about to be accepted, and loads the model. Raises NoWorker if it never can be."""
        self.used_s = self._demand.clock.now_s()
        if self.state is not ResidentState.WARM:
            self.pool.on_busy()  # it may have no worker yet, and its requests wait
        if self.state is ResidentState.KNOWN:
            self._demand.check(self)
            self._demand.load(self)
        elif self.state is ResidentState.WARM and self.pool.unavailable:
            raise NoWorker(f"No worker of model {self.pool.name} could be kept running.{self.pool.refusal()}")

    def _ready(self, info: Mapping[str, Any]) -> None:
        """Sets the time that each waiting request waited for the load."""
        self._on_ready(info)
        self.info = info
        if self.state is ResidentState.LOADING:
            now_s = time.monotonic()
            for job in self.pool.queue.waiting():
                job.tell_cold(now_s - job.queued_at_s)


def _sum(models: Iterable[Resident]) -> Memory:
    total = NOTHING
    for one in models:
        total = total.plus(one.held)
    return total


def _expected(limit: int, pinned: int, seen: int) -> int:
    """The expected bytes of a model that was never measured: the largest one's, or all that isn't pinned."""
    free = max(1, limit - pinned)
    return min(seen or free, free) if limit else 0


class Demand:
    """All models on demand. `limit`: of their memory together, 0 for none. `measure`: returns the memory of the
    processes of each pool; it may block."""

    def __init__(
        self,
        limit: Memory = NOTHING,
        measure: Callable[[Sequence[Pool]], list[Memory]] = processes_memory,
        clock: Clock | None = None,
    ) -> None:
        self.limit = limit
        self.clock = clock or Clock()
        self.residents: set[Resident] = set()
        #: The numbers of unloads by cause, and the receiver of each load's seconds.
        self.unloads: Counter[UnloadCause] = Counter()
        self.on_loaded: Callable[[float], None] = _nobody
        self._measure = measure
        self._turn = asyncio.Lock()
        self._changes = Notifier()

    def enter(self, pool: Pool, ledger: Ledger, rule: DemandRule, workers: Callable[[], int]) -> Resident:
        resident = Resident(self, pool, ledger, rule, workers)
        self.residents.add(resident)
        return resident

    async def leave(self, one: Resident, removal: Awaitable[None]) -> None:
        """Ends a load of a model and awaits its removal, which ends its processes: its memory is held until then."""
        if one.task is not None:
            one.task.cancel()
            await asyncio.wait({one.task})
        one.state = ResidentState.UNLOADING
        try:
            await removal
        finally:
            self.residents.discard(one)
            self._changes.notify()

    @property
    def held(self) -> Memory:
        return _sum(self.residents)

    # --- loading

    def check(self, one: Resident) -> None:
        """Raises NoWorker for a model that doesn't fit into the memory that the pinned ones leave."""
        pinned = self._pinned(one)
        for need, limit, held, kind, setting in (
            (one.known.host, self.limit.host, pinned.host, "memory", "model_memory_max"),
            (one.known.gpus, self.limit.gpus, pinned.gpus, "GPU memory", "model_gpu_memory_max"),
        ):
            free = max(limit - held, 0)
            if limit and need > free:
                raise NoWorker(
                    f"Model {one.pool.name} needs {megabytes(need)} of {kind}, and {megabytes(free)} is "
                    f"what models that aren't pinned have ({setting})"
                )

    def load(self, one: Resident) -> None:
        """Begins to load a model without a process."""
        one.state = ResidentState.LOADING
        one.asked_s = self.clock.now_s()
        one.task = watched(self._load(one), f"The load of {one.pool.name}")

    async def _load(self, one: Resident) -> None:
        """Loads the model. After an unexpected fault the waiting requests fail, and the next request tries again."""
        try:
            await self._load_in_turn(one)
        except Exception as error:
            one.state, one.held = ResidentState.KNOWN, NOTHING
            one.pool.queue.fail_all(NoWorker(f"Model {one.pool.name} could not be loaded: {error!r}"))
            self._changes.notify()
            raise

    async def _load_in_turn(self, one: Resident) -> None:
        async with self._turn:  # in the order of their requests
            if not await self._room(one):
                one.state = ResidentState.KNOWN
                return
        try:
            await one.pool.scale(one.workers())
        except StartFailed as error:
            log.warning("%s could not be loaded for its first request: %s", one.pool.name, error.message)
        one.loads += 1
        one.warm_s = self.clock.now_s()
        one.load_s = one.warm_s - one.asked_s
        if one.pool.ready_count:
            self.on_loaded(one.load_s)
        await self._look_at_memory([one], loaded=True)
        one.state = ResidentState.WARM
        log.info("%s is loaded, after %.2f s.", one.pool.name, one.load_s)
        self._changes.notify()

    async def _room(self, one: Resident) -> bool:
        """Makes room for a model and reserves it; returns False if no request waits for the model any more."""
        while True:
            if not one.live:
                return False
            need = self._need(one)
            if not self.held.plus(need).excess(self.limit):
                one.held = need
                return True
            victim, wait_s = self._victim()
            if victim is not None:
                await self.unload(victim, UnloadCause.MEMORY, f"{one.pool.name} needed its memory")
            else:
                await self._change(wait_s)

    def _need(self, one: Resident) -> Memory:
        """The memory that the model needs: configured or measured; otherwise the largest need of any other model, or
        all memory for a first one."""
        known, limit, pinned = one.known, self.limit, self._pinned(one)
        seen = NOTHING
        for other in self.residents:
            seen = seen.most(other.known)
        host = known.host or _expected(limit.host, pinned.host, seen.host)
        gpus = known.gpus or (_expected(limit.gpus, pinned.gpus, seen.gpus) if one.pool.on_gpus else 0)
        return Memory(host, gpus)

    def _pinned(self, but: Resident) -> Memory:
        return _sum(one for one in self.residents if one.rule.pinned and one is not but)

    def _victim(self) -> tuple[Resident | None, float]:
        """The model to unload: the least recently used one, one with requests only if all have some. With None: the
        most seconds until there may be one."""
        now_s = self.clock.now_s()
        warm = [one for one in self.residents if one.state is ResidentState.WARM and not one.rule.pinned]
        idle = [one for one in warm if not one.live]
        ripe = idle or [one for one in warm if now_s - one.warm_s >= STAY_S]
        if ripe:
            return min(ripe, key=lambda one: one.used_s), 0.0
        for one in warm:
            one.ledger.when_empty(self._changes.notify)
        return None, min((one.warm_s + STAY_S - now_s for one in warm), default=LOOK_S)

    async def _change(self, limit_s: float) -> None:
        try:
            await asyncio.wait_for(self._changes.wait(), max(limit_s, 0.001))
        except TimeoutError:
            return

    # --- unloading

    async def unload(self, one: Resident, cause: UnloadCause, reason: str) -> None:
        """Ends the workers of a model, if it is warm, after the answers to their requests."""
        if one.state is ResidentState.WARM:
            await asyncio.wait({self._begin_unload(one, cause, reason)})

    def _begin_unload(self, one: Resident, cause: UnloadCause, reason: str) -> asyncio.Task[None]:
        """The unload continues if its caller is cancelled."""
        one.state = ResidentState.UNLOADING
        self.unloads[cause] += 1
        one.task = watched(self._unload(one, reason), f"The end of {one.pool.name}")
        return one.task

    async def _unload(self, one: Resident, reason: str) -> None:
        one.unloads += 1
        one.unloaded_because = reason
        log.info("%s is unloaded: %s.", one.pool.name, reason)
        try:
            await one.pool.scale(0)
        except Exception:
            self._ended(one)
            raise
        self._ended(one)

    def _ended(self, one: Resident) -> None:
        """Notes a model's end. If a fault has left workers, the model stays warm and is unloaded again later."""
        if one.pool.slots:
            one.state = ResidentState.WARM
        else:
            one.state, one.held = ResidentState.KNOWN, NOTHING
        self._changes.notify()
        if one.state is ResidentState.KNOWN and len(one.pool.queue) and one in self.residents:  # new requests
            self.load(one)

    # --- looking

    async def watch(self) -> None:
        """Checks all models repeatedly, forever."""
        while True:
            await self.clock.pause(LOOK_S, asyncio.Event())
            await self.look()

    async def look(self) -> None:
        """Measures warm models; unloads those that were idle for their time, keep failing, or exceed the limit."""
        now_s = self.clock.now_s()
        seen = []
        for one in list(self.residents):
            if one.state is not ResidentState.WARM:
                if one.state is ResidentState.LOADING and one.pool.slots:
                    seen.append(one)
                continue
            if one.live:
                one.used_s = now_s
            keep_s = one.rule.keep_alive_s
            if one.pool.unavailable:
                self._begin_unload(one, UnloadCause.FAILED, "its workers could not be kept running")
            elif keep_s and not one.rule.pinned and now_s - max(one.used_s, one.warm_s) >= keep_s:
                self._begin_unload(one, UnloadCause.IDLE, f"no request came for {keep_s:g} s")
            else:
                seen.append(one)
        await self._look_at_memory(seen)
        await self._stay_below()

    async def _look_at_memory(self, models: Sequence[Resident], *, loaded: bool = False) -> None:
        """Measures these models at once. One still loading, unless `loaded`, counts with at least its expected need."""
        if self.limit == NOTHING or not models:
            return
        readings = await asyncio.to_thread(self._measure, [one.pool for one in models])
        for one, found in zip(models, readings, strict=True):
            if one.pool.on_gpus and not found.gpus:  # the driver doesn't report it
                found = Memory(found.host, one.known.gpus)
            if found.host and one.state in (ResidentState.LOADING, ResidentState.WARM):
                one.known = one.known.most(found)
                one.held = found if loaded or one.state is ResidentState.WARM else found.most(one.held)

    async def _stay_below(self) -> None:
        """Unloads models, the least recently used first, until the others are within the limit."""
        while setting := self.held.excess(self.limit):
            victim, _ = self._victim()
            if victim is None:
                return
            await self.unload(victim, UnloadCause.GROWN, f"the models grew over {setting}")


def _nobody(seconds: float) -> None:
    """The default receiver of load times: does nothing."""
