"""The ASGI application of one listener: gRPC calls to their methods, everything else to the HTTP application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final

from ts_frontend.errors import ClientGone, Draining
from ts_frontend.grpc.exchange import Exchange
from ts_frontend.grpc.protocol import is_grpc
from ts_frontend.http.request import CLOSE, AsgiApp, Event, Receive, Scope, Send, answer_error, not_found
from ts_frontend.listeners.floods import Floods
from ts_frontend.listeners.listener import Listener
from ts_frontend.tasks import uncancel

#: Seconds that the last requests of a drain stay open after their answers. h2corn 2.0.0 closes a drained connection at
#: the end of its last request without reading what the client has just sent; the kernel then resets the connection, and
#: the client may lose answers that it hasn't read yet.
LINGER_S = 0.25
#: The key in the scope of an HTTP/2 request whose answer has begun. h2corn prints an error for a second one.
BEGUN: Final = "torchrelay.begun"


class Application:
    """Answers one listener's requests.

    `abort` ends the calls that still run with UNAVAILABLE: the last step of a drain."""

    def __init__(self, listener: Listener) -> None:
        self._routes = listener.routes
        self._limits = listener.limits
        self._http_app: AsgiApp = listener.http_app or not_found
        self._draining = self._aborted = False
        #: The tasks of calls whose answers aren't complete.
        self._running: set[asyncio.Task[None]] = set()
        self._floods = Floods(listener.name, listener.flooded)
        #: Returns the task of the present request.
        self._task: Callable[[], asyncio.Task[None] | None] = self._first_task

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        if (
            headers.get(b"content-type") != b"application/grpc"
            or headers.get(b"te") != b"trailers"
            or scope["method"] != "POST"
            or scope["http_version"] != "2"
        ) and not await self._admit(scope, receive, send, headers):
            return
        send = self._limits.unread.sending(scope.get("client"), send, "2")
        exchange = Exchange(scope, headers, receive, send, self._limits)
        del headers  # a stream that lasts long drops them
        task = self._task()
        assert task is not None
        self._running.add(task)
        try:
            await exchange.run(self._routes.get(scope["path"]))
        except ClientGone:
            self._floods.cancelled(scope)
        except asyncio.CancelledError:
            if not self._aborted:
                self._floods.cancelled(scope)
                raise
            uncancel()
            await exchange.refuse_draining()
        finally:
            self._running.discard(task)
        if self._draining:
            await asyncio.sleep(LINGER_S)

    def _first_task(self) -> asyncio.Task[None] | None:
        """The task of the first request. All of them are in one loop, whose lookup would cost each a system call."""
        self._task = partial(asyncio.current_task, asyncio.get_running_loop())
        return self._task()

    def _closing(self, scope: Scope, send: Send) -> Send:
        """Wraps `send` so that HTTP/1.1 answers ask the client to close the connection once the server drains: h2corn
        closes it without notice. HTTP/2 answers that have begun are noted in the scope."""
        if scope["type"] != "http":
            return send
        send = self._limits.unread.sending(scope.get("client"), send, scope["http_version"])
        if scope["http_version"][0] != "1":

            def beginning(message: Event) -> Awaitable[None]:
                scope[BEGUN] = True
                return send(message)

            return beginning

        def closing(message: Event) -> Awaitable[None]:
            if self._draining and message["type"] == "http.response.start" and CLOSE not in message["headers"]:
                message["headers"] = [*message["headers"], CLOSE]
            return send(message)

        return closing

    def drain(self) -> None:
        """Prepares for the listener's end: requests stay open for LINGER_S after their answers, and HTTP/1.1 answers
        announce the end of their connections."""
        self._draining = True

    def abort(self) -> int:
        """Cancels the running calls, which end with UNAVAILABLE; returns their number."""
        self._aborted = True
        for task in self._running:
            task.cancel()
        return len(self._running)

    async def _admit(self, scope: Scope, receive: Receive, send: Send, headers: dict[bytes, bytes]) -> bool:
        """Returns True for a gRPC call; answers every other request itself."""
        if scope["type"] != "http" or not is_grpc(headers.get(b"content-type")):
            await self._answer_http(self._http, scope, receive, send)
        elif scope["http_version"] != "2":
            await answer_error(send, 505, "HttpVersionNotSupportedException", "gRPC needs HTTP/2")
        elif scope["method"] != "POST":
            await answer_error(
                send, 405, "MethodNotAllowedException", "gRPC calls are POST requests", (b"allow", b"POST")
            )
        else:
            return True
        return False

    async def _answer_http(self, app: AsgiApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets `app` answer, and keeps the request open for LINGER_S if the server drains."""
        send = self._closing(scope, send)
        task = self._task()
        assert task is not None
        self._running.add(task)
        try:
            await app(scope, receive, send)
        except ClientGone:
            self._floods.cancelled(scope)
        except asyncio.CancelledError:
            if not self._aborted:
                self._floods.cancelled(scope)
                raise
            uncancel()
            if BEGUN not in scope:
                with contextlib.suppress(Exception):  # an answer that has begun can't be replaced
                    await answer_error(send, Draining.http_status, Draining.type_name, "The server is shutting down")
        finally:
            self._running.discard(task)
        if self._draining:
            await asyncio.sleep(LINGER_S)

    def _http(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "http" and scope["path"] in self._routes and scope["method"] == "POST":
            message = f"{scope['path']} is a gRPC method: the content type must be application/grpc"
            return answer_error(send, 415, "UnsupportedMediaTypeException", message)
        return self._http_app(scope, receive, send)


class HttpOnly(Application):
    """The same for a listener without gRPC: its requests go directly to its HTTP application."""

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        return self._answer_http(self._http_app, scope, receive, send)


def application(listener: Listener) -> Application:
    return Application(listener) if listener.routes or listener.http_app is None else HttpOnly(listener)
