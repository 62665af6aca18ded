"""HTTP over ASGI: finds each request's route, sends answers and errors, writes the access log."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

from ts_frontend.errors import ClientGone, ServeError
from ts_frontend.http.auth import HttpKeys
from ts_frontend.http.departures import Departures
from ts_frontend.http.errors import ErrorDialect, MethodNotAllowed, ResourceNotFound, refusal
from ts_frontend.http.guard import Guard
from ts_frontend.http.request import (
    CLOSE,
    CONTENT_TYPE,
    DOCUMENT,
    JSON,
    NO_DOCUMENT,
    NOT_FOUND,
    OCTETS,
    POLICY,
    STREAMED,
    Body,
    BodyLimits,
    Event,
    Header,
    HttpAnswer,
    HttpRequest,
    Receive,
    Scope,
    Send,
    error_body,
    not_found,
)
from ts_frontend.http.routing import Find, Match, RouteTable
from ts_frontend.tasks import each
from ts_frontend.telemetry.timing import ANSWER, ASK, RequestTimes, asking

logger: Final = logging.getLogger(__name__)
REQUEST_ID: Final = b"x-request-id"
REQUEST_ID_BYTES_MAX: Final = 128
_ID: Final = re.compile(rb"[\x21-\x7e]{1,%d}" % REQUEST_ID_BYTES_MAX)
#: Headers of every answer; a handler can't set them.
NO_CACHE: Final[tuple[Header, ...]] = (
    (b"pragma", b"no-cache"),
    (b"cache-control", b"no-cache; no-store, must-revalidate, private"),
    (b"expires", b"Thu, 01 Jan 1970 00:00:00 UTC"),
)
CLIENT_LEFT: Final = 499
#: The most bytes of pieces that are sent as one.
JOINED_BYTES_MAX: Final = 64 * 1024
VERSIONS: Final = {"2": "2.0"}
ASKS: Final[Header] = (ASK.encode(), b"1")
_ANSWER: Final = ANSWER.encode()
_TRAILERS: Final = "http.response.trailers"
UNEXPECTED: Final = "The server failed unexpectedly; its log says why"

#: the request's scope (`request_line`), status, milliseconds, request id, the request's times
Log: TypeAlias = Callable[[Scope, int, float, str, "RequestTimes | None"], None]


@dataclass(frozen=True, slots=True)
class Cors:
    """The CORS headers for pages of other origins; None: the header isn't sent."""

    origin: str | None = None
    methods: str | None = None
    headers: str | None = None

    def is_preflight(self, request: HttpRequest) -> bool:
        """Returns True for a CORS preflight request; the headers of every answer are all that it needs."""
        if request.method != "OPTIONS" or not self.origin:
            return False
        return bool(request.header(b"access-control-request-method") and request.header(b"origin"))

    def answer_headers(self) -> tuple[Header, ...]:
        values = {"origin": self.origin, "methods": self.methods, "headers": self.headers}
        return tuple(
            (f"access-control-allow-{name}".encode(), value.encode("latin-1"))
            for name, value in values.items()
            if value
        )


class HttpApp:
    """The ASGI application of an HTTP listener. It finds a request's route in `routes`, lets the `guard` and then the
    `keys` (None: no keys are needed) check it, and answers it. `of_a_model` finds the paths that models declare. `log`
    None: no access log. `times_all`: all requests are timed, for the log. `elsewhere`: the message for unknown paths
    in place of TorchServe's. `near`: tells the paths that are near an unknown one. Raises ClientGone when the client
    has disconnected."""

    def __init__(
        self,
        routes: RouteTable,
        ids: Callable[[], str],
        *,
        guard: Guard,
        keys: HttpKeys | None = None,
        of_a_model: Find | None = None,
        log: Log | None,
        cors: Cors,
        limits: BodyLimits,
        times_all: bool = False,
        elsewhere: str = "",
        near: Callable[[str], str] | None = None,
    ) -> None:
        self._ids, self._near = ids, near
        self._times_all, self._elsewhere = times_all, elsewhere
        self._log = log
        self._routes, self._of_a_model = routes, of_a_model
        self._guard, self._keys, self._cors = guard, keys, cors
        fixed = (*NO_CACHE, *cors.answer_headers())
        self._document, self._no_document = (*fixed, *DOCUMENT), (*fixed, *NO_DOCUMENT)
        self._limits = limits
        self._departures = Departures()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await not_found(scope, receive, send)
            return
        begun_s = time.perf_counter()
        request = HttpRequest(scope, receive, "", self._limits, self._departures)
        request.request_id, timed, told = self._asked(request)
        status = CLIENT_LEFT
        times = None
        if timed:
            times = asking.begin(RequestTimes(told=told))
            send = telling(send, times, scope) if told else send
        try:
            answer = await self._answer(request)
            await self._send(request, answer, send, scope["http_version"])
            status = answer.status
        except OSError as error:  # raised by ASGI servers after the client has disconnected
            raise ClientGone from error
        finally:
            request.close()
            if times is not None:
                asking.end()
            if self._log is not None:
                self._log(scope, status, (time.perf_counter() - begun_s) * 1000, request.request_id, times)

    def _asked(self, request: HttpRequest) -> tuple[str, bool, bool]:
        """Returns the request's id, the client's if it sent a valid one; whether to time the request; and whether its
        client asks for its times."""
        named, own = request.by_name, ""
        if REQUEST_ID in named:
            own = next((value.decode() for value in request.values(REQUEST_ID) if _ID.fullmatch(value)), "")
        told = ASKS[0] in named and ASKS[1] in request.values(ASKS[0])
        return own or self._ids(), told or self._times_all, told

    async def _answer(self, request: HttpRequest) -> HttpAnswer:
        match = self._routes.find(request.method, request.path)
        try:
            self._guard.check(request, match)
            if self._cors.is_preflight(request):
                return HttpAnswer(200, (), b"")
            if match.yields and self._of_a_model is not None:
                match = self._of_a_model(request.method, request.path) or match
            request.told = self._keys is None or self._keys.check(request, match)
            if match.serve is None:
                raise _unanswered(request, match, self._elsewhere, self._near)
            request.path_params = match.params
            return await match.serve(request)
        except ServeError as error:
            logger.debug("%s %r ended %s: %s", request.method, request.path, error.http_status, error.message)
            return refusal(error, match.dialect, told=request.told)
        except ClientGone:
            raise
        except Exception:
            logger.exception("%s %r failed (request id %s)", request.method, request.path, request.request_id)
            return HttpAnswer(500, (JSON,), error_body(500, "InternalServerException", UNEXPECTED))

    async def _send(self, request: HttpRequest, answer: HttpAnswer, send: Send, http_version: str) -> None:
        status, own, body = answer
        names = [name for name, _ in own]
        fixed = self._document if POLICY in names else self._no_document
        headers = [*own, (REQUEST_ID, request.request_id.encode()), *fixed]
        if CONTENT_TYPE not in names and body:
            headers.append(OCTETS)
        if status >= 400 and http_version[0] == "1" and not request.whole:
            headers.append(CLOSE)
        if isinstance(body, (bytes, bytearray, memoryview)):
            headers.append((b"content-length", b"%d" % len(body)))
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": _bytes(body), "more_body": False})
        else:
            headers.append(STREAMED)
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await _send_pieces(body, send, apart=http_version[0] == "1" and not _has_events(own))


def _unanswered(request: HttpRequest, match: Match, elsewhere: str, near: Callable[[str], str] | None) -> ServeError:
    if match.allowed:
        return MethodNotAllowed(*match.allowed)
    if elsewhere and match.dialect is not ErrorDialect.OPEN_INFERENCE:
        return ResourceNotFound(elsewhere)
    hint = None if near is None else partial(near, request.path)
    if match.dialect is ErrorDialect.OPEN_INFERENCE:
        return ResourceNotFound(f"Not Found: nothing answers {request.method} {request.path}.", hint)
    return ResourceNotFound(NOT_FOUND, hint)


async def _send_pieces(pieces: AsyncIterator[Sequence[Body]], send: Send, *, apart: bool) -> None:
    """Sends the pieces as soon as they are ready; waits while the client doesn't read. `apart`: each is a chunk of its
    own, which HTTP/1.1 clients can rely on; else pieces that are ready together are sent together."""

    async def send_ready(ready: Sequence[Body]) -> None:
        for piece in ready if apart or len(ready) == 1 else joined(ready):
            if len(piece):
                await send({"type": "http.response.body", "body": _bytes(piece), "more_body": True})

    try:
        await each(pieces, send_ready)
    except ServeError as error:
        # The status line has been sent: only an unfinished body can report the failure.
        logger.info("An answer failed before its end: %s", error.message)
        raise ClientGone from error
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _has_events(headers: Sequence[Header]) -> bool:
    """Whether an answer is a stream of server-sent events, whose format marks the end of each event."""
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)


def joined(pieces: Sequence[Body]) -> Iterator[bytes]:
    """The pieces joined to parts of about JOINED_BYTES_MAX bytes; a larger piece isn't split."""
    part: list[Body] = []
    size = 0
    for piece in pieces:
        if part and size + len(piece) > JOINED_BYTES_MAX:
            yield b"".join(part)
            part, size = [], 0
        part.append(piece)
        size += len(piece)
    yield b"".join(part)


def _bytes(body: Body) -> bytes | bytearray:
    """Returns a body without memoryview, which h2corn doesn't accept."""
    return body.tobytes() if isinstance(body, memoryview) else body


def request_line(scope: Scope) -> tuple[str, str]:
    """Returns the client and the request line, for the access log."""
    client, version = scope.get("client"), scope["http_version"]
    target = scope["raw_path"].decode("latin-1")
    if scope["query_string"]:
        target += "?" + scope["query_string"].decode("latin-1")
    peer = f"{client[0]}:{client[1]}" if client else "unix"
    return peer, f"{scope['method']} {target} HTTP/{VERSIONS.get(version, version)}"


def telling(send: Send, times: RequestTimes, scope: Scope) -> Send:
    """Wraps `send` for an answer whose client asked for its times. The header Server-Timing of a stream has the times
    known at its first piece, the trailer of that name all of them; without trailers (HTTP/1.1, and clients that don't
    accept them), there is only the header."""
    can_trail = _TRAILERS in (scope.get("extensions") or {})
    trails = False

    async def tell(event: Event) -> None:
        nonlocal trails
        kind = event["type"]
        if kind == "http.response.start":
            trails = can_trail and STREAMED in event["headers"]
            more = [(_ANSWER, times.text().encode())]
            if trails:
                more.append((b"trailer", _ANSWER))
            event = {**event, "headers": [*event["headers"], *more], **_with_trailers(trails)}
        await send(event)
        if trails and kind == "http.response.body" and not event.get("more_body"):
            headers = [(_ANSWER, times.text().encode())]
            await send({"type": _TRAILERS, "headers": headers, "more_trailers": False})

    return tell


def _with_trailers(trails: bool) -> dict[str, Any]:
    return {"trailers": True} if trails else {}
