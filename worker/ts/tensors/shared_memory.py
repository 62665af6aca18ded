"""Tensors in system shared memory: copied out of the regions that the client registered, and into them.

Read and written as files, never mapped: a region that its owner shrinks is an error then, and no SIGBUS.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ts.protocol.frames import Buffer
from ts.protocol.memory import unfilled
from ts.tensors.types import BadTensor, NoSuchRegion

REGION, SIZE, OFFSET = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"
PARAMETERS = (REGION, SIZE, OFFSET)
#: The option with the places of regions: name -> key, offset, size; JSON in hex.
OPTION = "regions="
DIRECTORY = "/dev/shm"

T = TypeVar("T")


class Regions:
    """The regions that a request may use; none, unless its options name them."""

    def __init__(self, options: frozenset[str]) -> None:
        text = next((one.removeprefix(OPTION) for one in options if one.startswith(OPTION)), "")
        self._places: dict[str, tuple[str, int, int]] = json.loads(bytes.fromhex(text)) if text else {}

    def read(self, parameters: Mapping[str, Any], label: str) -> bytearray:
        """A copy of the bytes that an input's parameters name. BadTensor when they can't be had."""
        key, offset, size = self._place(parameters, label)

        def copied(fd: int) -> bytearray:
            there = max(0, os.fstat(fd).st_size - offset)
            found = unfilled(min(size, there))
            with memoryview(found) as room:
                done = 0
                while done < len(room) and (count := os.preadv(fd, [room[done:]], offset + done)):
                    done += count
            if done < size:
                raise BadTensor(f"{label}: shared memory {key!r} ends after {offset + done} bytes")
            return found

        return _with(key, os.O_RDONLY, label, copied)

    def write(self, parameters: Mapping[str, Any], data: Buffer, label: str) -> dict[str, Any]:
        """Puts an output where its parameters want it; the parameters that the answer then has. BadTensor."""
        key, offset, size = self._place(parameters, label)
        if len(data) > size:
            raise BadTensor(f"{label}: its {len(data)} bytes don't fit into the {size} given in shared memory")

        def put(fd: int) -> None:
            if os.fstat(fd).st_size < offset + len(data):
                raise BadTensor(f"{label}: shared memory {key!r} is smaller than it was when it was registered")
            done = 0
            while done < len(data):
                done += os.pwrite(fd, memoryview(data)[done:], offset + done)

        _with(key, os.O_RDWR, label, put)
        answer = {REGION: parameters[REGION], SIZE: len(data)}
        return answer | ({OFFSET: parameters[OFFSET]} if parameters.get(OFFSET) else {})

    def _place(self, parameters: Mapping[str, Any], label: str) -> tuple[str, int, int]:
        name, size, start = parameters[REGION], parameters.get(SIZE), parameters.get(OFFSET, 0)
        if name not in self._places:
            raise NoSuchRegion(f"{label}: no shared memory region {name!r} is registered")
        if type(size) is not int or size < 0 or type(start) is not int or start < 0:
            raise BadTensor(f"{label}: {SIZE} and {OFFSET} are numbers of bytes, not {size!r} and {start!r}")
        key, offset, whole = self._places[name]
        if start + size > whole:
            raise BadTensor(f"{label}: {size} bytes from {start} on are more than the {whole} of region {name!r}")
        return key, offset + start, size


#: The options of a request without any.
NO_REGIONS = Regions(frozenset())


def _with(key: str, flags: int, label: str, use: Callable[[int], T]) -> T:
    """Calls with the open file of that name."""
    if "/" in key or key in ("", ".", ".."):
        raise BadTensor(f"{label}: {key!r} is not the name of shared memory")
    try:
        fd = os.open(f"{DIRECTORY}/{key}", flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise BadTensor(f"{label}: shared memory {key!r} can't be opened: {error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise BadTensor(f"{label}: {key!r} is not shared memory")
        return use(fd)
    except OSError as error:
        raise BadTensor(f"{label}: shared memory {key!r} can't be used: {error.strerror}") from None
    finally:
        os.close(fd)
