"""The memory that a worker shares with its frontend: the record of its progress, and the bodies of large messages. No
I/O.

The record has the begun batches, the seconds spent on tensors, and the requests that wait in an engine. It outlives the
process: an unrecorded batch of a dead worker can run elsewhere without running twice. It is a table of `PLACES` ids
(u64 of the machine); the index of a batch's id is its remainder by `PLACES`. Ids ascend from 1. A batch counts as begun
if its place has its id or a larger one: of two batches that share a place, the newer one's record covers the older
one's. After the table follow two sums of seconds (native doubles) for each size of a batch from 0 to `SIZES_MAX`: for
reading the requests' tensors, and for writing the answers'. Larger batches have none. The last number (u64) is of
requests that wait in the handler's engine.

Copies of bodies into this memory and out of it take a third of the socket's time for a mebibyte. One side of a message
is the giver, which copies the body into the arena and sends where it lies; the other one is the taker, which copies it
out as soon as it reads that. Each direction has an arena of `ARENA_BYTES` behind the record: the number of bodies taken
so far (u64 of the machine), then the room for bodies. A body without room goes through the socket.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from mmap import mmap
from typing import Final

from ts.protocol.memory import unfilled

PLACES: Final = 512
SIZES_MAX: Final = 256
_TABLE_BYTES: Final = PLACES * 8
_SUMS_END: Final = _TABLE_BYTES + (SIZES_MAX + 1) * 16
PROGRESS_BYTES: Final = _SUMS_END + 8

_ID: Final = struct.Struct("=Q")
#: A begun batch's id, as a worker of another machine sends it.
NOTE: Final = struct.Struct("!Q")
_SUMS: Final = struct.Struct("=2d")


class Progress:
    """The worker's side of the table, in the first `PROGRESS_BYTES` of shared memory."""

    __slots__ = ("_ids", "memory")

    def __init__(self, memory: mmap | bytearray) -> None:
        self.memory = memory
        self._ids = memoryview(memory)[:_TABLE_BYTES].cast("Q")

    def begin(self, batch_id: int) -> None:
        """Records that the handler is about to be called for the batch: only that call may follow. No function is
        called after the note is written, since the interpreter may give other threads their turn at its end."""
        place = batch_id % PLACES
        if self._ids[place] < batch_id:
            self._ids[place] = batch_id

    def spend(self, size: int, read_s: float, written_s: float) -> None:
        """Adds the seconds that reading or writing the tensors of a batch of this size has taken."""
        if size <= SIZES_MAX:
            place = _TABLE_BYTES + size * 16
            before_read_s, before_written_s = _SUMS.unpack_from(self.memory, place)
            _SUMS.pack_into(self.memory, place, before_read_s + read_s, before_written_s + written_s)

    def wait(self, count: int) -> None:
        """Records the number of requests that wait in the handler's engine, although they are with the handler."""
        _ID.pack_into(self.memory, _SUMS_END, count)


def newest(table: bytes) -> list[int]:
    """The ids in the table's places, from which `Progress.begin` makes it again."""
    return [batch_id for (batch_id,) in _ID.iter_unpack(table[:_TABLE_BYTES]) if batch_id]


def has_begun(table: bytes, batch_id: int) -> bool:
    """Whether the worker with this table may have called its handler for the batch. True for a truncated table, so
    that a batch that may have run isn't repeated."""
    place = batch_id % PLACES * 8
    return len(table) < place + 8 or bool(_ID.unpack_from(table, place)[0] >= batch_id)


def spent(table: bytes) -> dict[int, tuple[float, float]]:
    """The seconds of reading and of writing, by the size of a batch; zeros are left out."""
    sums = _SUMS.iter_unpack(table[_TABLE_BYTES:_SUMS_END])
    return {size: (read_s, written_s) for size, (read_s, written_s) in enumerate(sums) if read_s or written_s}


def waiting(table: bytes) -> int:
    """The number of requests that wait in the handler's engine; 0 in a truncated table."""
    return int(_ID.unpack_from(table, _SUMS_END)[0]) if len(table) >= PROGRESS_BYTES else 0


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
