"""The limits of a listener and its connections, and what is held to one limit for all connections together: requests
whose bodies are still arriving, streaming calls that are open, answers that wait because their clients don't read.

A request that arrives in one piece is never counted; any other counts with its head, since a few bytes of HTTP/2 can
repeat long headers. Above the limit, the request that has been arriving for the longest time is given up: clients that
send slowly make room for those that send fast. One that is alone is never given up for its size. A gRPC message is also
given up when the rest of it doesn't come in time; HTTP bodies have a limit of their own.

A streaming call may rest for as long as its client wants to, and the connections and their streams allow millions. It
counts with its head until it ends or nobody needs the head any longer. Above the limit further ones are refused: those
that are open go on, and calls with one answer aren't affected.

Above the limit of unread answers, the connection that holds most loses its oldest one; an answer that is alone is never
given up for its size. An answer of which a client takes nothing for a time is given up, too.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Final, TypeVar

from ts_frontend.errors import Code, ServeError
from ts_frontend.tasks import Expiry, current_task, uncancel, watched
from ts_frontend.transport.stream import Stream

if TYPE_CHECKING:
    from ts_frontend.transport.connection import Connection

log = logging.getLogger(__name__)


_T = TypeVar("_T")
#: The bytes that a piece needs beside its data: a peer may send a body in pieces of one byte.
PIECE_BYTES = 64
#: The bytes that a request needs beside its headers and its body (measured: 15 KB).
REQUEST_BYTES = 16 * 1024
_LOG_EVERY_S = 60.0
#: From this number of freed bytes on, the C library is told to return what it keeps: this many seconds later, once for
#: all that is freed meanwhile.
RETURNED_BYTES_MIN, RETURN_S = 16 * 1024 * 1024, 1.0


def head_bytes(headers: Iterable[tuple[bytes | str, bytes | str]]) -> int:
    """The memory of a request without its body: of its headers, or of its metadata."""
    return REQUEST_BYTES + sum(PIECE_BYTES + len(name) + len(value) for name, value in headers)


def arrival(stream: Stream) -> asyncio.Future[None]:
    """Done when more of a stream's request has arrived, or its end."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    stream.reader = future
    stream.wanted()
    return future


def drained(stream: Stream) -> asyncio.Future[None]:
    """Done when the client has taken all that was queued of a stream's answer."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    stream.writer = future
    return future


class BodiesFull(ServeError):
    """The bodies that are arriving are too large together, and this one has been arriving for the longest time."""

    remedy = "Repeat after a pause, send the body faster, or raise `arriving_bytes_max`."
    code, http_status, type_name = Code.RESOURCE_EXHAUSTED, 503, "ServiceUnavailableException"


class SlowSender(ServeError):
    """The body didn't arrive in time."""

    remedy = "Send the body faster, or raise `request_body_timeout_s`."
    code, http_status, type_name = Code.DEADLINE_EXCEEDED, 408, "RequestTimeoutException"


class Warned:
    """A warning that is logged at most every _LOG_EVERY_S seconds."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._logged_s = -math.inf

    def __call__(self, text: str, *values: object) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now_s
            self._log.warning(text, *values)


class Freed:
    """Has the C library return the memory of large bodies once they are gone: glibc keeps most of it for later ones."""

    def __init__(self) -> None:
        self._most = 0  # bytes in use since the last return
        self._dropped = 0  # bytes given up since then, in whose place others may have come
        self._timer: asyncio.TimerHandle | None = None

    def now(self, size: int) -> None:
        """`size`: the number of bytes that are in use."""
        if size > self._most:
            self._most = size
        elif self._most - size >= RETURNED_BYTES_MIN:
            self._soon()

    def dropped(self, size: int) -> None:
        """`size` bytes have been given up. What comes in their place doesn't fit exactly, so that holes remain."""
        self._dropped += size
        if self._dropped >= RETURNED_BYTES_MIN:
            self._soon()

    def _soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(RETURN_S, self._return)

    def _return(self) -> None:
        self._timer, self._most, self._dropped = None, 0, 0
        if trim := _trim():
            # In a thread, since a gigabyte takes up to 100 ms.
            watched(asyncio.to_thread(trim, 0), "the return of freed memory")


@lru_cache(maxsize=1)
def _trim() -> Callable[[int], int] | None:
    """Returns glibc's `malloc_trim`; None for another C library."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


class Arriving:
    """The bodies that are arriving; `bytes`: their size together. `message_timeout_s`: the seconds in which a gRPC
    message that has begun must arrive."""

    def __init__(self, bytes_max: float = math.inf, message_timeout_s: float = math.inf) -> None:
        self.bytes_max = bytes_max
        self.message_timeout_s = message_timeout_s
        self.bytes = 0
        self._bodies: dict[ArrivingBody, None] = {}  # in the order of their first pieces
        self._freed = Freed()
        self._warn = Warned(log)

    def __len__(self) -> int:
        return len(self._bodies)

    def body(self) -> ArrivingBody:
        return ArrivingBody(self)

    def count(self, body: ArrivingBody, change: int) -> None:
        """Counts more or fewer bytes of a body, and gives bodies up that are too many."""
        self._bodies[body] = None
        self.bytes += change
        self._freed.now(self.bytes)
        while self.bytes > self.bytes_max and len(self._bodies) > 1:
            self._warn(
                "%d requests that are still arriving have over %d bytes together: those that began first are "
                "refused. arriving_bytes_max raises the limit",
                len(self._bodies),
                self.bytes_max,
            )
            next(iter(self._bodies)).give_up()

    def remove(self, body: ArrivingBody, size: int) -> None:
        if body in self._bodies:
            del self._bodies[body]
            self.bytes -= size
            self._freed.now(self.bytes)


class ArrivingBody:
    """One body. Its owner reads each piece after the first with `piece`, and calls `end` in any case."""

    __slots__ = ("_arriving", "_bytes", "_expiry", "_given_up", "_late", "_timer")

    def __init__(self, arriving: Arriving) -> None:
        self._arriving = arriving
        self._bytes = 0
        self._expiry: Expiry | None = None
        self._given_up = self._late = False
        self._timer: asyncio.TimerHandle | None = None

    def hold(self, size: int, *, timed: bool = False) -> None:
        """Sets the number of bytes that are in memory; 0 between two messages of a stream. `timed`: they are a part of
        a gRPC request, which is given up if the rest doesn't arrive in time."""
        if size == 0:
            self.end()
        elif not self._given_up:
            change, self._bytes = size - self._bytes, size
            self._arriving.count(self, change)
        if timed and self._timer is None and not self._given_up and self._arriving.message_timeout_s < math.inf:
            later = asyncio.get_running_loop().call_later
            self._timer = later(self._arriving.message_timeout_s, self._run_out)

    def next_message(self) -> None:
        """The message has arrived: the time of the next one begins with its first part."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def piece(self, following: Awaitable[_T]) -> _T:
        """Returns the result of `following`. Raises BodiesFull or SlowSender when the body was given up."""
        if self._given_up:
            raise self._refusal()
        expiry = self._expiry = Expiry(current_task())
        try:
            return await following
        except asyncio.CancelledError:
            if not expiry.passed:
                raise
            uncancel()
            raise self._refusal() from None
        finally:
            expiry.task = self._expiry = None

    def give_up(self) -> None:
        self._given_up = True
        self.end()
        if self._expiry is not None:
            self._expiry.expire()

    def _run_out(self) -> None:
        self._late = not self._given_up
        self.give_up()

    def end(self) -> None:
        """Counts the body no longer: it is complete, or its request has ended."""
        self.next_message()
        size, self._bytes = self._bytes, 0
        self._arriving.remove(self, size)

    def _refusal(self) -> ServeError:
        if self._late:
            seconds = self._arriving.message_timeout_s
            return SlowSender(f"The request's message took more than {seconds:g} s to arrive (request_body_timeout_s)")
        return BodiesFull(
            f"The requests that are arriving are over arriving_bytes_max of {self._arriving.bytes_max} bytes together, "
            "and this one began first"
        )


class TooManyStreams(ServeError):
    """The streams that are open have too large heads together, or are too many."""

    remedy = "Repeat after a pause, or raise `arriving_bytes_max`."
    code, http_status, type_name = Code.RESOURCE_EXHAUSTED, 503, "ServiceUnavailableException"


class OpenStreams:
    """`bytes`: the size of all, of which each has REQUEST_BYTES besides its head."""

    def __init__(self, bytes_max: float = math.inf) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self._warn = Warned(log)

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
        self._warn = {reason: Warned(log) for reason in self.given_up}
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


#: Requests at a time on an HTTP/2 connection, and the bytes of a request's headers.
STREAMS_PER_CONNECTION_MAX = 4096
HEADER_BYTES_MAX = 64 * 1024


@dataclass(frozen=True, slots=True)
class Keepalive:
    """HTTP/2 pings, in the terms of gRPC's keepalive; milliseconds, None for no pings. `time_ms`: the server pings a
    client that has been silent for this long and closes the connection without an answer in `timeout_ms`. A client
    without data that pings more often than `min_ping_interval_without_data_ms`, or without a call if
    `permit_without_calls` is false, loses its connection."""

    time_ms: int | None = None
    timeout_ms: int | None = None
    permit_without_calls: bool = True
    max_pings_without_data: int = 0
    min_time_between_pings_ms: int | None = None
    min_ping_interval_without_data_ms: int = 5000


@dataclass(frozen=True, slots=True)
class ListenerLimits:
    """The limits of a listener. Sizes in bytes, times in seconds; `math.inf` for no limit. `head_s_max`: the time in
    which a client sends a request's head; `idle_s_max`: that of an idle connection; `write_s_max`: the longest time in
    which a client reads nothing of an answer, 0 for no limit; `connections_max`: of a listener at a time, 0 for its
    share of the open files; `resets_max`: streams that a client may reset at once on a connection, of which
    `resets_per_s` come back each second; `arriving`: the requests that are still arriving, with the limit for all of
    them together; `unread`: the answers that wait for their clients, with theirs; `streams`: the streaming calls that
    are open, with theirs."""

    request_bytes_max: int = 6_553_500
    response_bytes_max: int = 6_553_500
    connection_age_s_max: float = math.inf
    connection_age_grace_s: float = math.inf
    head_s_max: float = 10.0
    idle_s_max: float = math.inf
    write_s_max: float = 120.0
    connections_max: int = 0
    resets_max: int = 1000
    resets_per_s: float = 200.0
    keepalive: Keepalive = Keepalive()
    arriving: Arriving = field(default_factory=Arriving, compare=False)
    unread: Unread = field(default_factory=Unread, compare=False)
    streams: OpenStreams = field(default_factory=OpenStreams, compare=False)
