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

from ts_frontend.transport import http2
from ts_frontend.transport.hpack import Decoder, Field, encode
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


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


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
        first = {
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
        for event in [event for one in frames_of(data) for event in self.client.receive_data(one)]:
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


@settings(max_examples=60)
@given(st.randoms(use_true_random=True), st.integers(0, 400), st.booleans())
def test_conversations(chance: random.Random, count: int, small: bool) -> None:
    if small:
        with small_windows():
            Conversation(chance).run(count)
    else:
        Conversation(chance).run(count)
