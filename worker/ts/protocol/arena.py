"""The bodies of large messages, in memory that a worker shares with its frontend: the copies into it and out of it take
a third of the socket's time for a mebibyte. No I/O.

One side of a message is the giver, which copies the body into the arena and sends where it lies; the other one is the
taker, which copies it out as soon as it reads that. Each direction has an arena of `ARENA_BYTES` behind the worker's
record (`ts.protocol.progress`): the number of bodies taken so far (u64 of the machine), then the room for bodies. A
body without room goes through the socket.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from mmap import mmap
from typing import Final

from ts.protocol.memory import unfilled
from ts.protocol.progress import PROGRESS_BYTES

#: The pages of an arena exist once a body has lain there.
ARENA_BYTES: Final = 8 << 20
#: Where the arenas for a worker's requests and for its answers begin, and the size of the file.
REQUESTS_AT: Final = (PROGRESS_BYTES | 0xFFF) + 1
ANSWERS_AT: Final = REQUESTS_AT + ARENA_BYTES
SHARED_BYTES: Final = ANSWERS_AT + ARENA_BYTES
_TAKEN: Final = struct.Struct("=Q")
#: Bodies begin at multiples of it, as copies are faster between aligned places.
_ALIGNED: Final = 64


class Giver:
    """Places bodies one after the other, and begins again at the front whenever all have been taken, so that few pages
    are used again and again."""

    def __init__(self, memory: mmap | bytearray, at: int) -> None:
        self._view = memoryview(memory)[at : at + ARENA_BYTES]
        self._given = 0
        #: The beginnings and ends of the bodies that may not have been taken, in their order.
        self._waiting: deque[tuple[int, int]] = deque()

    def put(self, body: Sequence[bytes | bytearray | memoryview], size: int) -> int | None:
        """Copies the body, of `size` bytes, and returns its place; None if there is no room for it."""
        waiting = self._waiting
        left = self._given - _TAKEN.unpack_from(self._view)[0]
        if not 0 <= left <= len(waiting):
            return None  # the taker's count is wrong: it gets no more
        while len(waiting) > left:
            waiting.popleft()
        begin = self._room(size)
        if begin is None:
            return None
        view, at = self._view, begin
        for part in body:
            end = at + len(part)
            view[at:end] = part
            at = end
        waiting.append((begin, at))
        self._given += 1
        return begin

    def close(self) -> None:
        self._view.release()

    def _room(self, size: int) -> int | None:
        waiting = self._waiting
        if not waiting:
            return _ALIGNED if _ALIGNED + size <= ARENA_BYTES else None
        oldest, begin = waiting[0][0], -waiting[-1][1] // _ALIGNED * -_ALIGNED
        if begin > oldest:
            if begin + size <= ARENA_BYTES:
                return begin
            begin = _ALIGNED
        return begin if begin + size <= oldest else None


class Taker:
    """Copies bodies out of an arena."""

    def __init__(self, memory: mmap | bytearray, at: int) -> None:
        self._view = memoryview(memory)[at : at + ARENA_BYTES]
        self._taken = 0

    def take(self, place: int, size: int) -> bytearray:
        """A copy of the body there, after which the giver may use the room again. Raises ValueError for a place outside
        the arena."""
        if not _TAKEN.size <= place <= place + size <= ARENA_BYTES:
            raise ValueError(f"{size} bytes at {place} of an arena of {ARENA_BYTES}")
        found = unfilled(size)
        with memoryview(found) as room:  # a bytearray's own slice would take a copy of the view first
            room[:] = self._view[place : place + size]
        self._taken += 1
        _TAKEN.pack_into(self._view, 0, self._taken)
        return found

    def close(self) -> None:
        self._view.release()
