"""The interface between connections and gRPC services: calls, methods and metadata.

A `Method` is registered under its path; services take message bytes and give message bytes. A status other than OK is
a raised `ServeError`. A client that cancels, or a deadline that passes, cancels the task that runs the method
(asyncio.CancelledError)."""

from __future__ import annotations

import asyncio
import itertools
import math
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from ts.protocol.frames import Buffer, Pairs
from ts_frontend.errors import ClientGone, Code, ServeError
from ts_frontend.grpc.protocol import METADATA_KEY, METADATA_VALUE, Header, ReceivedMetadata
from ts_frontend.telemetry.metrics.families import TIMES_MAX, Histogram
from ts_frontend.telemetry.timing import ANSWER, ASK, RequestTimes, asking
from ts_frontend.transport.arriving import head_bytes
from ts_frontend.transport.open_streams import OpenStream
from ts_frontend.transport.stream import Peer

Metadata: TypeAlias = "Sequence[tuple[str, str | bytes]]"
Entries: TypeAlias = "list[tuple[str, str | bytes]]"
#: The headers of a request, and their last values by name.
ReceivedHeaders: TypeAlias = "tuple[Sequence[Header], Mapping[bytes, bytes]]"
_NO_HEADERS: Final[ReceivedHeaders] = ((), {})


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
        """HOST:PORT of the client, "unix" for a client of a Unix socket."""
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

    @initial.setter
    def initial(self, entries: Entries) -> None:
        self._initial = entries
        self.adds_nothing = False

    @property
    def trailing(self) -> Entries:
        """The trailing metadata; append to it before the method ends."""
        if self._trailing is None:
            self._trailing = []
            self.adds_nothing = False
        return self._trailing

    @trailing.setter
    def trailing(self, entries: Entries) -> None:
        self._trailing = entries
        self.adds_nothing = False

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


class RequestIds:
    """Ids in the form of a UUID, unique across processes: a random prefix and a counter.

    0.3 us each, where `uuid.uuid4` takes 3 us.
    """

    def __init__(self) -> None:
        self._beginning = str(uuid.uuid4())[:24]
        self._count = itertools.count().__next__

    def next(self) -> str:
        # Compiled, a formatted string takes three times as long.
        return self._beginning + self._count().to_bytes(6, "big").hex()


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
