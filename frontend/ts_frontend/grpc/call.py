"""gRPC calls: the interface of the services (calls, methods, metadata), and the exchange of one call, which reads its
request, runs the method, and writes the answers and the final status.

A `Method` is registered under its path; services take message bytes and give message bytes. A status other than OK is
a raised `ServeError`. A client that cancels, or a deadline that passes, cancels the task that runs the method
(asyncio.CancelledError)."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeAlias

from ts.protocol.frames import Buffer, Pairs
from ts_frontend.errors import ClientGone, Code, Draining, ServeError, Unimplemented
from ts_frontend.grpc import protocol
from ts_frontend.grpc.incoming import Incoming
from ts_frontend.grpc.protocol import (
    ACCEPT_ENCODING,
    CONTENT_TYPE,
    METADATA_KEY,
    METADATA_VALUE,
    PREFIX,
    PREFIX_BYTES,
    STATUS_OK,
    Header,
    MalformedHeader,
    ReceivedMetadata,
    encode_metadata,
    status_details,
    status_headers,
)
from ts_frontend.job import RequestIds
from ts_frontend.tasks import Expiry, current_task, each, uncancel
from ts_frontend.telemetry.metrics.families import TIMES_MAX, Histogram
from ts_frontend.telemetry.timing import ANSWER, ASK, RequestTimes, asking
from ts_frontend.transport.hpack import encode
from ts_frontend.transport.http2 import Http2Stream
from ts_frontend.transport.limits import ListenerLimits, OpenStream, drained, head_bytes
from ts_frontend.transport.stream import Peer

log: Final = logging.getLogger(__name__)


Metadata: TypeAlias = "Sequence[tuple[str, str | bytes]]"
Entries: TypeAlias = "list[tuple[str, str | bytes]]"
#: The headers of a request, and their last values by name.
ReceivedHeaders: TypeAlias = "tuple[Sequence[Header], Mapping[bytes, bytes]]"
_NO_HEADERS: Final[ReceivedHeaders] = ((), {})
_TIMEOUT: Final = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNIT_S: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
#: Seconds before a deadline at which its status is sent: a LAN's round trip and a timer's resolution.
EARLY_S_MAX: Final = 0.005
EARLY_SHARE: Final = 0.05


def timeout_s(value: bytes) -> float:
    """Seconds of a `grpc-timeout` value such as b"250m". Raises MalformedHeader."""
    match = _TIMEOUT.fullmatch(value)
    if match is None:
        raise MalformedHeader(
            f"grpc-timeout is malformed: {value.decode('latin-1')!r}; write up to 8 digits and a unit"
        )
    return int(match[1]) * _UNIT_S[match[2]]


def answering_s(seconds: float) -> float:
    """Seconds after which to answer a deadline of `seconds`: a little less, so that the client gets the status."""
    return seconds - min(EARLY_S_MAX, seconds * EARLY_SHARE)


class Call:
    """One RPC. `deadline_s`: `time.monotonic()` seconds, `math.inf` for none. Keys of metadata are lower case; values
    of `-bin` keys are bytes. `request_id`: "" until the service sets it. Computed on first use: the metadata if it is
    None, from `headers`, the request's and the last values of each name; `peer` if it is None, from `ends`, the
    connection's."""

    __slots__ = (
        "_headers",
        "_initial",
        "_metadata",
        "_peer",
        "_trailing",
        "adds_nothing",
        "deadline_s",
        "ends",
        "path",
        "request_id",
        "stream",
        "times",
    )

    def __init__(
        self,
        path: str,
        metadata: Metadata | None = (),
        deadline_s: float = math.inf,
        peer: str | None = "",
        ends: Peer | None = None,
        headers: ReceivedHeaders = _NO_HEADERS,
    ) -> None:
        self.path = path
        self._metadata, self._headers = metadata, headers
        #: Nobody has asked for metadata to add to the answer.
        self.adds_nothing = True
        self.deadline_s = deadline_s
        self.request_id = ""
        self._peer, self.ends = peer, ends
        self._initial: Entries | None = None
        self._trailing: Entries | None = None
        #: The times of its jobs; None if they aren't measured.
        self.times: RequestTimes | None = None
        #: Counts a streaming call.
        self.stream: OpenStream | None = None

    @property
    def peer(self) -> str:
        if self._peer is None:
            self._peer = "unix" if self.ends is None else self.ends.name
        return self._peer

    @property
    def metadata(self) -> Metadata:
        if self._metadata is None:
            self._metadata, self._headers = ReceivedMetadata(self._headers[0]), _NO_HEADERS
        return self._metadata

    @metadata.setter
    def metadata(self, metadata: Metadata) -> None:
        self._metadata = metadata

    @property
    def without_metadata(self) -> bool:
        """Whether the headers tell that there is no metadata of the client's own, so that nobody need look at it."""
        return self._metadata is None and _TRANSPORT_NAMES.issuperset(self._headers[1])

    @property
    def head_bytes(self) -> int:
        return head_bytes(self._headers[0] if self._metadata is None else self._metadata)

    def forget_head(self) -> None:
        """Drops the client's metadata, which nobody needs any longer: the call may last long."""
        self._metadata, self._headers = (), _NO_HEADERS
        if self.stream is not None:
            self.stream.without_head()

    @property
    def initial(self) -> Entries:
        """The initial metadata; append to it before the first message."""
        if self._initial is None:
            self._initial = []
            self.adds_nothing = False
        return self._initial

    @property
    def trailing(self) -> Entries:
        """The trailing metadata; append to it before the method ends."""
        if self._trailing is None:
            self._trailing = []
            self.adds_nothing = False
        return self._trailing

    def last_metadata(self) -> Entries:
        """Returns the trailing metadata to send: `trailing`, and the times if the client asked for them."""
        if self.times is None or not self.times.told:
            return self.trailing
        return [*self.trailing, (ANSWER, self.times.text())]

    def time_jobs(self, *, told: bool) -> None:
        """Times the jobs that this call submits from now on. `told`: the client gets the times."""
        if self.times is None:
            self.times = RequestTimes(told=told)
            self.adds_nothing = False
        self.times.told |= told
        asking.begin(self.times)

    def value(self, key: str) -> str | bytes | None:
        found = None
        for name, value in self.metadata:
            if name == key:
                found = value
        return found


class Shape(Enum):
    """The number of messages in each direction: unary or streaming."""

    UNARY = "unary"
    SERVER_STREAM = "server stream"
    BIDI = "bidirectional"


#: What stands before a larger message is sent apart from it, to avoid a copy of the message.
JOIN_BYTES_MAX: Final = 64 * 1024
#: A message, or the two parts of a large one, which are sent without being joined.
Answer: TypeAlias = "bytes | tuple[bytes, Buffer]"
Unary: TypeAlias = Callable[[Call, bytes], Awaitable[Answer]]
#: A server stream yields lists of messages that are ready together, which are sent in one write.
ServerStream: TypeAlias = Callable[[Call, bytes], AsyncIterator[Sequence[bytes]]]
Bidi: TypeAlias = Callable[[Call, AsyncIterator[bytes]], AsyncIterator[Sequence[bytes]]]


@dataclass(frozen=True, slots=True)
class Method:
    """One method of a service, under its full path (`/package.Service/Method`)."""

    path: str
    shape: Shape
    run: Unary | ServerStream | Bidi


def code_of(call: Call, error: BaseException | None) -> int:
    if error is None:
        return Code.OK
    if isinstance(error, ServeError):
        return error.code
    if isinstance(error, (asyncio.CancelledError, GeneratorExit, ClientGone)):
        return Code.DEADLINE_EXCEEDED if time.monotonic() >= call.deadline_s else Code.CANCELLED
    return Code.INTERNAL


TYPES: Final = {Shape.UNARY: "UNARY", Shape.SERVER_STREAM: "SERVER_STREAMING", Shape.BIDI: "BIDI_STREAMING"}
_UNARY: Final = TYPES[Shape.UNARY]
LABELS: Final = ("grpc_type", "grpc_service", "grpc_method")


class MethodCounts:
    """The counters of one method's calls. `handled`: ended calls by status. The times of answered unary calls, at most
    TIMES_MAX, are kept and added to the histogram by `sum_up`."""

    __slots__ = ("_seconds", "_took", "handled", "labels", "received", "sent", "started")

    def __init__(self, method: Method) -> None:
        service, _, name = method.path[1:].rpartition("/")
        self.labels = (TYPES[method.shape], service, name)
        self.started = self.received = self.sent = 0
        self.handled = [0] * len(Code)
        self._seconds = Histogram()
        self._took: list[float] = []

    def sum_up(self) -> Histogram:
        """Updates all counters and returns the histogram of the calls' seconds."""
        took, self._took = self._took, []
        if took:
            self.sent += len(took)
            self.handled[Code.OK] += len(took)
            self._seconds.add_all(took)
        if self.labels[0] == _UNARY:
            self.received = self.started
        return self._seconds

    # --- unary methods

    def begin(self) -> float:
        self.started += 1
        return time.perf_counter()

    def answered(self, begun_s: float) -> None:
        took = self._took
        took.append(time.perf_counter() - begun_s)
        if len(took) >= TIMES_MAX:
            self.sum_up()

    def failed(self, call: Call, error: BaseException, begun_s: float) -> None:
        self.ended(code_of(call, error), time.perf_counter() - begun_s)

    # --- all methods

    def ended(self, code: int, seconds: float) -> None:
        self.handled[code] += 1
        self._seconds.add(seconds)


Routes: TypeAlias = Mapping[str, Method]


def routes(*methods: Method) -> dict[str, Method]:
    """Returns the methods by path. Raises ValueError if two methods have the same path."""
    table: dict[str, Method] = {}
    for method in methods:
        if method.path in table:
            raise ValueError(f"{method.path} is registered twice")
        table[method.path] = method
    return table


REQUEST_ID_KEY: Final = "x-request-id"
STATUS_KEY: Final = "ts-response-status"
REQUEST_ID_CHARACTERS_MAX: Final = 128

#: Headers of the transport, not of the request or the answer.
_TRANSPORT: Final = frozenset(
    {"te", "content-type", "user-agent", "accept-encoding", "content-length", "host", "connection"}
)
#: The same as bytes, with gRPC's own headers, which aren't metadata.
_TRANSPORT_NAMES: Final = frozenset(
    name.encode() for name in (*_TRANSPORT, "grpc-timeout", "grpc-encoding", "grpc-accept-encoding")
)
_REQUEST_ID: Final = re.compile(rf"[\x21-\x7e]{{1,{REQUEST_ID_CHARACTERS_MAX}}}")


def request_headers(metadata: Metadata) -> tuple[Pairs, str | None]:
    """The headers for a handler from a client's metadata (texts, no transport headers), and its request id."""
    headers: list[tuple[str, str]] = []
    request_id = None
    for key, value in metadata:
        if key in _TRANSPORT or not isinstance(value, str) or key.startswith(("grpc-", ":")):
            continue
        headers.append((key, value))
        if key == REQUEST_ID_KEY and _REQUEST_ID.fullmatch(value):
            request_id = value
    return headers, request_id


def identified(call: Call, ids: RequestIds) -> tuple[Pairs, str]:
    """Returns the headers of `request_headers` and the request's id: the client's, which is sent back, or a new one.
    The first request's id becomes the call's."""
    if call.without_metadata:  # the usual call
        request_id = ids.next()
        call.request_id = call.request_id or request_id
        return (), request_id
    headers, own = request_headers(call.metadata)
    if headers and (ASK, "1") in headers:
        call.time_jobs(told=True)
    request_id = own or ids.next()
    if not call.request_id:
        call.request_id = request_id
        if own is not None:
            call.initial.append((REQUEST_ID_KEY, own))
    return headers, request_id


def response_metadata(status: int, headers: Pairs) -> list[tuple[str, str | bytes]]:
    """A client's metadata from a handler's status and headers; those that are invalid as metadata are dropped."""
    found: list[tuple[str, str | bytes]] = [(STATUS_KEY, str(status))] if status != 200 else []
    for name, value in headers:
        key = name.lower()
        reserved = key in _TRANSPORT or key.startswith(("grpc-", "ts_stream_next")) or key.endswith("-bin")
        if not reserved and key != STATUS_KEY and METADATA_KEY.fullmatch(key) and METADATA_VALUE.fullmatch(value):
            found.append((key, value))
    return found


#: Larger messages are compressed in a thread: at about 200 MB/s, this size blocks the loop for 1 ms.
THREAD_BYTES_MIN: Final = 256 * 1024

UNEXPECTED: Final = "The server failed unexpectedly; its log says why"

_HEADERS: Final = (CONTENT_TYPE,)
#: The header blocks of a usual answer.
_BLOCK: Final = encode([(b":status", b"200"), CONTENT_TYPE])
_BLOCK_OK: Final = encode([STATUS_OK])
#: The headers that a streaming call still needs after its beginning.
_KEPT: Final = frozenset({b"grpc-encoding", b"grpc-timeout"})


class Exchange:
    """One call. `run` sends exactly one status, unless the client leaves."""

    __slots__ = ("_answer_encoding", "_call", "_limits", "_request", "_stream")

    def __init__(self, stream: Http2Stream, limits: ListenerLimits) -> None:
        head = stream.head
        self._call = Call(head.path, None, math.inf, None, stream.peer, (head.fields, head.by_name))
        self._request: Mapping[bytes, bytes] = head.by_name
        self._stream = stream
        self._limits = limits
        self._answer_encoding: str | None = None

    def run(self, method: Method | None) -> Coroutine[Any, Any, None]:
        """Runs `method` (None: unknown path) within the client's deadline."""
        if b"grpc-timeout" not in self._request and method is not None and self._is_usual(method):
            return self._perform_usual(method)
        return self._run(method)

    async def _run(self, method: Method | None) -> None:
        try:
            if b"grpc-timeout" in self._request:
                await self._run_in_time(method)
            else:
                await self._perform(method)
        except ClientGone:
            raise
        except Exception as error:
            await self._fail(error)

    async def _fail(self, error: Exception) -> None:
        if isinstance(error, ServeError):
            self._call.trailing.extend(status_details(error, self._call.request_id))
            await self._finish(error.code, error.told())
        else:
            log.error("%s failed", self._call.path, exc_info=error)
            await self._finish(Code.INTERNAL, UNEXPECTED)

    async def refuse_draining(self) -> None:
        await self._finish(Draining.code, "The server shut down before the call was answered")

    async def _run_in_time(self, method: Method | None) -> None:
        seconds = timeout_s(self._request[b"grpc-timeout"])
        self._call.deadline_s = time.monotonic() + seconds
        expiry = Expiry(current_task())
        timer = asyncio.get_running_loop().call_later(answering_s(seconds), expiry.expire)
        try:
            if method is not None and self._is_usual(method):
                await self._perform_usual(method)
            else:
                await self._perform(method)
        except asyncio.CancelledError:
            if not expiry.passed:
                raise
            uncancel()
            await self._finish(Code.DEADLINE_EXCEEDED, f"The deadline of {seconds:g} s passed before the call ended")
        finally:
            timer.cancel()
            expiry.task = None

    def _is_usual(self, method: Method) -> bool:
        """Whether `_perform_usual` can perform the call: a unary method and uncompressed messages."""
        request = self._request
        return method.shape is Shape.UNARY and b"grpc-encoding" not in request and request.get(b"te") == b"trailers"

    async def _perform_usual(self, method: Method) -> None:
        """The fast path of `_run` and `_perform` in one coroutine, for a request that has arrived and a small answer
        without metadata; it hands other calls on. With a deadline it runs within `_run`, which ends failed calls."""
        call, limits, stream = self._call, self._limits, self._stream
        try:
            message = self._large_message() if stream.pieces_bytes > JOIN_BYTES_MAX else None
            if message is None:
                body = stream.body() if stream.ended else b""
                message = self._whole_message(body)
                if message is None:
                    message = await self._incoming().only(body)
                del body
            unary: Unary = method.run  # type: ignore[assignment]  # a method of this shape
            answer = await unary(call, message)
            if isinstance(answer, tuple):
                await self._answer(answer)
                return
            size = len(answer)
            if size > JOIN_BYTES_MAX or size > limits.response_bytes_max or not call.adds_nothing:
                await self._answer(answer)
            else:
                stream.status = 200
                stream.answer(_BLOCK, PREFIX.pack(0, size) + answer, _BLOCK_OK)
        except ClientGone:
            raise
        except Exception as error:
            if b"grpc-timeout" in self._request:
                raise
            await self._fail(error)

    def _large_message(self) -> bytes | None:
        """Takes the message if the body is one, and has arrived, in one copy; else None."""
        size = self._stream.pieces_bytes - PREFIX_BYTES
        return self._stream.body_behind(PREFIX.pack(0, size)) if size <= self._limits.request_bytes_max else None

    def _whole_message(self, body: bytes) -> bytes | None:
        """Returns the message if the body is exactly one uncompressed message, else None."""
        size = len(body) - PREFIX_BYTES
        if 0 <= size <= self._limits.request_bytes_max and PREFIX.unpack_from(body) == (0, size):
            return body[PREFIX_BYTES:]
        return None

    async def _perform(self, method: Method | None) -> None:
        if method is None:
            raise Unimplemented(f"Method {self._call.path} is unimplemented")
        if b"grpc-encoding" in self._request or self._request.get(b"te") != b"trailers":
            self._check_headers()
        run = method.run
        if method.shape is Shape.UNARY:
            unary: Unary = run  # type: ignore[assignment]  # the shape says which of the three it is
            await self._answer(await unary(self._call, await self._incoming().only()))
        else:
            await self._perform_stream(method)

    async def _perform_stream(self, method: Method) -> None:
        """Performs a streaming call: it counts until its end, and the headers are left only to the call."""
        call = self._call
        call.stream = stream = self._limits.streams.open(call.head_bytes)
        self._stream.forget_head()
        self._request = {name: value for name, value in self._request.items() if name in _KEPT}
        try:
            if method.shape is Shape.SERVER_STREAM:
                server_stream: ServerStream = method.run  # type: ignore[assignment]
                await self._answer_stream(server_stream(call, await self._incoming().only()))
            else:
                bidi: Bidi = method.run  # type: ignore[assignment]
                await self._answer_stream(bidi(call, self._incoming().all()))
        finally:
            stream.end()

    def _check_headers(self) -> None:
        if self._request.get(b"te") != b"trailers":
            raise MalformedHeader("The header 'te: trailers' is missing: a proxy may drop the status")
        encoding = self._encoding()
        protocol.check_encoding(encoding)
        accepted = self._request.get(b"grpc-accept-encoding", b"").decode("latin-1")
        self._answer_encoding = protocol.answer_encoding(encoding, accepted)

    def _encoding(self) -> str | None:
        value = self._request.get(b"grpc-encoding")
        return None if value is None else value.decode("latin-1")

    def _incoming(self) -> Incoming:
        return Incoming(self._call, self._stream, self._limits, self._encoding())

    # Messages out

    async def _answer(self, message: Answer) -> None:
        if isinstance(message, bytes):
            await self._write((message,))
        elif self._answer_encoding is not None:
            await self._write((b"".join(message),))
        else:
            await self._write_parts(*message)
        self._stream.finish(self._trailers(Code.OK, ""))
        if self._stream.queued:
            await drained(self._stream)

    async def _answer_stream(self, answers: AsyncIterator[Sequence[bytes]]) -> None:
        await each(answers, self._write)
        await self._finish(Code.OK, "")

    async def _write(self, messages: Sequence[bytes]) -> None:
        """Sends messages; waits while the client doesn't read (back-pressure)."""
        if not messages:
            return
        limit, stream = self._limits.response_bytes_max, self._stream
        if max(map(len, messages)) > limit:
            index = next(index for index, message in enumerate(messages) if len(message) > limit)
            await self._write(messages[:index])  # those before it are still sent
            raise protocol.too_large(len(messages[index]), limit, key="max_response_size", what="Answer")
        if not stream.begun:
            self._start()
        if len(messages) == 1 and len(messages[0]) > JOIN_BYTES_MAX and self._answer_encoding is None:
            await self._write_parts(b"", messages[0])
            return
        stream.write(await self._encoded(messages))
        if stream.queued:
            await drained(stream)

    async def _write_parts(self, head: bytes, data: Buffer) -> None:
        limit, stream, size = self._limits.response_bytes_max, self._stream, len(head) + len(data)
        if size > limit:
            raise protocol.too_large(size, limit, key="max_response_size", what="Answer")
        if not stream.begun:
            self._start()
        stream.write(PREFIX.pack(0, size) + head)
        stream.write(data)
        if stream.queued:
            await drained(stream)

    async def _encoded(self, messages: Sequence[bytes]) -> bytes:
        if self._answer_encoding is None or sum(map(len, messages)) < THREAD_BYTES_MIN:
            return protocol.encode(messages, self._answer_encoding)
        return await asyncio.to_thread(protocol.encode, messages, self._answer_encoding)

    def _start(self) -> None:
        headers: Sequence[Header] = _HEADERS
        if self._call.initial:
            headers = (*headers, *encode_metadata(self._call.initial))
        if self._answer_encoding is not None:
            headers = (*headers, (b"grpc-encoding", self._answer_encoding.encode()))
        self._stream.begin(200, headers)

    async def _finish(self, code: Code, message: str) -> None:
        stream = self._stream
        if stream.given:
            return
        trailers = self._trailers(code, message)
        if not stream.begun and not self._call.initial:
            stream.respond(200, (CONTENT_TYPE, ACCEPT_ENCODING, *trailers))
            return
        if not stream.begun:
            self._start()
        stream.finish(trailers)

    def _trailers(self, code: Code, message: str) -> list[Header]:
        return [*status_headers(code, message), *encode_metadata(self._call.last_metadata())]
