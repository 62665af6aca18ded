"""Answers that wait because their clients don't read: one limit for those of all connections together.

Only what the engine hasn't taken counts: h2corn takes about 1 MiB for a connection, and a larger answer is passed to it
in pieces, so that the rest waits here. Above the limit, the connection that holds most loses its oldest answer; an
answer that is alone is never given up for its size. A connection that takes nothing for a time loses all that wait.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias, TypeVar

from ts_frontend.errors import ClientGone, Code, ServeError
from ts_frontend.http.arriving import REQUEST_BYTES, Freed, Warned, is_future
from ts_frontend.tasks import Expiry, current_task, uncancel

_T = TypeVar("_T")
Send: TypeAlias = Callable[[Any], Awaitable[None]]
_log = logging.getLogger(__name__)
#: The largest body that is passed to h2corn whole.
WHOLE_BYTES_MAX = 1024 * 1024
#: The largest body that is passed whole on a connection with answers that wait: h2corn keeps an event that it doesn't
#: take, even one that is given up, until its connection ends.
WHOLE_BYTES_MAX_WAITING = 64 * 1024
#: The first piece of a larger body shows whether h2corn takes any. The others, by HTTP's major version: h2corn keeps up
#: to 32 events of an HTTP/1.1 connection.
FIRST_BYTES = 1024
PIECE_BYTES = {"1": 64 * 1024, "2": 256 * 1024}
#: The key in an event for the bytes of the answer that its sender holds beside those of the event.
HELD = "torchrelay.held"
#: Looks within the time limit. The last one that counts comes before h2corn's own limit, after which it takes more.
LOOKS = 8
#: Why answers were given up.
BYTES, TIME = "bytes", "time"


class AnswersUnread(ServeError):
    """Too many answers wait for clients that don't read, and this one's connection holds most of them."""

    remedy = "Read answers as they come, send fewer requests at once, or raise `unread_bytes_max`."
    code, http_status, type_name = Code.RESOURCE_EXHAUSTED, 503, "ServiceUnavailableException"


class SlowReader(ServeError):
    """The client read nothing of its answers for too long."""

    remedy = "Read answers as they come, or raise `write_timeout_s`."
    code, http_status, type_name = Code.DEADLINE_EXCEEDED, 408, "RequestTimeoutException"


class Waiting(Expiry):
    """An answer that waits, its size, when that began, and why it was given up. `apart`: whether its connection takes
    other answers says nothing about it."""

    __slots__ = ("apart", "reason", "since_s", "size")

    def __init__(self, task: asyncio.Task[Any], size: int, apart: bool) -> None:
        super().__init__(task)
        self.size, self.apart = size, apart
        self.since_s = time.monotonic()
        self.reason = ""


class SlowClient:
    """A connection with answers that wait, in the order in which they began to; `progress_s`: when it last took one."""

    __slots__ = ("bytes", "progress_s", "waiting")

    def __init__(self) -> None:
        self.bytes = 0
        self.waiting: dict[Waiting, None] = {}
        self.progress_s = time.monotonic()


class Unread:
    """The answers that wait; `bytes`: their size together, `given_up`: how many were, by the reason. `stall_s`: seconds
    after which a connection loses its answers if it took none (0: never)."""

    def __init__(self, bytes_max: float = math.inf, stall_s: float = 0.0) -> None:
        self.bytes_max, self.stall_s = bytes_max, stall_s
        self.bytes = 0
        self.given_up = {BYTES: 0, TIME: 0}
        self._count = 0
        self._freed = Freed()
        self._readers: dict[object, SlowClient] = {}
        self._warn = {reason: Warned(_log) for reason in self.given_up}
        self._look_timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return self._count

    def sending(self, client: object, send: Send, version: str) -> Send:
        """Wraps h2corn's `send` for a request of a client: what h2corn doesn't take at once counts as waiting. Raises
        ClientGone for an answer that is given up."""
        step = PIECE_BYTES[version[0]]

        def counted(event: Any) -> Awaitable[None]:
            size = len(event.get("body") or b"")
            if size > WHOLE_BYTES_MAX_WAITING and client in self._readers:
                return self._in_pieces(client, send, event, WHOLE_BYTES_MAX_WAITING)
            if size > WHOLE_BYTES_MAX:
                return self._in_pieces(client, send, event, step)
            following = send(event)
            # h2corn returns a future only for an event that it doesn't take yet.
            if is_future(type(following)):
                return self._taken(client, following, size + event.get(HELD, 0))
            return following

        return counted

    async def _in_pieces(self, client: object, send: Send, event: Mapping[str, Any], step: int) -> None:
        body, more = memoryview(event["body"]), event.get("more_body", False)
        begin, end = 0, FIRST_BYTES
        while begin < len(body):
            piece = bytes(body[begin:end])
            following = send({**event, "body": piece, "more_body": more or end < len(body)})
            await (self._taken(client, following, len(body) - begin) if is_future(type(following)) else following)
            begin, end = end, end + step

    async def _taken(self, client: object, following: Awaitable[None], size: int) -> None:
        try:
            await self.wait(client, following, size)
        except ServeError as error:
            raise ClientGone from error

    async def wait(self, client: object, following: Awaitable[_T], size: int, *, apart: bool = False) -> _T:
        """Returns the result of `following`; `size` bytes of an answer wait for it. Raises AnswersUnread or SlowReader
        when the answer was given up."""
        one = self.add(client, current_task(), size, apart=apart)
        try:
            found = await following
        except asyncio.CancelledError:
            if not one.passed:
                raise
            uncancel()
            raise self.refusal(one) from None
        finally:
            self.remove(client, one)
        return found

    def add(self, client: object, task: asyncio.Task[Any], size: int, *, apart: bool = False) -> Waiting:
        """Counts an answer of `size` bytes that waits; it is given up by the cancellation of `task`."""
        one = Waiting(task, size + REQUEST_BYTES, apart)
        reader = self._readers.get(client)
        if reader is None:
            reader = self._readers[client] = SlowClient()
        reader.waiting[one] = None
        reader.bytes += one.size
        self.bytes += one.size
        self._count += 1
        self._freed.now(self.bytes)
        while self.bytes > self.bytes_max and self._count > 1:
            key, largest = max(self._readers.items(), key=lambda item: item[1].bytes)
            self._give_up(key, largest, next(iter(largest.waiting)), BYTES)
        if self._look_timer is None and self.stall_s:
            self._look_timer = asyncio.get_running_loop().call_later(self.stall_s / LOOKS, self._look)
        return one

    def remove(self, client: object, one: Waiting) -> None:
        """Counts the answer no longer: it was taken, or its request has ended."""
        one.task = None
        reader = self._readers.get(client)
        if reader is None or one not in reader.waiting:
            return
        if not one.passed:
            reader.progress_s = time.monotonic()
        self._uncount(client, reader, one)

    def _uncount(self, client: object, reader: SlowClient, one: Waiting) -> None:
        del reader.waiting[one]
        reader.bytes -= one.size
        self.bytes -= one.size
        self._count -= 1
        self._freed.now(self.bytes)
        if not reader.waiting:
            del self._readers[client]

    def refusal(self, one: Waiting) -> ServeError:
        if one.reason == TIME:
            return SlowReader(f"The client has read nothing of its answers for {self.stall_s:g} s (write_timeout_s)")
        return AnswersUnread(
            f"The answers that wait for clients are over unread_bytes_max of {self.bytes_max} bytes together, and this "
            "client's are the largest part"
        )

    def _give_up(self, client: object, reader: SlowClient, one: Waiting, reason: str) -> None:
        one.reason = reason
        self.given_up[reason] += 1
        self._warn[reason](
            "Answers that their clients don't read are given up: %d wait on %d connections, %d bytes together. The "
            "limits are unread_bytes_max (%s bytes) and write_timeout_s (%g s)",
            self._count,
            len(self._readers),
            self.bytes,
            self.bytes_max,
            self.stall_s,
        )
        self._uncount(client, reader, one)
        self._freed.dropped(one.size)
        one.expire()

    def _look(self) -> None:
        """Gives up the answers of clients that have taken nothing for the time limit."""
        self._look_timer = None
        latest_s = time.monotonic() - self.stall_s * (LOOKS - 1.5) / LOOKS
        for client, reader in [*self._readers.items()]:
            for one in [*reader.waiting]:
                if one.since_s <= latest_s and (one.apart or reader.progress_s <= latest_s):
                    self._give_up(client, reader, one, TIME)
        if self._readers:
            self._look_timer = asyncio.get_running_loop().call_later(self.stall_s / LOOKS, self._look)
