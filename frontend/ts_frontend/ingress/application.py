"""The ASGI application of one listener: gRPC calls to their methods, everything else to the HTTP application."""

from __future__ import annotations

import asyncio
import json

from ts_frontend.ingress.asgi import AsgiApp, Receive, Scope, Send
from ts_frontend.ingress.call import Listener
from ts_frontend.ingress.exchange import Exchange
from ts_frontend.ingress.grpc_headers import is_grpc


class Application:
    """Answers one listener's requests.

    `abort` ends what is still running with UNAVAILABLE: the last step of a drain.
    """

    def __init__(self, listener: Listener) -> None:
        self._routes = listener.routes
        self._limits = listener.limits
        self._http_app: AsgiApp = listener.http_app or not_found
        self._running: set[asyncio.Task[None]] = set()
        self._aborted = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        if (
            headers.get(b"content-type") != b"application/grpc"
            or headers.get(b"te") != b"trailers"
            or scope["method"] != "POST"
            or scope["http_version"] != "2"
        ) and not await self._admit(scope, receive, send, headers):
            return
        task: asyncio.Task[None] = asyncio.current_task()  # type: ignore[assignment]  # ASGI servers run requests in tasks
        exchange = Exchange(scope, headers, receive, send, self._limits)
        self._running.add(task)
        try:
            await exchange.run(self._routes.get(scope["path"]), task)
        except asyncio.CancelledError:
            if not self._aborted:
                raise
            task.uncancel()
            await exchange.refuse_draining()
        finally:
            self._running.discard(task)

    def abort(self) -> int:
        """Cancels the calls that are running, and answers them UNAVAILABLE; says how many."""
        self._aborted = True
        for task in self._running:
            task.cancel()
        return len(self._running)

    async def _admit(self, scope: Scope, receive: Receive, send: Send, headers: dict[bytes, bytes]) -> bool:
        """Whether it is a gRPC call after all; what isn't is answered here."""
        if scope["type"] != "http" or not is_grpc(headers.get(b"content-type")):
            await self._http(scope, receive, send)
        elif scope["http_version"] != "2":
            await answer_error(send, 505, "HttpVersionNotSupportedException", "gRPC needs HTTP/2")
        elif scope["method"] != "POST":
            await answer_error(
                send, 405, "MethodNotAllowedException", "gRPC calls are POST requests", (b"allow", b"POST")
            )
        else:
            return True
        return False

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in self._routes and scope["method"] == "POST":
            message = f"{scope['path']} is a gRPC method: the content type must be application/grpc"
            await answer_error(send, 415, "UnsupportedMediaTypeException", message)
        else:
            await self._http_app(scope, receive, send)


async def not_found(scope: Scope, receive: Receive, send: Send) -> None:
    """What a listener without an HTTP application answers to HTTP."""
    if scope["type"] == "http":
        message = "Requested resource is not found, please refer to API document."
        await answer_error(send, 404, "ResourceNotFoundException", message)
    elif scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1000})


async def answer_error(send: Send, status: int, kind: str, message: str, *more: tuple[bytes, bytes]) -> None:
    """An error in the form of TorchServe's HTTP interface."""
    body = json.dumps({"code": status, "type": kind, "message": message}, indent=2).encode() + b"\n"
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
