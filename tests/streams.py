"""Requests to a real connection of the transport, without a socket: a client of h2 or h11 is at its other end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import h2.config
import h2.connection
import h2.events
import h11

from ts_frontend.transport.http1 import Http1, Http1Stream
from ts_frontend.transport.http2 import Http2, Http2Limits, Http2Stream
from ts_frontend.transport.limits import HEADER_BYTES_MAX
from ts_frontend.transport.stream import Fields, Head, Peer, Stream

T = TypeVar("T")
CLIENT = Peer(("127.0.0.1", 5), ("127.0.0.1", 8080), "2")


def asked(method: str = "POST", target: bytes = b"/", headers: Fields = (), reached: str = "127.0.0.1") -> Stream:
    """A request without a connection, of which only the head is read."""
    stream = Stream(Head(method, target, tuple(headers)), Peer(CLIENT.client, (reached, 8080), "2"))
    stream.ended = True
    return stream


def begin(stream: Stream, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Begins the work for a request, which ends if its client leaves."""
    stream.task = task = asyncio.create_task(work)
    return task


@dataclass(slots=True)
class Answer:
    """What a client has of an answer. `pieces`: the frames of data, or the chunks. `reset`: the code with which the
    stream was reset, None if it wasn't. `ended`: the answer has its regular end."""

    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    pieces: list[bytes] = field(default_factory=list)
    trailers: dict[bytes, bytes] = field(default_factory=dict)
    reset: int | None = None
    ended: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def grpc_status(self) -> int:
        return int({**self.headers, **self.trailers}[b"grpc-status"])


class Client:
    """The owner of a connection, as `transport.connection.Connection` without a socket."""

    http: Http2 | Http1

    def __init__(self) -> None:
        self._opened: list[Stream] = []

    def opened(self, stream: Stream) -> None:
        self._opened.append(stream)

    def left(self, stream: Stream) -> None:
        if isinstance(stream.task, asyncio.Task):
            stream.task.cancel()

    def flooded(self, text: str) -> None:
        raise AssertionError(text)

    def wrote(self) -> None:
        asyncio.get_running_loop().call_soon(self._exchange)

    def _exchange(self) -> None:
        """Passes on what both ends have for each other."""
        raise NotImplementedError

    def _sent(self) -> bytes:
        """Takes what the server has to send now."""
        self.http.pump()
        parts, self.http.out = self.http.out, []
        return b"".join(parts)


class Http2Client(Client):
    """A client of HTTP/2 that reads all that it is sent."""

    http: Http2

    def __init__(self) -> None:
        super().__init__()
        self.http = Http2(self, CLIENT, Http2Limits())
        config = h2.config.H2Configuration(
            header_encoding=None, validate_outbound_headers=False, normalize_outbound_headers=False
        )
        self._client = h2.connection.H2Connection(config)
        self._client.initiate_connection()
        self._answers: dict[int, Answer] = {}
        self._exchange()

    def request(
        self,
        method: str = "POST",
        target: str = "/",
        headers: Sequence[tuple[bytes, bytes]] = (),
        body: bytes = b"",
        *,
        ended: bool = True,
    ) -> Http2Stream:
        """Begins a request, whose body goes on unless it is `ended`."""
        number = self._client.get_next_available_stream_id()
        self._answers[number] = Answer()
        first = [(b":method", method.encode()), (b":scheme", b"http"), (b":path", target.encode())]
        self._client.send_headers(number, [*first, *headers], end_stream=ended and not body)
        if body:
            self._client.send_data(number, body, end_stream=ended)
        self._exchange()
        stream = self._opened.pop()
        assert isinstance(stream, Http2Stream) and stream.number == number
        return stream

    def piece(self, stream: Http2Stream, data: bytes, *, more: bool = True) -> None:
        self._client.send_data(stream.number, data, end_stream=not more)
        self._exchange()

    def reset(self, stream: Http2Stream) -> None:
        self._client.reset_stream(stream.number)
        self._exchange()

    def answer(self, stream: Http2Stream) -> Answer:
        """What has arrived of an answer."""
        self._exchange()
        return self._answers[stream.number]

    def _exchange(self) -> None:
        while True:
            data = self._client.data_to_send()
            if data:
                self.http.receive(data)
            sent = self._sent()
            if sent:
                for event in self._client.receive_data(sent):
                    self._take(event)
            if not data and not sent:
                return

    def _take(self, event: h2.events.Event) -> None:
        number = getattr(event, "stream_id", None)
        if number not in self._answers:
            return
        answer = self._answers[number]
        if isinstance(event, h2.events.ResponseReceived):
            answer.headers = dict(event.headers)
            answer.status = int(answer.headers.pop(b":status"))
        elif isinstance(event, h2.events.DataReceived):
            answer.pieces.append(event.data)
            self._client.acknowledge_received_data(event.flow_controlled_length, number)
        elif isinstance(event, h2.events.TrailersReceived):
            answer.trailers = dict(event.headers)
        elif isinstance(event, h2.events.StreamEnded):
            answer.ended = True
        elif isinstance(event, h2.events.StreamReset):
            answer.reset = event.error_code


class Http1Client(Client):
    """A client of HTTP/1.1 with one request."""

    http: Http1

    def __init__(self, body_bytes_max: int = 0) -> None:
        super().__init__()
        self.http = Http1(self, CLIENT, HEADER_BYTES_MAX, body_bytes_max)
        self._client = h11.Connection(h11.CLIENT)
        self._answer = Answer()

    def request(self, method: str = "GET", target: str = "/", headers: Fields = ()) -> Http1Stream:
        request = h11.Request(method=method, target=target, headers=[(b"host", b"localhost"), *headers])
        self.http.receive((self._client.send(request) or b"") + (self._client.send(h11.EndOfMessage()) or b""))
        stream = self._opened.pop()
        assert isinstance(stream, Http1Stream)
        return stream

    def answer(self) -> Answer:
        """What has arrived of the answer."""
        self._exchange()
        return self._answer

    def _exchange(self) -> None:
        if sent := self._sent():
            self._client.receive_data(sent)
        answer = self._answer
        while not answer.ended and isinstance(event := self._client.next_event(), h11.Event):
            if isinstance(event, h11.Response):
                answer.status, answer.headers = event.status_code, dict(event.headers)
            elif isinstance(event, h11.Data):
                if event.chunk_start or not answer.pieces:
                    answer.pieces.append(b"")
                answer.pieces[-1] += event.data
            elif isinstance(event, h11.EndOfMessage):
                answer.trailers, answer.ended = dict(event.headers), True
