"""HTTP/2 without sockets: whole conversations with another implementation as the client, and each error of RFC 9113."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    PingAckReceived,
    ResponseReceived,
    SettingsAcknowledged,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.settings import SettingCodes
from hypothesis import given, settings
from hypothesis import strategies as st

from support import Clock
from ts_frontend.transport import http2
from ts_frontend.transport.hpack import Field, encode
from ts_frontend.transport.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_HEAD_BYTES,
    GOAWAY,
    HAS_PRIORITY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Http2,
    Http2Limits,
    Http2Stream,
    frame,
)
from ts_frontend.transport.stream import Peer, Stream

PEER = Peer(("127.0.0.1", 1), ("127.0.0.1", 2), "2")
HEAD: list[Field] = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/x"), (b":authority", b"a")]
LIMITS = Http2Limits()


class Served:
    """What happens on a connection."""

    def __init__(self) -> None:
        self.streams: list[Http2Stream] = []
        self.lost: list[Stream] = []
        self.floods: list[str] = []

    def opened(self, stream: Stream) -> None:
        assert isinstance(stream, Http2Stream)
        self.streams.append(stream)

    def left(self, stream: Stream) -> None:
        self.lost.append(stream)

    def flooded(self, text: str) -> None:
        self.floods.append(text)

    def wrote(self) -> None:
        pass


# --- conversations


@dataclass
class Call:
    """A request and its answer as the two ends see them."""

    number: int
    fields: list[Field]
    sent: bytearray = field(default_factory=bytearray)
    trailers_sent: bool = False
    ended: bool = False
    stream: Http2Stream | None = None
    read: bytearray = field(default_factory=bytearray)
    status: int = 0
    answer: bytearray = field(default_factory=bytearray)
    trailers: list[Field] = field(default_factory=list)
    finished: bool = False
    #: The server read all of the request.
    whole: bool = False
    aborted: bool = False
    #: At the client.
    got_status: int = 0
    got: bytearray = field(default_factory=bytearray)
    got_trailers: list[Field] = field(default_factory=list)
    got_end: bool = False
    reset: int = -1
    left: bool = False


class Conversation:
    """A client that does what chance says, and a server that does, too. Neither sends what the other doesn't allow."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.calls = chance, dict[int, Call]()
        self.client = H2Connection(H2Configuration(client_side=True, header_encoding=False))
        first: dict[SettingCodes | int, int] = {
            SettingCodes.INITIAL_WINDOW_SIZE: chance.choice((0, 1, 100, 65_535, 1 << 20)),
            SettingCodes.MAX_FRAME_SIZE: chance.choice((16_384, 20_000, 1 << 20)),
            SettingCodes.HEADER_TABLE_SIZE: chance.choice((0, 100, 4096, 10_000)),
        }
        self.events = Served()
        self.http = Http2(self.events, PEER, LIMITS)
        self.client.initiate_connection()
        self.on_way = bytearray()
        self.unacknowledged = 0
        self.owed: list[tuple[int, int]] = []
        self.pings = 0
        self.steps: list[Callable[[], None]] = [
            *(self.open, self.open, self.send, self.send, self.send, self.end, self.end, self.leave, self.ping),
            *(self.change_settings, self.take, self.take, self.deliver, self.deliver, self.return_answers),
            *(self.read, self.answer_whole, self.begin, self.write, self.write, self.finish, self.finish, self.abort),
            *(self.block, self.unblock),
        ]
        self.collect()
        self.deliver_all()
        self.return_answers()
        self.update(first)

    def run(self, count: int) -> None:
        for _ in range(count):
            self.chance.choice(self.steps)()
        self.settle()
        self.check()

    # The client

    def some_call(self, fits: Callable[[Call], bool]) -> Call | None:
        fitting = [call for call in self.calls.values() if fits(call)]
        return self.chance.choice(fitting) if fitting else None

    def open(self) -> None:
        number = self.client.get_next_available_stream_id()
        fields = [
            *HEAD,
            *[(b"x-%d" % one, self.chance.randbytes(4).hex().encode()) for one in range(self.chance.choice((0, 1, 5)))],
        ]
        if self.chance.random() < 0.1:
            fields.append((b"large", b"x" * self.chance.choice((3000, 17_000, 40_000))))
        self.calls[number] = call = Call(number, fields)
        call.ended = self.chance.random() < 0.3
        self.client.send_headers(number, fields, end_stream=call.ended)
        self.collect()

    def sendable(self, call: Call) -> bool:
        return not call.ended and not call.left and call.reset < 0

    def send(self) -> None:
        call = self.some_call(self.sendable)
        if call is None:
            return
        padding = self.chance.choice((None, None, None, 0, 1, 255))
        room = min(self.client.local_flow_control_window(call.number), self.client.max_outbound_frame_size)
        room -= 0 if padding is None else padding + 1
        if room < 0:
            return
        data = self.chance.randbytes(min(room, self.chance.choice((0, 1, 10, 2000, 16_384))))
        call.sent += data
        call.ended = self.chance.random() < 0.2
        self.client.send_data(call.number, data, end_stream=call.ended, pad_length=padding)
        self.collect()

    def end(self) -> None:
        call = self.some_call(self.sendable)
        if call is not None:
            call.ended = True
            if self.chance.random() < 0.3:
                self.client.send_headers(call.number, [(b"trailer", b"x")], end_stream=True)
            else:
                self.client.end_stream(call.number)
            self.collect()

    def leave(self) -> None:
        call = self.some_call(lambda one: not one.left and one.reset < 0 and not one.got_end)
        if call is not None and self.chance.random() < 0.3:
            call.left = True
            self.client.reset_stream(call.number, ErrorCodes.CANCEL)
            self.collect()

    def ping(self) -> None:
        self.pings += 1
        self.client.ping(b"01234567")
        self.collect()

    def change_settings(self) -> None:
        if self.chance.random() < 0.5:
            key, values = self.chance.choice(
                (
                    (SettingCodes.INITIAL_WINDOW_SIZE, (0, 10, 3000, 100_000)),
                    (SettingCodes.MAX_FRAME_SIZE, (16_384, 50_000)),
                    (SettingCodes.HEADER_TABLE_SIZE, (0, 200, 4096)),
                )
            )
            self.update({key: self.chance.choice(values)})

    def update(self, changes: dict[SettingCodes | int, int]) -> None:
        """One change at a time: this client takes an answer to one of two for an answer to both."""
        if not self.unacknowledged:
            self.unacknowledged = 1
            self.client.update_settings(changes)
            self.collect()

    def take(self) -> None:
        """The client's reader has read: the window grows."""
        if self.owed:
            number, size = self.owed.pop(self.chance.randrange(len(self.owed)))
            self.client.acknowledge_received_data(size, number)
            self.collect()

    def collect(self) -> None:
        """Bytes of the client are on their way; header blocks are cut into frames, and frames that say nothing come
        between others."""
        data = self.client.data_to_send()
        if data.startswith(PREFACE):
            data = data.removeprefix(PREFACE)
            self.on_way += PREFACE
        for whole in frames_of(data):
            kind, flags, number = whole[3], whole[4], int.from_bytes(whole[5:9], "big")
            if kind == HEADERS and flags & END_HEADERS and self.chance.random() < 0.5:
                whole = cut_block(self.chance, number, flags, whole[FRAME_HEAD_BYTES:])
            self.on_way += whole
            if flags & END_HEADERS or kind == DATA:
                kind = self.chance.choice((0, 0, 0, 0, 0x42, PRIORITY))
                if kind:
                    self.on_way += frame(kind, 0, number, bytes(5))

    def deliver(self) -> None:
        """The server gets a piece of what is on its way."""
        size = min(len(self.on_way), self.chance.choice((1, 2, 9, 10, 100, 5000, 1 << 20)))
        piece = bytes(self.on_way[:size])
        del self.on_way[:size]
        self.http.receive(piece)
        for stream in self.events.streams:
            self.calls[stream.number].stream = stream

    def deliver_all(self) -> None:
        while self.on_way:
            self.deliver()

    # The server

    def served(self, fits: Callable[[Call], bool] = lambda call: True) -> Call | None:
        return self.some_call(
            lambda call: call.stream is not None and not call.finished and not call.aborted and fits(call)
        )

    def read(self) -> None:
        call = self.served()
        if call is not None and call.stream is not None:
            call.read += call.stream.body()

    def some_answer(self) -> bytes:
        return self.chance.randbytes(self.chance.choice((0, 1, 100, 16_384, 16_385, 70_000)))

    def answer_whole(self) -> None:
        call = self.served(lambda one: not one.status)
        if call is None or call.stream is None or self.chance.random() < 0.5:
            return
        gone = call.stream.done
        body = self.some_answer()
        if self.chance.random() < 0.5:
            call.stream.respond(201, [(b"content-length", b"%d" % len(body))], body)
        else:
            call.trailers = self.some_trailers() or [(b"grpc-status", b"0")]
            call.stream.answer(encode([(b":status", b"201")]), body, encode(call.trailers))
        if not gone:
            call.status, call.finished = 201, True
            call.answer += body

    def some_trailers(self) -> list[Field]:
        size = self.chance.choice((0, 0, 5, 5, 16_384, 40_000))
        return [(b"trailing", b"y" * size)] if size else []

    def begin(self) -> None:
        call = self.served(lambda one: not one.status)
        if call is not None and call.stream is not None:
            call.status = 202
            call.stream.begin(202, [(b"x-large", b"z" * self.chance.choice((1, 20_000)))])

    def write(self) -> None:
        call = self.served(lambda one: one.status == 202)
        if call is not None and call.stream is not None:
            body = self.some_answer()
            if not call.stream.done:
                call.answer += body
            call.stream.write(self.chance.choice((bytes, bytearray, memoryview))(body))

    def finish(self) -> None:
        call = self.served(lambda one: one.status == 202)
        if call is not None and call.stream is not None:
            call.trailers, call.finished = self.some_trailers(), True
            call.stream.finish(call.trailers)

    def abort(self) -> None:
        call = self.served()
        if call is not None and call.stream is not None and self.chance.random() < 0.1:
            call.aborted = not call.stream.done
            call.stream.abort()

    def block(self) -> None:
        self.http.blocked = True

    def unblock(self) -> None:
        self.http.blocked = False

    def return_answers(self) -> None:
        """The client gets what the server has for it, as far as the socket takes it."""
        if self.http.queued and not self.http.blocked:
            self.http.pump()
        data = b"".join(self.http.out)
        self.http.out = []
        # Frame by frame: within one call, this client doesn't heed its own new settings.
        for event in [event for one in frames_of(data) for event in self.received(one)]:
            assert not isinstance(event, ConnectionTerminated), event
            if isinstance(event, PingAckReceived):
                self.pings -= 1
            if isinstance(event, SettingsAcknowledged):
                self.unacknowledged = 0
            number = getattr(event, "stream_id", 0)
            call = self.calls.get(number)
            if call is None:
                continue
            if isinstance(event, ResponseReceived):
                call.got_status = int(dict(event.headers)[b":status"])
            elif isinstance(event, DataReceived):
                call.got += event.data
                self.owed.append((number, event.flow_controlled_length))
            elif isinstance(event, TrailersReceived):
                call.got_trailers = list(event.headers)
            elif isinstance(event, StreamEnded):
                call.got_end = True
            elif isinstance(event, StreamReset) and not call.left:
                call.reset = int(event.error_code)
        self.collect()

    def received(self, one: bytes) -> list[Event]:
        """A frame for the client. It takes none for a window below 0, not even an empty one that ends the stream, which
        is allowed (6.9.1)."""
        call = self.calls.get(int.from_bytes(one[5:9], "big"))
        if one[3] == DATA and call is not None and not call.left and len(one) == FRAME_HEAD_BYTES:
            room = self.client.remote_flow_control_window(call.number)
            if room < 0:
                self.client.increment_flow_control_window(-room, call.number)
        return self.client.receive_data(one)

    # The end

    def settle(self) -> None:
        """Everything that was begun is brought to its end."""
        self.unblock()
        for turn in range(1000):
            self.deliver_all()
            for call in self.calls.values():
                if call.stream is not None and not call.finished and not call.aborted:
                    call.read += call.stream.body()
                    if call.status == 202:
                        call.finished = True
                        call.stream.finish()
                    elif call.stream.ended:
                        call.whole = True
                        call.status, call.finished = 200, True
                        call.stream.respond(200, [])
                elif call.stream is not None and not call.stream.done and not call.stream.ended:
                    call.read += call.stream.body()
            while self.owed:
                self.take()
            self.end()
            if turn % 50 == 49:  # the client has windows that are too small for it to widen them by itself
                self.client.increment_flow_control_window(1 << 20)
                for call in self.calls.values():
                    if not call.got_end and not call.left and call.reset < 0:
                        self.client.increment_flow_control_window(1 << 20, call.number)
                self.collect()
            self.return_answers()
            if not (self.on_way or self.http.out or self.owed or self.http.streams):
                break
        else:
            raise AssertionError(f"the conversation doesn't end: {self.http.streams}")

    def check(self) -> None:
        http = self.http
        assert not http.ended and http.queued == 0 and http.streams == {} and http._ready == {}
        assert self.pings == 0
        assert http._received == http._untold  # nothing of the connection's window is lost
        for call in self.calls.values():
            stream = call.stream
            assert stream is not None and stream.done and stream.queued == 0
            assert list(stream.head.fields) == [*call.fields[4:], (b"host", b"a")]
            if call.left:
                continue
            if call.aborted:
                assert call.reset == ErrorCodes.INTERNAL_ERROR
                continue
            assert call.got_end and call.got_status == call.status
            assert call.got == call.answer and call.got_trailers == call.trailers
            assert call.reset in (-1, ErrorCodes.NO_ERROR)
            assert stream.ended or call.ended or call.reset >= 0
            assert call.read == call.sent if call.whole else call.sent.startswith(call.read)


def frames_of(data: bytes) -> list[bytes]:
    frames, at = [], 0
    while at < len(data):
        end = at + FRAME_HEAD_BYTES + int.from_bytes(data[at : at + 3], "big")
        frames.append(data[at:end])
        at = end
    assert at == len(data)
    return frames


def cut_block(chance: random.Random, number: int, flags: int, block: bytes) -> bytes:
    """HEADERS, perhaps with padding and a priority, and CONTINUATION."""
    cuts = sorted(chance.randrange(len(block) + 1) for _ in range(chance.choice((1, 2, 5))))
    parts = [block[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(block)], strict=True)]
    first = parts[0]
    if chance.random() < 0.5:
        first, flags = bytes(5) + first, flags | HAS_PRIORITY
    if chance.random() < 0.5:
        first, flags = b"\7" + first + bytes(7), flags | PADDED
    frames = [frame(HEADERS, flags & ~END_HEADERS, number, first)]
    frames += [frame(CONTINUATION, 0, number, part) for part in parts[1:-1]]
    return b"".join([*frames, frame(CONTINUATION, END_HEADERS, number, parts[-1])])


@contextmanager
def small_windows() -> Iterator[None]:
    """Windows that a test can fill."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http2, "STREAM_WINDOW_BYTES", 20_000)
        patch.setattr(http2, "CONNECTION_WINDOW_BYTES", 70_000)
        patch.setattr(http2, "FRAME_BYTES_MAX", 17_000)
        patch.setattr(http2, "TURN_BYTES", 20_000)
        yield


@settings(max_examples=15)
@given(st.randoms(use_true_random=True), st.integers(0, 250), st.booleans())
def test_conversations(chance: random.Random, count: int, small: bool) -> None:
    if small:
        with small_windows():
            Conversation(chance).run(count)
    else:
        Conversation(chance).run(count)


# --- errors of the connection and of streams (RFC 9113, 5.4)

PROTOCOL, FLOW, CLOSED, SIZE, REFUSED, COMPRESSION, CALM = 1, 3, 5, 6, 7, 9, 11
BLOCK = encode(HEAD)
OPEN = END_HEADERS
WHOLE = END_HEADERS | END_STREAM


def headers(number: int, flags: int = WHOLE, fields: list[Field] = HEAD) -> bytes:
    return frame(HEADERS, flags, number, encode(fields))


def setting(key: int, value: int) -> bytes:
    return frame(SETTINGS, 0, 0, key.to_bytes(2, "big") + value.to_bytes(4, "big"))


def widened(number: int, size: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, number, size.to_bytes(4, "big"))


def reset(number: int) -> bytes:
    return frame(RST_STREAM, 0, number, b"\0\0\0\x08")


def served(limits: Http2Limits = LIMITS, clock: Clock | None = None) -> tuple[Http2, Served]:
    events = Served()
    http = Http2(events, PEER, limits, clock or Clock())
    http.receive(PREFACE + frame(SETTINGS, 0, 0))
    http.out.clear()
    return http, events


def sent(http: Http2) -> list[tuple[int, int, int, bytes]]:
    """Takes the frames that the server has sent: kind, flags, stream, payload."""
    data, http.out = b"".join(http.out), []
    return [(one[3], one[4], int.from_bytes(one[5:9], "big"), one[FRAME_HEAD_BYTES:]) for one in frames_of(data)]


def resets(http: Http2) -> list[tuple[int, int]]:
    return [(number, int.from_bytes(payload, "big")) for kind, _, number, payload in sent(http) if kind == RST_STREAM]


def goaway(http: Http2) -> tuple[int, int] | None:
    """The last stream and the code of a GOAWAY."""
    for kind, _, _, payload in sent(http):
        if kind == GOAWAY:
            return int.from_bytes(payload[:4], "big"), int.from_bytes(payload[4:8], "big")
    return None


CONNECTION_ERRORS = {
    "4.1 a frame over the limit": (headers(1, OPEN) + b"\x10\0\1" + frame(DATA, 0, 1)[3:], SIZE),
    "4.2 a control frame over the limit": (b"\7\0\0" + frame(PING, 0, 0)[3:], SIZE),
    "4.3 a block that can't be read": (frame(HEADERS, WHOLE, 1, b"\xbe"), COMPRESSION),
    "4.3 a block that can't be read of a closed stream": (headers(1) + frame(HEADERS, WHOLE, 1, b"\xbe"), COMPRESSION),
    "5.1 DATA of an idle stream": (frame(DATA, 0, 1, b"a"), PROTOCOL),
    "5.1 RST_STREAM of an idle stream": (reset(1), PROTOCOL),
    "5.1 WINDOW_UPDATE of an idle stream": (widened(1, 1), PROTOCOL),
    "5.1.1 an even number": (headers(2), PROTOCOL),
    "5.1.1 DATA of an even number": (headers(3) + frame(DATA, 0, 2), PROTOCOL),
    "5.1.1 RST_STREAM of an even number": (headers(3) + reset(2), PROTOCOL),
    "5.1.1 WINDOW_UPDATE of an even number": (headers(3) + widened(2, 1), PROTOCOL),
    "5.1.1 HEADERS of a number that was passed over": (headers(3, OPEN) + headers(1), CLOSED),
    "6.1 DATA without a stream": (frame(DATA, 0, 0, b"a"), PROTOCOL),
    "6.1 DATA with more padding than bytes": (headers(1, OPEN) + frame(DATA, PADDED, 1, b"\4abc"), PROTOCOL),
    "6.1 padded DATA without bytes": (headers(1, OPEN) + frame(DATA, PADDED, 1), PROTOCOL),
    "6.2 HEADERS without a stream": (headers(0), PROTOCOL),
    "6.2 HEADERS with more padding than bytes": (frame(HEADERS, WHOLE | PADDED, 1, b"\5" + b"\x82" * 4), PROTOCOL),
    "6.2 padded HEADERS without bytes": (frame(HEADERS, WHOLE | PADDED, 1), PROTOCOL),
    "6.2 HEADERS too short for a priority": (frame(HEADERS, WHOLE | HAS_PRIORITY, 1, b"abcd"), SIZE),
    "6.2 HEADERS interrupted by another stream": (frame(HEADERS, 0, 1, BLOCK) + headers(3), PROTOCOL),
    "6.2 HEADERS interrupted by DATA": (frame(HEADERS, 0, 1, BLOCK) + frame(DATA, 0, 1), PROTOCOL),
    "6.2 HEADERS interrupted by PING": (frame(HEADERS, 0, 1, BLOCK) + frame(PING, 0, 0, bytes(8)), PROTOCOL),
    "6.2 HEADERS interrupted by an unknown kind": (frame(HEADERS, 0, 1, BLOCK) + frame(77, 0, 1), PROTOCOL),
    "6.3 PRIORITY without a stream": (frame(PRIORITY, 0, 0, bytes(5)), PROTOCOL),
    "6.3 PRIORITY of four bytes": (frame(PRIORITY, 0, 1, bytes(4)), SIZE),
    "6.4 RST_STREAM without a stream": (reset(0), PROTOCOL),
    "6.4 RST_STREAM of three bytes": (headers(1) + frame(RST_STREAM, 0, 1, bytes(3)), SIZE),
    "6.5 SETTINGS with a stream": (frame(SETTINGS, 0, 1), PROTOCOL),
    "6.5 SETTINGS of five bytes": (frame(SETTINGS, 0, 0, bytes(5)), SIZE),
    "6.5 an acknowledgement with settings": (frame(SETTINGS, ACK, 0, bytes(6)), SIZE),
    "6.5.2 ENABLE_PUSH of 2": (setting(2, 2), PROTOCOL),
    "6.5.2 INITIAL_WINDOW_SIZE over the limit": (setting(4, 1 << 31), FLOW),
    "6.5.2 MAX_FRAME_SIZE under the limit": (setting(5, (1 << 14) - 1), PROTOCOL),
    "6.5.2 MAX_FRAME_SIZE over the limit": (setting(5, 1 << 24), PROTOCOL),
    "6.6 PUSH_PROMISE": (headers(1) + frame(PUSH_PROMISE, OPEN, 1, b"\0\0\0\2" + BLOCK), PROTOCOL),
    "6.7 PING with a stream": (frame(PING, 0, 1, bytes(8)), PROTOCOL),
    "6.7 PING of seven bytes": (frame(PING, 0, 0, bytes(7)), SIZE),
    "6.8 GOAWAY with a stream": (frame(GOAWAY, 0, 1, bytes(8)), PROTOCOL),
    "6.8 GOAWAY of seven bytes": (frame(GOAWAY, 0, 0, bytes(7)), SIZE),
    "6.9 WINDOW_UPDATE of three bytes": (frame(WINDOW_UPDATE, 0, 0, bytes(3)), SIZE),
    "6.9 WINDOW_UPDATE by nothing": (widened(0, 0), PROTOCOL),
    "6.9.1 a window of the connection over the limit": (widened(0, (1 << 31) - 1), FLOW),
    "6.9.2 a window over the limit by settings": (headers(1, OPEN) + widened(1, 1) + setting(4, (1 << 31) - 1), FLOW),
    "6.10 CONTINUATION of nothing": (frame(CONTINUATION, OPEN, 1, BLOCK), PROTOCOL),
    "6.10 CONTINUATION without a stream": (frame(HEADERS, 0, 1, BLOCK) + frame(CONTINUATION, OPEN, 0), PROTOCOL),
    "6.10 CONTINUATION of another stream": (frame(HEADERS, 0, 1, BLOCK) + frame(CONTINUATION, OPEN, 3), PROTOCOL),
    "6.10 CONTINUATION after the end": (headers(1) + frame(CONTINUATION, OPEN, 1, BLOCK), PROTOCOL),
}


@pytest.mark.parametrize("name", CONNECTION_ERRORS)
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_connection_errors(name: str, size: int) -> None:
    """However the bytes are cut: GOAWAY with the code, all streams are lost, and nothing more is read."""
    data, code = CONNECTION_ERRORS[name]
    http, events = served()
    for at in range(0, len(data), size):
        http.receive(data[at : at + size])
    http.receive(headers(99))
    numbers = [stream.number for stream in events.streams]
    assert goaway(http) == (max(numbers, default=http._last_number), code)
    assert http.ended and http.streams == {} and len(events.streams) == len(events.lost) == len(numbers)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", PREFACE + frame(PING, 0, 0, bytes(8)), PREFACE[:-1] + b"x"])
def test_a_connection_that_does_not_begin_as_one(data: bytes) -> None:
    http = Http2(Served(), PEER, LIMITS)
    http.receive(data)
    assert goaway(http) == (0, PROTOCOL) and http.ended


def fields(*changes: Field, without: bytes = b"") -> bytes:
    """A request with these fields, perhaps without one of the usual ones."""
    return headers(1, WHOLE, [*[one for one in HEAD if one[0] != without], *changes])


NUMBER = (b"content-length", b"3")
STREAM_ERRORS = {
    "5.1 DATA behind the end": (headers(1) + frame(DATA, 0, 1, b"a"), CLOSED),
    "5.1 HEADERS behind the end": (headers(1) + headers(1), CLOSED),
    "6.9 WINDOW_UPDATE by nothing": (headers(1) + widened(1, 0), PROTOCOL),
    "6.9.1 a window over the limit": (headers(1) + widened(1, (1 << 31) - 1), FLOW),
    "8.1 trailers that don't end the request": (headers(1, OPEN) + headers(1, OPEN, [(b"a", b"b")]), PROTOCOL),
    "8.1 trailers with a pseudo-header": (headers(1, OPEN) + headers(1), PROTOCOL),
    "8.1.1 more bytes than announced": (headers(1, OPEN, [*HEAD, NUMBER]) + frame(DATA, 0, 1, b"abcd"), PROTOCOL),
    "8.1.1 fewer bytes than announced": (headers(1, OPEN, [*HEAD, NUMBER]) + frame(DATA, 1, 1, b"ab"), PROTOCOL),
    "8.1.1 fewer bytes before trailers": (headers(1, OPEN, [*HEAD, NUMBER]) + headers(1, WHOLE, []), PROTOCOL),
    "8.1.1 none of the bytes": (fields(NUMBER), PROTOCOL),
    "8.1.1 two lengths": (fields((b"content-length", b"0"), (b"content-length", b"1")), PROTOCOL),
    "8.1.1 a length that is none": (fields((b"content-length", b"+0")), PROTOCOL),
    "8.1.1 an endless length": (fields((b"content-length", b"0" * 19)), PROTOCOL),
    "8.2.1 a name in upper case": (fields((b"Name", b"a")), PROTOCOL),
    "8.2.1 an empty name": (fields((b"", b"a")), PROTOCOL),
    "8.2.1 a name with a blank": (fields((b"a b", b"a")), PROTOCOL),
    "8.2.1 a name with a colon": (fields((b"a:b", b"a")), PROTOCOL),
    "8.2.1 a name with a byte over 127": (fields((b"a\xff", b"a")), PROTOCOL),
    "8.2.1 a value with NUL": (fields((b"a", b"b\0")), PROTOCOL),
    "8.2.1 a value with LF": (fields((b"a", b"b\nc: d")), PROTOCOL),
    "8.2.1 a value with CR": (fields((b"a", b"b\r")), PROTOCOL),
    "8.2.1 a value that begins with a blank": (fields((b"a", b" b")), PROTOCOL),
    "8.2.1 a value that ends with a tab": (fields((b"a", b"b\t")), PROTOCOL),
    "8.2.2 connection": (fields((b"connection", b"close")), PROTOCOL),
    "8.2.2 keep-alive": (fields((b"keep-alive", b"1")), PROTOCOL),
    "8.2.2 proxy-connection": (fields((b"proxy-connection", b"close")), PROTOCOL),
    "8.2.2 transfer-encoding": (fields((b"transfer-encoding", b"chunked")), PROTOCOL),
    "8.2.2 upgrade": (fields((b"upgrade", b"h2c")), PROTOCOL),
    "8.2.2 te but trailers": (fields((b"te", b"gzip")), PROTOCOL),
    "8.3 an unknown pseudo-header": (fields((b":unknown", b"a")), PROTOCOL),
    "8.3 a pseudo-header of answers": (fields((b":status", b"200")), PROTOCOL),
    "8.3 a pseudo-header behind others": (headers(1, WHOLE, [*HEAD[:3], (b"a", b"b"), HEAD[3]]), PROTOCOL),
    "8.3 a pseudo-header twice": (fields(HEAD[2]), PROTOCOL),
    "8.3.1 no method": (fields(without=b":method"), PROTOCOL),
    "8.3.1 no scheme": (fields(without=b":scheme"), PROTOCOL),
    "8.3.1 no path": (fields(without=b":path"), PROTOCOL),
    "8.3.1 an empty path": (fields((b":path", b""), without=b":path"), PROTOCOL),
    "8.3.1 another host": (fields((b"host", b"b")), PROTOCOL),
    "8.3.1 two hosts": (fields((b"host", b"a"), (b"host", b"a")), PROTOCOL),
    "8.5 CONNECT with a path": (headers(1, WHOLE, [(b":method", b"CONNECT"), *HEAD[1:]]), PROTOCOL),
    "8.5 CONNECT without a host": (headers(1, WHOLE, [(b":method", b"CONNECT")]), PROTOCOL),
}


@pytest.mark.parametrize("name", STREAM_ERRORS)
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_stream_errors(name: str, size: int) -> None:
    """However the bytes are cut: the stream is reset with the code, and the next one is served."""
    data, code = STREAM_ERRORS[name]
    http, events = served()
    for at in range(0, len(data), size):
        http.receive(data[at : at + size])
    assert resets(http) == [(1, code)]
    assert http.streams == {} and len(events.lost) == len(events.streams)
    http.receive(frame(DATA, 0, 1, b"late") + widened(1, 1) + reset(1) + headers(1) + headers(3))
    assert [stream.number for stream in events.streams][-1] == 3 and resets(http) == [] and not http.ended
    assert http._received == http._untold


ALLOWED = {
    "4.1 an unknown kind": frame(77, 0xFF, 1, b"abc" * 999),
    "5.5 an unknown setting": setting(99, 1),
    "5.1 PRIORITY of an idle stream": frame(PRIORITY, 0, 7, bytes(5)),
    "6.2 padding and a priority": frame(HEADERS, WHOLE | PADDED | HAS_PRIORITY, 1, b"\3" + bytes(5) + BLOCK + bytes(3)),
    "6.8 GOAWAY": frame(GOAWAY, 0, 0, bytes(8) + b"bye"),
    "6.10 empty CONTINUATION": frame(HEADERS, 1, 1, BLOCK) + frame(CONTINUATION, 0, 1) + frame(CONTINUATION, OPEN, 1),
    "8.2.2 te": fields((b"te", b"trailers")),
    "8.3.1 a path alone": headers(1, WHOLE, HEAD[:3]),
    "8.3.1 the same host twice": fields((b"host", b"A")),
    "8.5 CONNECT": headers(1, WHOLE, [(b":method", b"CONNECT"), (b":authority", b"a:1")]),
}


@pytest.mark.parametrize("name", ALLOWED)
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_what_is_allowed(name: str, size: int) -> None:
    http, events = served()
    data = ALLOWED[name] + headers(9)
    for at in range(0, len(data), size):
        http.receive(data[at : at + size])
        assert http.within_frame == (at + size < len(data) and http.within_frame)
    assert events.streams[-1].number == 9 and not http.ended and resets(http) == [] and not http.within_frame


def test_cookies_are_joined() -> None:
    http, events = served()
    http.receive(headers(1, WHOLE, [*HEAD, (b"cookie", b"a=b"), (b"x", b"y"), (b"cookie", b"c=d")]))
    assert events.streams[0].head.fields == ((b"x", b"y"), (b"host", b"a"), (b"cookie", b"a=b; c=d"))


# --- limits


def test_more_streams_than_allowed() -> None:
    http, events = served(Http2Limits(streams_max=2))
    http.receive(headers(1) + headers(3) + headers(5, OPEN) + frame(DATA, 1, 5, b"a"))
    assert resets(http) == [(5, REFUSED)] and [stream.number for stream in events.streams] == [1, 3]
    events.streams[0].respond(200, [])
    http.receive(headers(7))
    assert events.streams[-1].number == 7


@pytest.mark.parametrize("name", [b"x", b":path"])
def test_too_large_headers_are_refused_with_431(name: bytes) -> None:
    """The request is opened, so that it is answered; the next one doesn't suffer."""
    http, events = served(Http2Limits(fields_bytes_max=1000))
    large = [one for one in HEAD if one[0] != name] + [(name, b"y" * 1000)]
    http.receive(headers(1, WHOLE, large[-1:] + large[:-1] if name == b":path" else large) + headers(3))
    one, two = events.streams
    assert one.head.refusal is not None and one.head.refusal.status == 431 and two.head.refusal is None


@pytest.mark.parametrize("parts", [1000, 3])
def test_a_header_block_without_end(parts: int) -> None:
    """Many small frames, or few large ones."""
    http, _ = served(Http2Limits(fields_bytes_max=5000))
    http.receive(frame(HEADERS, 0, 1, BLOCK))
    for _ in range(parts):
        http.receive(frame(CONTINUATION, 0, 1, b"" if parts > 3 else bytes(10_000)))
    assert goaway(http) == (0, CALM) and http.ended


def test_resets_over_the_limit_end_the_connection_after_its_streams() -> None:
    clock = Clock()
    http, events = served(Http2Limits(resets_max=3, resets_per_s=1.0), clock)
    http.receive(headers(1))
    http.receive(b"".join(headers(number) + reset(number) for number in (3, 5, 7)))
    assert goaway(http) is None
    clock.now_s += 1.0
    http.receive(headers(9) + reset(9))
    assert goaway(http) is None and not events.floods
    http.receive(headers(11) + widened(11, 0))  # errors count, too
    assert goaway(http) == (11, CALM) and len(events.floods) == 1
    http.receive(headers(13) + reset(13) + frame(PING, 0, 0, bytes(8)))
    assert events.streams[-1].number == 11 and not http.ended
    http.out.clear()
    events.streams[0].respond(200, [], b"still answered")
    assert [payload for kind, _, _, payload in sent(http) if kind == DATA] == [b"still answered"] and http.ended


def test_pings_over_the_limit() -> None:
    clock = Clock()
    http, events = served(Http2Limits(ping_interval_s=5.0, idle_pings=False), clock)
    ping = frame(PING, 0, 0, b"12345678")
    http.receive(headers(1))
    for _ in range(10):
        http.receive(ping)
        assert sent(http) == [(PING, ACK, 0, b"12345678")]
        clock.now_s += 5.0
    for _ in range(3):
        http.receive(ping * 2)
        events.streams[0].begin(200, [])
        events.streams[0].write(b"data forgives")
    assert goaway(http) is None
    http.receive(ping * 3)
    assert goaway(http) == (1, CALM)


def test_changes_of_the_window_over_the_limit() -> None:
    """Each visits every stream, and costs the client 15 bytes."""
    clock = Clock()
    http, _ = served(clock=clock)
    http.receive(b"".join(setting(4, one) for one in range(1000)))  # there is no stream
    http.receive(headers(1) + b"".join(setting(4, one) for one in range(100)))
    assert goaway(http) is None
    clock.now_s += 1.0
    http.receive(b"".join(setting(4, one) for one in range(10)))
    assert goaway(http) is None
    http.receive(setting(4, 0) * 100)
    assert goaway(http) == (1, CALM)


def test_a_body_beyond_the_window() -> None:
    http, events = served()
    part = frame(DATA, 0, 1, bytes(1 << 20))
    http.receive(headers(1, OPEN) + part + part)
    assert goaway(http) is None and len(events.streams[0].body()) == 2 << 20
    assert (WINDOW_UPDATE, 0, 1, (2 << 20).to_bytes(4, "big")) in sent(http)
    http.receive(part + part + frame(DATA, 0, 1, b"a"))
    assert goaway(http) == (1, FLOW)


def test_bodies_beyond_the_window_of_the_connection() -> None:
    http, _ = served()
    part = frame(DATA, 0, 1, bytes(1 << 20))
    for number in range(1, 17, 2):
        http.receive(headers(number, OPEN) + (part[:5] + number.to_bytes(4, "big") + part[9:]) * 2)
    assert not http.ended
    http.receive(headers(17, OPEN) + frame(DATA, 0, 17, b"a"))
    assert goaway(http) == (17, FLOW)


@pytest.mark.parametrize("piece", [b"", b"a", frame(DATA, PADDED, 1, b"\xff" + bytes(255))[FRAME_HEAD_BYTES:]])
def test_many_small_frames_take_little_memory(piece: bytes) -> None:
    http, events = served()
    http.receive(headers(1, OPEN))
    data = frame(DATA, PADDED if len(piece) > 1 else 0, 1, piece)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(20_000):
        http.receive(data)
    assert not http.ended and tracemalloc.get_traced_memory()[0] - before < 200_000
    tracemalloc.stop()
    assert events.streams[0].pieces_bytes == (20_000 if piece == b"a" else 0)


# --- answers


def test_the_end_waits_for_the_streams() -> None:
    """First a warning, on which requests that are on their way are taken; then no more."""
    http, events = served()
    http.receive(headers(1))
    http.go_away(soon=True)
    assert goaway(http) == ((1 << 31) - 1, 0)
    http.receive(headers(3, OPEN))
    http.go_away()
    assert goaway(http) == (3, 0)
    http.receive(headers(5, OPEN) + frame(DATA, 1, 5, b"ignored") + frame(DATA, 1, 3, b"taken"))
    assert [stream.number for stream in events.streams] == [1, 3] and not http.ended
    for stream in events.streams:
        stream.respond(200, [])
    assert http.ended and http._received == http._untold
