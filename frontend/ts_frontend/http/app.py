"""HTTP: finds each request's route, sends answers and errors, writes the access log."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from ts_frontend.errors import ClientGone, ServeError
from ts_frontend.http.around import HttpLimits
from ts_frontend.http.errors import ErrorDialect, MethodNotAllowed, ResourceNotFound, refusal
from ts_frontend.http.request import (
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
    Header,
    HttpAnswer,
    HttpRequest,
    error_body,
)
from ts_frontend.http.routing import Find, Guard, HttpKeys, Match, RouteTable
from ts_frontend.tasks import each
from ts_frontend.telemetry.logging.writer import Logs
from ts_frontend.telemetry.timing import ANSWER, ASK, RequestTimes, asking
from ts_frontend.transport.http1 import CLOSE
from ts_frontend.transport.limits import drained
from ts_frontend.transport.stream import Stream

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
TOO_LARGE: Final = 413
#: The most bytes of pieces that are sent as one.
JOINED_BYTES_MAX: Final = 64 * 1024
VERSIONS: Final = {"2": "2.0"}
ASKS: Final[Header] = (ASK.encode(), b"1")
_ANSWER: Final = ANSWER.encode()
UNEXPECTED: Final = "The server failed unexpectedly; its log says why"

#: the request (`request_line`), status, milliseconds, request id, the request's times
Log: TypeAlias = Callable[[Stream, int, float, str, "RequestTimes | None"], None]


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
    """The service of an HTTP listener. It finds a request's route in `routes`, lets the `guard` and then the
    `keys` (None: no keys are needed) check it, and answers it. `client_limits`: those of its clients, None without any.
    `of_a_model` finds the paths that models declare. `log` None: no access log. `times_all`: all requests are timed,
    for the log. `elsewhere`: the message for unknown paths in place of TorchServe's. `near`: tells the paths that are
    near an unknown one. Raises ClientGone when the client has disconnected."""

    def __init__(
        self,
        routes: RouteTable,
        ids: Callable[[], str],
        *,
        guard: Guard,
        keys: HttpKeys | None = None,
        client_limits: HttpLimits | None = None,
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
        self._client_limits = client_limits
        fixed = (*NO_CACHE, *cors.answer_headers())
        self._document, self._no_document = (*fixed, *DOCUMENT), (*fixed, *NO_DOCUMENT)
        self._limits = limits

    async def __call__(self, stream: Stream) -> None:
        begun_s = time.perf_counter()
        request = HttpRequest(stream, "", self._limits)
        request.request_id, timed, told = self._asked(request)
        stream.request_id = request.request_id
        status = CLIENT_LEFT
        times = asking.begin(RequestTimes(told=told)) if timed else None
        try:
            answer = await self._answer(request)
            await self._send(stream, answer, times if told else None)
            status = answer.status
        except asyncio.CancelledError:
            request.gone()
            raise
        finally:
            request.close()
            if times is not None:
                asking.end()
            if self._log is not None:
                self._log(stream, status, (time.perf_counter() - begun_s) * 1000, request.request_id, times)

    def _asked(self, request: HttpRequest) -> tuple[str, bool, bool]:
        """The request's id, the client's if it is valid; whether to time it; and whether its client asks for times."""
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
            if self._client_limits is not None:
                return await self._client_limits.serve(request, match.serve, match.dialect)
            return await match.serve(request)
        except ServeError as error:
            logger.debug("%s %r ended %s: %s", request.method, request.path, error.http_status, error.message)
            return refusal(error, match.dialect, told=request.told)
        except ClientGone:
            raise
        except Exception:
            logger.exception("%s %r failed (request id %s)", request.method, request.path, request.request_id)
            return HttpAnswer(500, (JSON,), error_body(500, "InternalServerException", UNEXPECTED))

    async def _send(self, stream: Stream, answer: HttpAnswer, times: RequestTimes | None) -> None:
        """Sends an answer. A client that asked for its `times` gets those known at the first piece in the header
        Server-Timing; of a stream all of them in the trailer of that name, if it takes trailers."""
        status, own, body = answer
        names = [name for name, _ in own]
        fixed = self._document if POLICY in names else self._no_document
        headers = [*own, (REQUEST_ID, stream.request_id.encode()), *fixed]
        if CONTENT_TYPE not in names and body:
            headers.append(OCTETS)
        if status == TOO_LARGE:
            headers.append(CLOSE)  # whether the rest of the body has come or not
        whole = isinstance(body, (bytes, bytearray, memoryview))
        trails = False
        if times is not None:
            headers.append((_ANSWER, times.text().encode()))
            takes = b"trailers" in stream.head.by_name.get(b"te", b"").lower()
            trails = not whole and takes and stream.peer.version != "1.0"
        if isinstance(body, (bytes, bytearray, memoryview)):
            headers.append((b"content-length", b"%d" % len(body)))
            stream.respond(status, headers, body)
        else:
            headers.append(STREAMED)
            if trails:
                headers.append((b"trailer", _ANSWER))
            stream.begin(status, headers)
            await _send_pieces(body, stream, apart=stream.peer.version != "2" and not _has_events(own))
            stream.finish([(_ANSWER, times.text().encode())] if trails and times is not None else ())
        if stream.queued:
            await drained(stream)


def _unanswered(request: HttpRequest, match: Match, elsewhere: str, near: Callable[[str], str] | None) -> ServeError:
    if match.allowed:
        return MethodNotAllowed(*match.allowed)
    if elsewhere and match.dialect is not ErrorDialect.OPEN_INFERENCE:
        return ResourceNotFound(elsewhere)
    hint = None if near is None else partial(near, request.path)
    if match.dialect is ErrorDialect.OPEN_INFERENCE:
        return ResourceNotFound(f"Not Found: nothing answers {request.method} {request.path}.", hint)
    return ResourceNotFound(NOT_FOUND, hint)


async def _send_pieces(pieces: AsyncIterator[Sequence[Body]], stream: Stream, *, apart: bool) -> None:
    """Sends the pieces as soon as they are ready; waits while the client doesn't read. `apart`: each is a chunk of its
    own, which HTTP/1.1 clients can rely on; else pieces that are ready together are sent together."""

    async def send_ready(ready: Sequence[Body]) -> None:
        for piece in ready if apart or len(ready) == 1 else joined(ready):
            stream.write(piece)
            if stream.queued:
                await drained(stream)

    try:
        await each(pieces, send_ready)
    except ServeError as error:
        # The status line has been sent: only an unfinished body can report the failure.
        logger.info("An answer failed before its end: %s", error.message)
        raise ClientGone from error


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


def request_line(stream: Stream) -> tuple[str, str]:
    head, version = stream.head, stream.peer.version
    target = head.target.decode("latin-1")
    return stream.peer.name, f"{head.method} {target} HTTP/{VERSIONS.get(version, version)}"


def noting(answered: Callable[[int], None], logs: Logs) -> Log:
    """Counts each request by its status with `answered`, and writes it to the access log."""

    def note(stream: Stream, status: int, duration_ms: float, request_id: str, times: RequestTimes | None) -> None:
        answered(status)
        if logs.access_enabled:
            logs.access(*request_line(stream), status, duration_ms, request_id, times)

    return note
