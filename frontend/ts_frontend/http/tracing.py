"""A span for each HTTP request, with the attributes of OpenTelemetry's conventions for HTTP servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry.trace import Tracer

from ts_frontend.http.request import HttpService
from ts_frontend.http.routing import RouteTable
from ts_frontend.telemetry.logging.writer import PROBED
from ts_frontend.telemetry.tracing.spans import REQUEST_ID, RequestSpan, current, leave
from ts_frontend.transport.stream import Stream

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT"})


def traced(service: HttpService, tracer: Tracer, routes: RouteTable) -> HttpService:
    """Wraps the service with a span for each request except probes. Spans are named by the templates of `routes`,
    which keeps the number of names small."""

    async def answer(stream: Stream) -> None:
        head = stream.head
        if _is_probe(head.path):
            await service(stream)
            return
        request = _begin(tracer, stream, routes.find(head.method, head.path).template)
        token = current.set(request)
        try:
            await service(stream)
        finally:
            leave(token)
            found: dict[str, Any] = {}
            if stream.begun:
                found["http.response.status_code"] = stream.status
                found[REQUEST_ID] = stream.request_id
            request.end(str(stream.status) if stream.status >= 500 else "", found)

    return answer


def _is_probe(path: str) -> bool:
    return path.rstrip("/") in PROBED or (path.startswith("/v2/models/") and path.endswith("/ready"))


def _begin(tracer: Tracer, stream: Stream, template: str) -> RequestSpan:
    head, client = stream.head, stream.peer.client
    headers = head.by_name
    method = head.method if head.method in _METHODS else "_OTHER"
    found: dict[str, Any] = {
        "http.request.method": method,
        # A lone surrogate would make the export of the whole batch of spans fail.
        "url.path": head.path.encode("utf-8", "replace").decode(),
        "url.scheme": stream.peer.scheme,
        "network.protocol.version": stream.peer.version,
    }
    if template:
        found["http.route"] = template
    if client is not None:
        found["client.address"], found["network.peer.port"] = client
    if b"user-agent" in headers:
        found["user_agent.original"] = headers[b"user-agent"].decode("latin-1")
    name = f"{'HTTP' if method == '_OTHER' else method} {template}".rstrip()
    return RequestSpan(tracer, name, _text(headers, b"traceparent"), _text(headers, b"tracestate"), found)


def _text(headers: Mapping[bytes, bytes], name: bytes) -> str | None:
    value = headers.get(name)
    return None if value is None else value.decode("latin-1")
