"""A span for each HTTP request, with the attributes of OpenTelemetry's conventions for HTTP servers."""

from __future__ import annotations

from typing import Any

from opentelemetry.trace import Tracer

from ts_frontend.http.request import AsgiApp, Event, Receive, Scope, Send
from ts_frontend.http.routing import RouteTable
from ts_frontend.telemetry.logging.writer import PROBED
from ts_frontend.telemetry.tracing.spans import REQUEST_ID, RequestSpan, current, leave

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT"})


def traced(app: AsgiApp, tracer: Tracer, routes: RouteTable) -> AsgiApp:
    """Wraps the application with a span for each request except probes. Spans are named by the templates of `routes`,
    which keeps the number of names small."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_probe(scope["path"]):
            await app(scope, receive, send)
            return
        request = _begin(tracer, scope, routes.find(scope["method"], scope["path"]).template)
        token = current.set(request)
        found: dict[str, Any] = {}

        def noting(event: Event) -> Any:
            if event["type"] == "http.response.start":
                found["http.response.status_code"] = event["status"]
                found.update((REQUEST_ID, value.decode()) for key, value in event["headers"] if key == b"x-request-id")
            return send(event)

        try:
            await app(scope, receive, noting)
        finally:
            leave(token)
            status = found.get("http.response.status_code", 0)
            request.end(str(status) if status >= 500 else "", found)

    return answer


def _is_probe(path: str) -> bool:
    return path.rstrip("/") in PROBED or (path.startswith("/v2/models/") and path.endswith("/ready"))


def _begin(tracer: Tracer, scope: Scope, template: str) -> RequestSpan:
    headers = dict(scope["headers"])
    method = scope["method"] if scope["method"] in _METHODS else "_OTHER"
    found: dict[str, Any] = {
        "http.request.method": method,
        # A lone surrogate would make the export of the whole batch of spans fail.
        "url.path": scope["path"].encode("utf-8", "replace").decode(),
        "url.scheme": scope["scheme"],
        "network.protocol.version": scope["http_version"],
    }
    if template:
        found["http.route"] = template
    if scope.get("client"):
        found["client.address"], found["network.peer.port"] = scope["client"][0], scope["client"][1]
    if b"user-agent" in headers:
        found["user_agent.original"] = headers[b"user-agent"].decode("latin-1")
    name = f"{'HTTP' if method == '_OTHER' else method} {template}".rstrip()
    return RequestSpan(tracer, name, _text(headers, b"traceparent"), _text(headers, b"tracestate"), found)


def _text(headers: dict[bytes, bytes], name: bytes) -> str | None:
    value = headers.get(name)
    return None if value is None else value.decode("latin-1")
