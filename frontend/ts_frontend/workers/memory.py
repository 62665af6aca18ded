"""The memory of workers: of a pool's processes in the machine and on GPUs, and of each worker in turn."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ts_frontend.workers.pool import Pool
from ts_frontend.workers.process import resident_bytes
from ts_frontend.workers.worker import Worker

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
