"""The requests and memory after which a worker is replaced. Pure decisions, but for the available memory."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

#: Kinds of excess, as the metric of replaced workers names them.
REQUESTS, MEMORY, MEMORY_MAX = "requests", "memory", "memory_max"
_MB = 1 << 20
_CGROUP = Path("/sys/fs/cgroup")


class Excess(NamedTuple):
    """An exceeded limit of a worker. `kind`: REQUESTS, MEMORY or MEMORY_MAX; `text`: a sentence for people."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """The limits of each worker of a model; 0 is no limit. A worker that has answered `requests` requests or uses
    `memory_bytes` is replaced after its requests; one that uses more than `memory_bytes_max` is ended at once.
    Memory is resident memory."""

    requests: int = 0
    memory_bytes: int = 0
    memory_bytes_max: int = 0

    @property
    def of_memory(self) -> bool:
        return bool(self.memory_bytes or self.memory_bytes_max)

    @property
    def kinds(self) -> list[str]:
        """The possible kinds of excess."""
        limits = {REQUESTS: self.requests, MEMORY: self.memory_bytes, MEMORY_MAX: self.memory_bytes_max}
        return [kind for kind, limit in limits.items() if limit]

    def over(self, requests: int) -> Excess | None:
        """Returns the excess of a worker that has answered its number of requests, else None."""
        if not self.requests or requests < self.requests:
            return None
        return Excess(REQUESTS, f"it has answered {requests} requests (recycleAfterRequests: {self.requests})")

    def over_memory(self, memory_bytes: int) -> Excess | None:
        """Returns the excess of a worker that uses too much memory, else None."""
        used = f"{memory_bytes / _MB:.0f} MiB of memory"
        if 0 < self.memory_bytes_max < memory_bytes:
            return Excess(MEMORY_MAX, f"It used {used} (workerMemoryMax: {self.memory_bytes_max / _MB:.0f} MiB)")
        if 0 < self.memory_bytes <= memory_bytes:
            return Excess(MEMORY, f"it uses {used} (recycleAboveMemory: {self.memory_bytes / _MB:.0f} MiB)")
        return None


def memory_bytes() -> int:
    """Returns all bytes of the machine's memory or the container's, whichever is less."""
    return min(int(psutil.virtual_memory().total), _cgroup()[0])


def available_bytes() -> int:
    """Returns the bytes of memory available to new processes: the machine's or the container's, whichever is less."""
    limit, used = _cgroup()
    return min(int(psutil.virtual_memory().available), limit - used)


def _cgroup() -> tuple[int, int]:
    """The container's limit of memory in bytes, and its use; a large number and 0 without one."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return sys.maxsize, 0
    return (int(limit), used) if limit.isdecimal() else (sys.maxsize, 0)
