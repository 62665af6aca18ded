"""The streaming calls that are open: one limit for the memory of those of all connections together.

Such a call may rest for as long as its client wants to, and the connections and their streams allow millions. It counts
with its head, which a few bytes of HTTP/2 can make long, until it ends or nobody needs the head any longer. Above the
limit further ones are refused: those that are open go on, and calls with one answer aren't affected.
"""

from __future__ import annotations

import logging
import math

from ts_frontend.errors import Code, ServeError
from ts_frontend.transport.arriving import REQUEST_BYTES, Warned

_log = logging.getLogger(__name__)


class TooManyStreams(ServeError):
    """The streams that are open have too large heads together, or are too many."""

    remedy = "Repeat after a pause, or raise `arriving_bytes_max`."
    code, http_status, type_name = Code.RESOURCE_EXHAUSTED, 503, "ServiceUnavailableException"


class OpenStreams:
    """`bytes`: the size of all, of which each has REQUEST_BYTES besides its head."""

    def __init__(self, bytes_max: float = math.inf) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self._warn = Warned(_log)

    def open(self, head_bytes: int) -> OpenStream:
        """Counts a call, whose head has that size, until its `end`. Raises TooManyStreams, but never for the first."""
        if self.bytes and self.bytes + head_bytes > self.bytes_max:
            text = f"The streams that are open have over {self.bytes_max} bytes together (arriving_bytes_max)"
            self._warn("%s: further ones are refused", text)
            raise TooManyStreams(text)
        return OpenStream(self, head_bytes)


class OpenStream:
    """One of them."""

    __slots__ = ("_bytes", "_streams")

    def __init__(self, streams: OpenStreams, size: int) -> None:
        self._streams, self._bytes = streams, size
        streams.bytes += size

    def without_head(self) -> None:
        """Counts the head no longer: it isn't in memory."""
        self._set(min(self._bytes, REQUEST_BYTES))

    def end(self) -> None:
        self._set(0)

    def _set(self, size: int) -> None:
        self._streams.bytes += size - self._bytes
        self._bytes = size
