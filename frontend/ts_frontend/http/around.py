"""What is done around requests: the limits of their clients (who asks, what is left in the headers of each answer, and
the tokens of a model's answers), and a span for each, with the attributes of OpenTelemetry's conventions for HTTP
servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ts_frontend.errors import LimitExceeded
from ts_frontend.http.errors import ErrorDialect, refusal
from ts_frontend.http.request import Body, Header, HttpAnswer, HttpRequest, HttpService, Serve
from ts_frontend.http.routing import RouteTable
from ts_frontend.limits.clients import Asker, Signs, asker, used_tokens
from ts_frontend.limits.limits import Limits, told
from ts_frontend.telemetry.logging.writer import PROBED
from ts_frontend.transport.stream import Stream

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


class HttpLimits:
    """Answers requests as their clients' limits allow."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    async def serve(self, request: HttpRequest, serve: Serve, dialect: ErrorDialect) -> HttpAnswer:
        """As `serve`, with the headers of the limits that apply. Raises its errors but LimitExceeded, which it
        answers."""
        own = self._limits.clients.asker(_signs(request))
        token = asker.set(own)
        try:
            answer = await serve(request)
        except LimitExceeded as error:
            _settle(own, 0)
            answer = refusal(error, dialect, told=request.told)
        except BaseException:
            _settle(own, 0)
            raise
        finally:
            asker.reset(token)
        headers = self._told(own)
        if own.on_tokens is not None:
            answer = _counted(answer, own)
        return answer._replace(headers=(*answer.headers, *headers)) if headers else answer

    def _told(self, own: Asker) -> list[Header]:
        return [(name.encode(), value.encode()) for name, value in told(own, self._limits.clock())]


def _signs(request: HttpRequest) -> Signs:
    sent: Mapping[bytes, bytes] = request.sent

    def header(name: str) -> str:
        return sent.get(name.encode(), b"").decode("latin-1")

    return Signs(header, request.ends.certificate, request.ends.host)


def _settle(own: Asker, used: float) -> None:
    if own.on_tokens is not None:
        own.on_tokens(used)


def _counted(answer: HttpAnswer, own: Asker) -> HttpAnswer:
    """The answer, whose tokens are settled when it has ended."""
    body = answer.body
    if isinstance(body, (bytes, bytearray, memoryview)):
        _settle(own, used_tokens(bytes(body)) or 0)
        return answer
    return answer._replace(body=_pieces(body, own))


async def _pieces(pieces: AsyncIterator[Sequence[Body]], own: Asker) -> AsyncIterator[Sequence[Body]]:
    """The pieces of a stream. One that doesn't tell its tokens has one in each piece."""
    count, said = 0, 0
    try:
        async for ready in pieces:
            count += len(ready)
            for piece in ready:
                said = used_tokens(bytes(piece)) or said
            yield ready
    finally:
        _settle(own, said or count)
        await pieces.aclose()  # type: ignore[attr-defined]


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT"})


def traced_service(service: HttpService, tracer: Tracer, routes: RouteTable) -> HttpService:
    """Wraps the service with a span for each request except probes. Spans are named by the templates of `routes`,
    which keeps the number of names small."""
    from ts_frontend.telemetry.tracing.spans import REQUEST_ID, RequestSpan, current, leave  # OpenTelemetry is an extra

    async def answer(stream: Stream) -> None:
        head = stream.head
        if _is_probe(head.path):
            await service(stream)
            return
        request = RequestSpan(tracer, *_beginning(stream, routes.find(head.method, head.path).template))
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


def _beginning(stream: Stream, template: str) -> tuple[str, str | None, str | None, dict[str, Any]]:
    """The arguments of a RequestSpan."""
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
    return name, _text(headers, b"traceparent"), _text(headers, b"tracestate"), found


def _text(headers: Mapping[bytes, bytes], name: bytes) -> str | None:
    value = headers.get(name)
    return None if value is None else value.decode("latin-1")
