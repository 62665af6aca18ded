"""The HTTP requests that services get, and the answers that they return. Only `HttpApp` makes requests."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import parse_qsl

from ts.protocol.frames import Pairs
from ts_frontend.errors import InvalidArgument, MessageTooLarge
from ts_frontend.job import handlers_headers
from ts_frontend.open_inference.requests import WHOLE_BYTES_MAX, small_members
from ts_frontend.tasks import Expiry, current_task, uncancel
from ts_frontend.transport.limits import PIECE_BYTES, Arriving, SlowSender, arrival, head_bytes
from ts_frontend.transport.stream import Data, Fields, Peer, Stream
from ts_frontend.transport.whole import Whole

log: Final = logging.getLogger(__name__)

#: What answers the HTTP requests of a listener.
HttpService: TypeAlias = Callable[[Stream], Awaitable[None]]
Header: TypeAlias = "tuple[bytes, bytes]"
Body: TypeAlias = Data

#: The most digits of a Content-Length; Python refuses to parse numbers of thousands of digits.
LENGTH_DIGITS_MAX: Final = 18


class BodyLimits(NamedTuple):
    """The limits of a request's body: its size in bytes, and the seconds until it has arrived. `arriving`: the bodies
    with which it shares a limit."""

    bytes_max: int
    s_max: float
    arriving: Arriving = Arriving()


class HttpAnswer(NamedTuple):
    """An answer; names of `headers` are lower case. `body`: all of it, or a stream of lists of ready pieces."""

    status: int
    headers: Sequence[Header]
    body: Body | AsyncIterator[Sequence[Body]]


class HttpRequest:
    """One request. `path` is percent-decoded, `path_params` has the values of the names in its route; names in
    `headers` are lower case. `by_name`: the last value of each header."""

    __slots__ = (
        *("_stream", "_when_gone", "by_name"),
        *("headers", "limits", "method", "path", "path_params", "request_id", "told"),
    )

    def __init__(self, stream: Stream, request_id: str, limits: BodyLimits) -> None:
        head = stream.head
        self.method, self.path = head.method, head.path
        self._stream = stream
        self.headers: Fields = head.fields
        self.by_name: Mapping[bytes, bytes] = head.by_name
        self.path_params: Mapping[str, str] = {}
        #: The caller may see the names of what is served, also in errors.
        self.told = False
        self.request_id = request_id
        self.limits = limits
        self._when_gone: Callable[[], None] | None = None

    @property
    def query(self) -> bytes:
        return self._stream.head.query

    @property
    def ends(self) -> Peer:
        return self._stream.peer

    @property
    def sent(self) -> Mapping[bytes, bytes]:
        """Returns the last value of each header as the client sent them, those that were dropped among them."""
        return self._stream.head.by_name

    @property
    def peer(self) -> str:
        return self._stream.peer.name

    @property
    def reached(self) -> str:
        """Returns the address that the client connected to, "" on a Unix socket."""
        server = self._stream.peer.server
        return server[0] if server else ""

    def header(self, name: bytes) -> str:
        """Returns the last value of a header, "" without it."""
        found = self.by_name.get(name)
        return found.decode("latin-1") if found else ""

    def values(self, name: bytes) -> list[bytes]:
        last = self.by_name.get(name)
        if last is None:
            return []
        if len(self.by_name) == len(self.headers):
            return [last]
        return [value for key, value in self.headers if key == name]

    def drop(self, name: bytes) -> None:
        """Removes a header, so that handlers don't get it."""
        self.headers = [pair for pair in self.headers if pair[0] != name]
        self.by_name = {key: value for key, value in self.by_name.items() if key != name}

    def for_handler(self, more: Pairs = ()) -> Pairs:
        """Returns the headers for a handler, followed by `more`. Raises InvalidArgument."""
        return handlers_headers(self.headers, more)

    async def body(self) -> bytes:
        """Returns the whole body. Raises BodiesFull, MessageTooLarge, SlowSender."""
        stream = self._stream
        if stream.ended:  # most bodies need no timeout
            data = stream.body()
            self._check_size(len(data))
            return data
        self._check_size(self._announced())
        expiry = Expiry(current_task())
        timer = asyncio.get_running_loop().call_later(self.limits.s_max, expiry.expire)
        try:
            return await (self._pieces() if stream.whole is None else self._placed(stream.whole))
        except asyncio.CancelledError:
            if not expiry.passed:
                raise
            uncancel()
            raise SlowSender(f"The request's body did not come within {self.limits.s_max:g} s") from None
        finally:
            timer.cancel()
            expiry.task = None

    async def _placed(self, whole: Whole) -> bytes:
        stream, head = self._stream, head_bytes(self.headers) + PIECE_BYTES
        held = self.limits.arriving.body()
        whole.count = lambda filled: held.hold(head + filled)
        try:
            stream.took(whole.filled)
            held.hold(head + whole.filled)
            while not stream.ended:
                await held.piece(arrival(stream))
            return stream.body()
        finally:
            whole.count = None
            held.end()

    async def _pieces(self) -> bytes:
        stream, pieces = self._stream, list[bytes]()
        size, head = 0, head_bytes(self.headers)
        held = self.limits.arriving.body()
        try:
            while True:
                piece = stream.body()
                if piece:
                    pieces.append(piece)
                    size += len(piece)
                    self._check_size(size)
                if stream.ended and not stream.pieces:
                    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
                held.hold(head + size + PIECE_BYTES * len(pieces))
                await held.piece(arrival(stream))
        finally:
            held.end()

    def _announced(self) -> int:
        """Returns the Content-Length, 0 without one: received bytes are counted anyway."""
        text = self.header(b"content-length")
        if len(text) > LENGTH_DIGITS_MAX:
            return sys.maxsize
        return int(text) if text.isdecimal() else 0

    def _check_size(self, size: int) -> None:
        limit = self.limits.bytes_max
        if size > limit:
            raise MessageTooLarge(f"Request of at least {size} bytes is over max_request_size of {limit} bytes")

    def when_gone(self, act: Callable[[], None]) -> None:
        """Calls `act` if the client leaves before the end of the answer."""
        self._when_gone = act

    def gone(self) -> None:
        """The client has left, or the server ends."""
        if self._when_gone is not None:
            self._when_gone()

    def close(self) -> None:
        """Ends the request after its answer: what acts when the client leaves may keep it in a cycle."""
        self._when_gone = None


Serve: TypeAlias = Callable[[HttpRequest], Awaitable[HttpAnswer]]

JSON: Final[Header] = (b"content-type", b"application/json")
#: The content type of a model's answer that has none; RFC 9110 lets clients assume it then.
OCTETS: Final[Header] = (b"content-type", b"application/octet-stream")
CONTENT_TYPE: Final = JSON[0]
POLICY: Final = b"content-security-policy"
#: Headers of every answer, since pages of other sites can navigate to any of them: browsers don't guess a content type,
#: and pages of other origins can't embed the answer.
_EVERY: Final[tuple[Header, ...]] = (
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
#: Headers of the server's own pages, which have a policy of their own, and of all other answers, whose bytes may come
#: from a model, a log or a name: a browser that shows them runs no script and gives them no origin.
DOCUMENT: Final = _EVERY
NO_DOCUMENT: Final[tuple[Header, ...]] = (*_EVERY, (POLICY, b"sandbox; default-src 'none'"))
STREAMED: Final[Header] = (b"ts_stream_next", b"true")
NOT_FOUND: Final = "Requested resource is not found, please refer to API document."


#: The answer to HTTP requests at a gRPC address.
ONLY_GRPC: Final = (
    "This is an address for gRPC. The HTTP APIs are at inference_address and management_address (8080, 8081)"
)


async def not_found(stream: Stream) -> None:
    """The answer of listeners without HTTP: 404."""
    answer_error(stream, 404, "ResourceNotFoundException", ONLY_GRPC)


def answer_error(stream: Stream, status: int, kind: str, message: str, *more: tuple[bytes, bytes]) -> None:
    """Answers with an error in the form of TorchServe's HTTP interface."""
    body = error_body(status, kind, message)
    stream.respond(status, [JSON, (b"content-length", b"%d" % len(body)), *more, *NO_DOCUMENT], body)


_json_text: Final = json.JSONEncoder(ensure_ascii=False).encode


def error_body(status: int, kind: str, message: str) -> bytes:
    """Returns TorchServe's JSON for an error. Written by hand for speed: `json` indents in Python code."""
    text = f'{{\n  "code": {status},\n  "type": {_json_text(kind)},\n  "message": {_json_text(message)}\n}}\n'
    return text.encode("utf-8", "replace")


PARAMETERS_MAX: Final = 256


def json_answer(status: int, value: object) -> HttpAnswer:
    body = json.dumps(value, indent=2, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
    return HttpAnswer(status, (JSON,), body)


def compact_json(status: int, value: object) -> HttpAnswer:
    """Returns an answer in JSON without blanks, the format of servers other than TorchServe."""
    return HttpAnswer(status, (JSON,), json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


#: The most bytes of a JSON body that isn't sent to a model: names, settings, regions.
JSON_BYTES_MAX: Final = 256 * 1024


async def json_head(body: bytes) -> dict[str, Any]:
    """Returns the JSON object of a body that is sent on to a model; of a large one only the small members, without a
    check of the others. Raises InvalidArgument for anything else."""
    if len(body) <= WHOLE_BYTES_MAX:
        return json_object(body)
    try:
        return await asyncio.to_thread(small_members, body)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"The body is not valid JSON: {error}") from None


def json_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body, {} for an empty one. Raises MessageTooLarge; InvalidArgument for anything else."""
    check_json_size(body)
    if not body.strip():
        return {}
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"The body is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidArgument(f"The body is a JSON {type(found).__name__}, not an object")
    return found


def check_json_size(body: bytes) -> None:
    """Raises MessageTooLarge for a body that is too large to parse on the event loop."""
    if len(body) > JSON_BYTES_MAX:
        raise MessageTooLarge(
            f"A body of {len(body)} bytes is too large for this call: at most {JSON_BYTES_MAX} bytes are allowed"
        )


def query_pairs(request: HttpRequest) -> list[tuple[str, str]]:
    """All parameters of the query, in order. Raises InvalidArgument for over PARAMETERS_MAX, or no UTF-8."""
    try:
        return parse_qsl(
            request.query.decode("latin-1"), keep_blank_values=True, max_num_fields=PARAMETERS_MAX, errors="strict"
        )
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"The query is not UTF-8: {error.reason} in {error.object[:80]!r}") from error
    except ValueError as error:
        raise InvalidArgument(f"The query has more than {PARAMETERS_MAX} parameters") from error


class Parameters:
    """Parameters by name: the first of equal names counts; an empty value counts as not given."""

    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        self._values = dict(reversed(pairs))

    def text(self, name: str) -> str | None:
        return self._values.get(name) or None

    def required(self, name: str) -> str:
        """Returns a parameter. Raises InvalidArgument if it isn't given; an empty value is returned."""
        value = self._values.get(name)
        if value is None:
            raise InvalidArgument(f"Parameter {name} is required.")
        return value

    def integer(self, name: str) -> int | None:
        """Returns a whole number, None if it isn't given. Raises InvalidArgument for anything else."""
        value = self.text(name)
        if value is None:
            return None
        try:
            return int(value)
        except ValueError:
            raise InvalidArgument(f"Parameter {name} must be a whole number, not {value[:80]!r}") from None

    def tuning(self, name: str) -> int | None:
        """As `integer`, for optional settings: no whole number is logged and, as in TorchServe, counts as not given."""
        try:
            return self.integer(name)
        except InvalidArgument as error:
            log.warning("%s: it counts as not given", error.message)
            return None

    def flag(self, name: str, default: bool) -> bool:
        """Returns True for `true` in any case, False for any other text, `default` if it isn't given."""
        value = self.text(name)
        return default if value is None else value.lower() == "true"
