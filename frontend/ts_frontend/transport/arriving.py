"""Requests whose bodies are still arriving: one limit for those of all connections together.

A request that arrives in one piece is never counted; any other counts with its head, since a few bytes of HTTP/2 can
repeat long headers. Above the limit, the request that has been arriving for the longest time is given up: clients that
send slowly make room for those that send fast. One that is alone is never given up for its size. A gRPC message is also
given up when the rest of it doesn't come in time; HTTP bodies have a limit of their own.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import lru_cache
from typing import TypeVar

from ts_frontend.errors import Code, ServeError
from ts_frontend.tasks import Expiry, current_task, uncancel, watched
from ts_frontend.transport.stream import Stream

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
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
        self._warn = Warned(_log)

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
