"""Answers that wait because their clients don't read: one limit for those of all connections together.

Above the limit, the connection that holds most loses its oldest answer; an answer that is alone is never given up for
its size. An answer of which a client takes nothing for a time is given up, too."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING, Final

from ts_frontend.transport.arriving import Freed, Warned

if TYPE_CHECKING:
    from ts_frontend.transport.connection import Connection

_log = logging.getLogger(__name__)
#: Looks within the time limit.
LOOKS: Final = 8
#: Why answers were given up.
BYTES: Final = "bytes"
TIME: Final = "time"


class Unread:
    """The answers that wait; `bytes`: their size together, `given_up`: how many were, by the reason. `stall_s`: seconds
    in which a client must take some of an answer (0: no limit)."""

    def __init__(self, bytes_max: float = math.inf, stall_s: float = 0.0) -> None:
        self.bytes_max, self.stall_s = bytes_max, stall_s
        self.bytes = 0
        self.given_up = {BYTES: 0, TIME: 0}
        self._freed = Freed()
        self._readers: dict[Connection, int] = {}
        self._warn = {reason: Warned(_log) for reason in self.given_up}
        self._look_timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._readers)

    def count(self, reader: Connection, size: int) -> None:
        """`size` bytes of answers wait for a client now."""
        before = self._readers.pop(reader, 0)
        if size:
            self._readers[reader] = size
        self.bytes += size - before
        self._freed.now(self.bytes)
        if self.bytes > self.bytes_max and size > before:
            self._make_room()
        if self._look_timer is None and self.stall_s and self._readers:
            self._look_timer = asyncio.get_running_loop().call_later(self.stall_s / LOOKS, self._look)

    def forget(self, reader: Connection) -> None:
        """The connection has ended."""
        self.count(reader, 0)

    def _make_room(self) -> None:
        while self.bytes > self.bytes_max:
            largest = max(self._readers, key=self._readers.__getitem__)
            if len(self._readers) == 1 and largest.waiting_answers() <= 1:
                return
            held = self._readers[largest]
            freed = largest.give_up_oldest() or held
            self._tell(BYTES, 1)
            self._freed.dropped(freed)
            self.bytes -= freed
            self._readers[largest] -= freed
            if self._readers[largest] <= 0:
                self.bytes -= self._readers.pop(largest)

    def _tell(self, reason: str, count: int) -> None:
        self.given_up[reason] += count
        self._warn[reason](
            "Answers that their clients don't read are given up: %d connections have some, %d bytes together. The "
            "limits are unread_bytes_max (%s bytes) and write_timeout_s (%g s)",
            len(self._readers),
            self.bytes,
            self.bytes_max,
            self.stall_s,
        )

    def _look(self) -> None:
        """Gives up the answers of clients that have taken nothing for the time limit."""
        loop = asyncio.get_running_loop()
        latest_s = loop.time() - self.stall_s * (LOOKS - 1.5) / LOOKS
        self._look_timer = None
        for reader in [*self._readers]:
            count = reader.give_up_stalled(latest_s)
            if count:
                self._tell(TIME, count)
        if self._readers and self._look_timer is None:
            self._look_timer = loop.call_later(self.stall_s / LOOKS, self._look)
