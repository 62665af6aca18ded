"""A worker's note of its progress: the batches its handler was called for. No I/O.

The note stands in memory that the frontend shares, so that it outlives the process: a batch that isn't noted when the
worker dies can run elsewhere without ever running twice. It is a table of `PLACES` ids (u64, little endian); the id of
a batch stands at its remainder by `PLACES`. Ids are given in ascending order, from 1. A batch counts as begun when its
place has its id or a larger one: of two batches that share a place, the newer one's note covers the older one.
"""

from __future__ import annotations

import struct
from mmap import mmap

PLACES = 512
PROGRESS_BYTES = PLACES * 8

_ID = struct.Struct("<Q")


class Progress:
    """The worker's side of the table, in `PROGRESS_BYTES` of shared memory."""

    __slots__ = ("_memory",)

    def __init__(self, memory: mmap | bytearray) -> None:
        self._memory = memory

    def begin(self, batch_id: int) -> None:
        """Notes that the handler is about to be called for the batch: only that call may follow."""
        place = batch_id % PLACES * 8
        if _ID.unpack_from(self._memory, place)[0] < batch_id:
            _ID.pack_into(self._memory, place, batch_id)


def has_begun(table: bytes, batch_id: int) -> bool:
    """Whether a worker that left this table may have called its handler for the batch. A table that is cut short says
    yes: a batch that may have run isn't repeated."""
    place = batch_id % PLACES * 8
    return len(table) < place + 8 or bool(_ID.unpack_from(table, place)[0] >= batch_id)
