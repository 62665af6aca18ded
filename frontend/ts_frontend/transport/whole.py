"""A large body of known size, which is put together where it stays: each byte is copied once, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ts.protocol.memory import unfilled_bytes

if TYPE_CHECKING:
    from ts_frontend.transport.connection import Connection

#: Larger bodies are joined from their pieces: memory that is only promised may be refused, too.
_BYTES_MAX: Final = 1 << 30
#: What is read of a connection whose request ended before its body.
_OTHER_BYTES: Final = 64 * 1024


def place(size: int, bytes_max: int) -> Whole | None:
    """A place for a body of `size` bytes; None if its pieces are to be joined, or it is over the limit."""
    if size > min(bytes_max, _BYTES_MAX):
        return None
    try:
        return Whole(size)
    except MemoryError:  # even for a promise, which costs nothing until it is kept
        return None


class Whole:
    """The bytes of a body, of which the first `filled` have arrived. `count`: told that number each time, by the one
    who takes the body; None before."""

    __slots__ = ("_data", "_view", "count", "filled", "size")

    def __init__(self, size: int) -> None:
        self._data, self._view = unfilled_bytes(size)
        self.size, self.filled = size, 0
        self.count: Callable[[int], None] | None = None

    def add(self, piece: memoryview) -> None:
        """Adds the next bytes, which aren't more than are missing."""
        begin, self.filled = self.filled, self.filled + len(piece)
        self._view[begin : self.filled] = piece

    def rest(self) -> memoryview:
        return self._view[self.filled :]

    def take(self) -> bytes:
        """The whole body, which has arrived."""
        self._view.release()
        return self._data


class BodyReader(asyncio.BufferedProtocol):
    """Has the event loop read the body of an HTTP/1.1 request into its place, and gives its connection the rest."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._other: bytearray | None = None

    def get_buffer(self, sizehint: int) -> memoryview | bytearray:
        place = self._connection.body_place()
        if place is not None:
            return place
        self._other = bytearray(_OTHER_BYTES)
        return self._other

    def buffer_updated(self, nbytes: int) -> None:
        other, self._other = self._other, None
        if other is None:
            self._connection.body_received(nbytes)
        else:
            self._connection.read_body(False)
            self._connection.data_received(bytes(other[:nbytes]))

    def eof_received(self) -> bool:
        return self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()
