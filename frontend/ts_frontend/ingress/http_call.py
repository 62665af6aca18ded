"""What a service sees of an HTTP request, and what it answers. Only `HttpApp` makes requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import NamedTuple, TypeAlias

from ts_frontend.errors import Code, ServeError
from ts_frontend.ingress.asgi import Receive, Scope

Header: TypeAlias = "tuple[bytes, bytes]"
Body: TypeAlias = "bytes | bytearray | memoryview"

#: An answer that takes no longer isn't watched: whether its client is still there costs a task to find out.
WATCH_AFTER_S = 0.1


class ClientGone(Exception):
    """The client closed the connection or reset the stream: nobody is left to answer."""


class SlowSender(ServeError):
    """The body didn't come in time."""

    code, http_status, type_name = Code.DEADLINE_EXCEEDED, 408, "RequestTimeoutException"


class HttpAnswer(NamedTuple):
    """An answer; names of `headers` are lower case. `body`: all of it, or lists of pieces that are ready together."""

    status: int
    headers: Sequence[Header]
    body: Body | AsyncIterator[Sequence[Body]]


class HttpRequest:
    """One request. `path` is percent-decoded, `segments` are its parts; names in `headers` are lower case."""

    __slots__ = (
        *("_receive", "_timer", "_watcher", "body_s_max", "headers", "method", "path", "query", "request_id"),
        *("segments", "tail"),
    )

    def __init__(self, scope: Scope, receive: Receive, request_id: str, body_s_max: float) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope["query_string"]
        self.headers: Sequence[Header] = scope["headers"]
        self.segments = self.path.rstrip("/").split("/")[1:]
        self.tail = ""
        self.request_id = request_id
        self.body_s_max = body_s_max
        self._receive = receive
        self._timer: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None

    def header(self, name: bytes) -> str:
        """The last value of a header, "" without it."""
        found = b""
        for key, value in self.headers:
            if key == name:
                found = value
        return found.decode("latin-1")

    async def body(self) -> bytes:
        """The whole body. Raises ClientGone, SlowSender."""
        event = await self._receive()
        if event["type"] != "http.request":
            raise ClientGone
        data: bytes = event.get("body") or b""
        if not event.get("more_body"):
            return data
        try:
            return await asyncio.wait_for(self._rest(data), self.body_s_max)
        except (asyncio.TimeoutError, TimeoutError):  # one and the same from Python 3.11 on
            raise SlowSender(f"The request's body did not come within {self.body_s_max:g} s") from None

    async def _rest(self, first: bytes) -> bytes:
        pieces = [first]
        while True:
            event = await self._receive()
            if event["type"] != "http.request":
                raise ClientGone
            pieces.append(event.get("body") or b"")
            if not event.get("more_body"):
                return b"".join(pieces)

    def when_gone(self, act: Callable[[], None]) -> None:
        """Calls `act` should the client leave before the answer has ended. The body must have been read."""
        loop = asyncio.get_running_loop()

        def watch() -> None:
            self._watcher = loop.create_task(self._wait_gone(act))

        self._timer = loop.call_later(WATCH_AFTER_S, watch)

    async def _wait_gone(self, act: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        act()

    def close(self) -> None:
        """The answer has ended, one way or another."""
        if self._timer is not None:
            self._timer.cancel()
            if self._watcher is not None:
                self._watcher.cancel()


Serve: TypeAlias = Callable[[HttpRequest], Awaitable[HttpAnswer]]
#: Finds who answers a request; None: somebody else's. May raise a ServeError, which is then the answer.
Route: TypeAlias = "Callable[[HttpRequest], Serve | None]"
