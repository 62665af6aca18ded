"""The admission of models by register calls: all models together stay within a limit of measured memory."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from ts_frontend.errors import MemoryFull
from ts_frontend.tasks import Notifier
from ts_frontend.workers.limits import memory_bytes
from ts_frontend.workers.memory import Memory, megabytes, processes_memory
from ts_frontend.workers.pool import Pool

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
