"""A runtime's `@custom_handler` methods: called by FastAPI if it is installed, as in MLServer, otherwise according
to their signatures."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import sys
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from ts.context import Context
from ts.protocol.path_template import PathTemplate
from ts.runtime.tracebacks import say, traceback_of
from ts.tensors.json_text import dumped
from ts.tensors.route_form import RouteRequest, RouteResponse

_TRUE, _FALSE = ("true", "1", "on", "yes", "t", "y"), ("false", "0", "off", "no", "f", "n")
FAILED = 500
_JSON = (("content-type", "application/json"),)


class _Route(NamedTuple):
    method: str
    template: PathTemplate
    call: Callable[..., Any]


class _Invalid(ValueError):
    """A missing or invalid part of a request, described as FastAPI describes it."""

    def __init__(self, kind: str, where: Sequence[str], message: str, value: Any) -> None:
        super().__init__(message)
        self.detail = {"type": kind, "loc": list(where), "msg": message, "input": value}


class Routes:
    """The custom handlers of `model`. Raises BadTemplate for a path that can't be matched."""

    def __init__(self, model: Any) -> None:
        handlers = importlib.import_module("mlserver.handlers.custom")
        found = handlers.get_custom_handlers(model)
        self._routes = [_Route(one.rest_method.upper(), PathTemplate(one.rest_path), call) for one, call in found]
        self._error = importlib.import_module("mlserver.errors").MLServerError
        self._app = _fastapi(found, self._error) if found else None

    def known(self) -> list[dict[str, str]]:
        """For the frontend: each route's method, and the template of its paths."""
        return [{"method": one.method, "path": one.template.text} for one in self._routes]

    async def answers(self, request: RouteRequest, context: Context) -> AsyncIterator[list[RouteResponse]]:
        """Pieces of the answer; the first has its headers, and sets its status."""
        if self._app is None:
            status, response = await self._answered(request)
            context.set_response_status(status)
            yield [response]
            return
        async for status, response in _asgi_answer(self._app, request):
            if status:
                context.set_response_status(status)
            yield [response]

    # --- without FastAPI

    async def _answered(self, request: RouteRequest) -> tuple[int, RouteResponse]:
        try:
            return 200, _response(await self._called(request))
        except self._error as error:
            return error.status_code, _response({"error": str(error)})
        except _Invalid as error:
            return 422, _response({"detail": [error.detail]})

    async def _called(self, request: RouteRequest) -> Any:
        for method, template, call in self._routes:
            found = template.match(request.path) if method == request.method else None
            if found is not None:
                arguments = _arguments(call, found, request)
                if inspect.iscoroutinefunction(call):
                    return await call(**arguments)
                answer = await asyncio.to_thread(call, **arguments)
                return await answer if inspect.isawaitable(answer) else answer
        raise self._error(f"{request.method} {request.path} is not a path of this model", 404)


def _response(value: Any) -> RouteResponse:
    plain = value.model_dump(exclude_unset=True, exclude_none=True) if hasattr(value, "model_dump") else value
    body = dumped(plain.decode() if isinstance(plain, bytes) else plain)
    return RouteResponse([], pairs=(*_JSON, ("content-length", str(len(body)))), body=body)


# --- arguments, by the method's signature


def _arguments(call: Callable[..., Any], path: dict[str, str], request: RouteRequest) -> dict[str, Any]:
    """From the path, the body (mappings, lists and the package's types) and the query (all others). Raises _Invalid."""
    hints = _hints(call)
    query = dict(parse_qsl(request.query, keep_blank_values=True))
    named = inspect.signature(call).parameters.values()
    parameters = [one for one in named if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    bodies = [one.name for one in parameters if one.name not in path and _is_body(hints.get(one.name))]
    body = _body(request.body) if bodies else None
    found = {}
    for one in parameters:
        hint = hints.get(one.name)
        if one.name in path:
            found[one.name] = _converted(path[one.name], hint, ("path", one.name))
        elif one.name in bodies:
            found[one.name] = _of_body(body, one, hint, alone=len(bodies) == 1)
        elif one.name in query:
            found[one.name] = _converted(query[one.name], hint, ("query", one.name))
        elif one.default is one.empty:
            raise _Invalid("missing", ("query", one.name), "Field required", None)
    return found


def _hints(call: Callable[..., Any]) -> dict[str, Any]:
    try:
        return {name: _without_none(hint) for name, hint in typing.get_type_hints(call).items()}
    except Exception:  # annotations that name objects missing at run time
        return {}


def _without_none(hint: Any) -> Any:
    others = [one for one in typing.get_args(hint) if one is not type(None)]
    is_optional = type(None) in typing.get_args(hint) and len(others) == 1
    return others[0] if is_optional else hint


def _is_body(hint: Any) -> bool:
    return hasattr(hint, "model_validate") or (typing.get_origin(hint) or hint) in (dict, list)


def _body(data: bytes) -> Any:
    if not data:
        return None
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _Invalid("json_invalid", ("body",), f"JSON decode error: {error}", {}) from None


def _of_body(body: Any, parameter: inspect.Parameter, hint: Any, *, alone: bool) -> Any:
    where = ("body",) if alone else ("body", parameter.name)
    value = body if alone else (body or {}).get(parameter.name)
    if value is None:
        if parameter.default is parameter.empty:
            raise _Invalid("missing", where, "Field required", None)
        return parameter.default
    wanted = typing.get_origin(hint) or hint
    if not hasattr(hint, "model_validate"):
        if not isinstance(value, wanted):
            raise _Invalid(f"{wanted.__name__}_type", where, f"Input should be a valid {wanted.__name__}", value)
        return value
    try:
        return hint.model_validate(value)
    except ValueError as error:
        raise _Invalid("value_error", where, str(error), value) from None


def _converted(text: str, hint: Any, where: Sequence[str]) -> Any:
    try:
        if hint is bool:
            return {**dict.fromkeys(_TRUE, True), **dict.fromkeys(_FALSE, False)}[text.lower()]
        return hint(text) if hint in (int, float) else text
    except (ValueError, KeyError):
        name = hint.__name__
        raise _Invalid(f"{name}_parsing", where, f"Input should be a valid {name}, not {text!r}", text) from None


# --- with FastAPI


def _fastapi(found: Sequence[tuple[Any, Callable[..., Any]]], error: type[Exception]) -> Any:
    """A FastAPI application with the routes, as in MLServer; None without FastAPI, or if it can't read a method's
    signature."""
    try:
        fastapi = importlib.import_module("fastapi")
        responses = importlib.import_module("fastapi.responses")
    except ImportError:
        return None

    async def failed(_: Any, raised: Any) -> Any:
        return responses.JSONResponse({"error": str(raised)}, raised.status_code)

    app = fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None, exception_handlers={error: failed})
    real = sys.modules.get("mlserver.rest.app") or _imported("mlserver.rest.app")
    if real is not None:
        app.router.route_class = real.APIRoute
    try:
        for handler, call in found:
            app.add_api_route(handler.rest_path, call, methods=[handler.rest_method])
    except Exception as problem:
        print(f"FastAPI can't read a custom handler: {problem}", file=sys.stderr)
        return None
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
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in request.headers.items()],
    }


def _pairs(head: dict[str, Any]) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in head.get("headers", ())]
