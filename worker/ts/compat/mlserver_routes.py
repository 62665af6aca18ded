"""A runtime's `@custom_handler` methods, called by FastAPI, as in MLServer."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from ts.context import Context
from ts.protocol.path_template import PathTemplate
from ts.runtime.handlers import HandlerNotUsable
from ts.runtime.tracebacks import say, traceback_of
from ts.tensors.route_form import RouteRequest, RouteResponse

FAILED = 500


class Routes:
    """The custom handlers of `model`. Raises BadTemplate for a path that can't be matched, HandlerNotUsable without
    FastAPI and for a method whose signature it can't read."""

    def __init__(self, model: Any) -> None:
        found = importlib.import_module("mlserver.handlers.custom").get_custom_handlers(model)
        #: For the frontend: each route's method, and the template of its paths.
        self.declared = [
            {"method": one.rest_method.upper(), "path": PathTemplate(one.rest_path).text} for one, _ in found
        ]
        self._app = _fastapi(found) if found else None

    async def answers(self, request: RouteRequest, context: Context) -> AsyncIterator[list[RouteResponse]]:
        """Pieces of the answer; the first has its headers, and sets its status."""
        async for status, response in _asgi_answer(self._app, request):
            if status:
                context.set_response_status(status)
            yield [response]


def _fastapi(found: Sequence[tuple[Any, Callable[..., Any]]]) -> Any:
    """An application with the routes. The types of this server's own package leave out of answers what isn't set."""
    try:
        fastapi = importlib.import_module("fastapi")
    except ImportError as error:
        text = f"custom handlers need FastAPI: pip install 'torchrelay[mlserver]' ({error})"
        raise HandlerNotUsable(text) from error

    async def failed(_: Any, raised: Any) -> Any:
        return fastapi.responses.JSONResponse({"error": str(raised)}, raised.status_code)

    async def broken(_: Any, raised: Any) -> Any:
        return fastapi.responses.JSONResponse({"error": "Internal Server Error"}, FAILED)

    errors = {importlib.import_module("mlserver.errors").MLServerError: failed, Exception: broken}
    app = fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None, exception_handlers=errors)
    real = sys.modules.get("mlserver.rest.app") or _imported("mlserver.rest.app")
    if real is not None:
        app.router.route_class = real.APIRoute
    given = {"response_model_exclude_unset": True, "response_model_exclude_none": True}
    for handler, call in found:
        try:
            app.add_api_route(handler.rest_path, call, methods=[handler.rest_method.upper()], **given)
        except fastapi.exceptions.FastAPIError as error:
            raise HandlerNotUsable(f"FastAPI can't read the custom handler {call.__name__}: {error}") from error
    return app


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


async def _asgi_answer(app: Any, request: RouteRequest) -> AsyncIterator[tuple[int, RouteResponse]]:
    """The answer of an ASGI application in pieces, each with the status: the real one first, then 0."""
    sent: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(1)
    running = asyncio.create_task(_run(app, request, sent))
    head: dict[str, Any] = {}
    failed = False
    try:
        while (message := await sent.get()) is not None:
            if message["type"] == "http.response.start":
                head, failed = message, message["status"] == FAILED
                continue
            yield head.get("status", 0), RouteResponse([], pairs=_pairs(head), body=message.get("body", b""))
            head = {}
        try:
            await running
        except Exception as error:
            if not failed:
                raise
            say(traceback_of(error))  # its client has been told
    finally:
        running.cancel()


async def _run(app: Any, request: RouteRequest, sent: asyncio.Queue[dict[str, Any] | None]) -> None:
    received = iter([{"type": "http.request", "body": request.body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        message = next(received, None)
        if message is None:
            await asyncio.Event().wait()  # a client that leaves cancels this task
        return message or {"type": "http.disconnect"}

    put: Callable[[dict[str, Any]], Awaitable[None]] = sent.put
    try:
        await app(_scope(request), receive, put)
    except Exception:
        await sent.put(None)
        raise
    await sent.put(None)


def _scope(request: RouteRequest) -> dict[str, Any]:
    """A body that begins like JSON is JSON, whatever its type says: many clients send none, or that of forms."""
    headers = dict(request.headers)
    if request.body.lstrip()[:1] in (b"{", b"["):
        headers["content-type"] = "application/json"
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "root_path": "",
        "query_string": request.query.encode("latin-1"),
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()],
    }


def _pairs(head: dict[str, Any]) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in head.get("headers", ())]
