"""Counts and reads the instructions of a part of a process that runs under callgrind.

Two runs of different lengths are counted, and their difference is divided by the difference of their lengths. So the
parts that both have, such as beginning and end, don't count. Preparation and verification don't count either, since a
run marks the part that counts.
"""

from __future__ import annotations

import ctypes
import gc
import re
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TypeAlias

SOURCE = Path(__file__).with_name("counter.c")
#: The length of the uncounted first run, in multiples of the longer one: Python specialises code that runs often.
WARM_UP = 5
_DUMP = re.compile(r"^desc: Trigger: Client Request: (?P<name>.*?) (?P<units>\d+)$", re.MULTILINE)
_TOTAL = re.compile(r"^totals: (?P<instructions>\d+)", re.MULTILINE)

#: Serves a number of requests; the code within the context is counted.
Run: TypeAlias = "Callable[[int, AbstractContextManager[None]], Awaitable[None]]"


class CountFailed(Exception):
    """A process can't be counted, or hasn't been."""


def build(folder: Path) -> Path:
    """The library by which a process talks to callgrind, compiled into `folder`. Raises CountFailed."""
    library = folder / "counter.so"
    words = ["gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(SOURCE)]
    ended = subprocess.run(words, capture_output=True, text=True)
    if ended.returncode:
        raise CountFailed(f"{' '.join(words)} failed: {ended.stderr.strip()}")
    return library


class Counter:
    """The counter in the measured process. `library`: the file that `build` made."""

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        self._begin, self._end = loaded.begin, loaded.end

    async def measure(self, name: str, run: Run, few: int, many: int, unit: int) -> None:
        """Runs `few` and `many` requests, each of `unit` units, after an uncounted run that warms up."""
        await run(WARM_UP * many, nullcontext())
        gc.collect()
        gc.freeze()
        gc.disable()  # requests make no cycles: it would collect only the measurement's own objects
        for requests in (few, many):
            await run(requests, self._counted(f"{name} {requests * unit}"))
        gc.enable()

    @contextmanager
    def _counted(self, name: str) -> Iterator[None]:
        self._begin()
        yield
        self._end(name.encode())


def instructions(folder: Path) -> Iterator[tuple[str, float]]:
    """Instructions per unit of everything that was measured, by its name, from callgrind's files in `folder`. Raises
    CountFailed."""
    found: dict[str, dict[int, int]] = {}
    for file in sorted(folder.glob("callgrind.out.*"), key=lambda file: int(file.suffix[1:])):
        text = file.read_text()
        dump, total = _DUMP.search(text), _TOTAL.search(text)
        if dump is not None and total is not None:
            found.setdefault(dump["name"], {})[int(dump["units"])] = int(total["instructions"])
    for name, runs in found.items():
        if len(runs) != 2:
            raise CountFailed(f"{name}: {len(runs)} counted runs instead of 2")
        few, many = sorted(runs)
        yield name, (runs[many] - runs[few]) / (many - few)


def compared(now: float, before: float | None, tolerance: float) -> str:
    """The change, in words; "" within the tolerance."""
    if before is None:
        return "new"
    change = now / before - 1
    return f"{change:+.1%}" if abs(change) > tolerance else ""
