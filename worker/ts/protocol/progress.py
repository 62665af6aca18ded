"""A worker's record of its progress: the begun batches, the seconds spent on tensors, and the requests that wait in an
engine. No I/O.

The record is in memory shared with the frontend, so it outlives the process: an unrecorded batch of a dead worker can
run elsewhere without running twice. It is a table of `PLACES` ids (u64 of the machine); the index of a batch's id is
its remainder by `PLACES`. Ids ascend from 1. A batch counts as begun if its place has its id or a larger one: of two
batches that share a place, the newer one's record covers the older one's.

After the table follow two sums of seconds (native doubles) for each size of a batch from 0 to `SIZES_MAX`: for reading
the requests' tensors, and for writing the answers'. Larger batches have none. The last number (u64) is of requests that
wait in the handler's engine.
"""

from __future__ import annotations

import struct
from mmap import mmap
from typing import Final

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
