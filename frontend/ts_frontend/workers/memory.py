"""The memory of a pool's processes."""

from __future__ import annotations

import re
import sys

from ts_frontend.workers.pool import Pool
from ts_frontend.workers.process import resident_bytes

_PSS = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)


def proportional_bytes(pid: int) -> int:
    """The memory of a process, each shared page divided among those that share it (PSS); where that can't be read, its
    resident memory. 0 when it has ended. Blocking: the kernel walks all its pages."""
    if sys.platform == "linux":
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
                found = _PSS.search(file.read())
        except OSError:
            found = None
        if found is not None:
            return int(found[1]) * 1024
    return resident_bytes(pid)


def shared_bytes(pool: Pool) -> int:
    """The memory of all processes of a pool, that of its holder, too; pages that they share count once. Blocking."""
    pids = [pid for slot in list(pool.slots) if slot.worker is not None for pid in slot.worker.pids]
    holder = pool.resources.holder
    if holder is not None and holder.pid:
        pids.append(holder.pid)
    return sum(map(proportional_bytes, pids))


def megabytes(count: int) -> str:
    """A number of bytes, for people."""
    return f"{count / (1 << 20):.0f} MiB"
