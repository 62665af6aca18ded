"""HTTP/2 for a server (RFC 9113): bytes in, streams out, and bytes back. No I/O.

In the RFC's order: the connection and its preface (3), frames (4), streams and flow control (5), the frames one by one
(6), error codes (7), messages (8). Server push, priorities and the upgrade from HTTP/1.1 don't exist here, as the RFC
allows."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from ts_frontend.transport.hpack import (
    NO_TABLE,
    TABLE_BYTES_MAX,
    BadBlock,
    Field,
    FieldsTooLarge,
    HeaderDecoder,
    encode,
)
from ts_frontend.transport.stream import NO_BODY, Data, Fields, Head, Peer, Refusal, Stream, without_length

# --- 3. Starting

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

# --- 4. and 6. Frames

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9
END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
HAS_PRIORITY: Final = 0x20
FRAME_HEAD_BYTES: Final = 9
#: SETTINGS_MAX_FRAME_SIZE: the largest frame that a client may send. The bytes of DATA aren't held until its end.
FRAME_BYTES_MAX: Final = 1 << 20
#: The same of a client that names none.
SMALL_FRAME_BYTES_MAX: Final = 1 << 14
SETTINGS_HEADER_TABLE_SIZE: Final = 1
SETTINGS_ENABLE_PUSH: Final = 2
SETTINGS_MAX_CONCURRENT_STREAMS: Final = 3
SETTINGS_INITIAL_WINDOW_SIZE: Final = 4
SETTINGS_MAX_FRAME_SIZE: Final = 5
SETTINGS_MAX_HEADER_LIST_SIZE: Final = 6
NUMBER_MAX: Final = (1 << 31) - 1

# --- 5.2 Flow control

WINDOW_MAX: Final = (1 << 31) - 1
FIRST_WINDOW_BYTES: Final = 65_535
#: What a client may send before the request's reader takes it: of a stream, and of all streams of a connection.
STREAM_WINDOW_BYTES: Final = 2 << 20
CONNECTION_WINDOW_BYTES: Final = 16 << 20
#: Bytes of answers that are made into frames before the socket is asked again whether it takes more.
TURN_BYTES: Final = 256 * 1024

# --- 7. Error codes

NO_ERROR: Final = 0
PROTOCOL_ERROR: Final = 1
INTERNAL_ERROR: Final = 2
FLOW_CONTROL_ERROR: Final = 3
STREAM_CLOSED: Final = 5
FRAME_SIZE_ERROR: Final = 6
REFUSED_STREAM: Final = 7
COMPRESSION_ERROR: Final = 9
ENHANCE_YOUR_CALM: Final = 11

#: Frames of one header block, and its size as a multiple of the limit for the fields: a block that is read to its end
#: costs its request alone, one that isn't the connection.
CONTINUATIONS_MAX: Final = 64
BLOCK_FACTOR: Final = 4
#: Changes of the initial window size while there are streams, each of which is changed.
WINDOW_CHANGES_MAX: Final = 100
WINDOW_CHANGES_PER_S: Final = 10.0
#: Pings more often than allowed, without data between them, that end a connection (gRPC's "ping strikes").
STRIKES_MAX: Final = 2

_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_VALUE: Final = re.compile(rb"[^\x00\r\n]*")
#: Headers of an HTTP/1.1 connection, which HTTP/2 doesn't have (8.2.2).
_CONNECTION_NAMES: Final = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
)
_PSEUDO: Final = frozenset((b":method", b":scheme", b":authority", b":path"))


@dataclass(frozen=True, slots=True)
class Http2Limits:
    """The limits of one connection. `streams_max`: requests at a time. `fields_bytes_max`: of a request's headers.
    `resets_max`: streams that a client may reset at once, of which `resets_per_s` come back each second.
    `ping_interval_s`: the shortest time between a client's pings without data (0: any); `idle_pings`: pings without a
    stream are allowed."""

    streams_max: int = 4096
    fields_bytes_max: int = 64 * 1024
    resets_max: int = 1000
    resets_per_s: float = 200.0
    ping_interval_s: float = 0.0
    idle_pings: bool = True


class Events(Protocol):
    """What happens on a connection."""

    def opened(self, stream: Stream) -> None:
        """A request's head has arrived."""

    def left(self, stream: Stream) -> None:
        """The client has given up an answer that isn't complete, or must."""

    def flooded(self, text: str) -> None:
        """The client resets too many streams: it may open no more on this connection."""

    def wrote(self) -> None:
        """There is something to send, or the last stream has ended."""


class Violation(Exception):
    """A connection error (5.4.1)."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class _Budget:
    """What a client may do so many times at once, of which so many come back each second."""

    __slots__ = ("_at_s", "_left", "_most", "_per_s")

    def __init__(self, most: float, per_s: float) -> None:
        self._left, self._most, self._per_s, self._at_s = most, most, per_s, 0.0

    def spend(self, now_s: float) -> bool:
        """Returns False if nothing is left."""
        self._left = min(self._left + (now_s - self._at_s) * self._per_s, self._most) - 1
        self._at_s = now_s
        return self._left >= 0


class Malformed(Exception):
    """A request that isn't one of HTTP: a stream error (8.1.1)."""


def frame_head(size: int, kind: int, flags: int, number: int) -> bytes:
    return (size << 48 | kind << 40 | flags << 32 | number).to_bytes(9, "big")


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    return frame_head(len(payload), kind, flags, number) + payload


def _settings(*pairs: tuple[int, int]) -> bytes:
    return b"".join([key.to_bytes(2, "big") + value.to_bytes(4, "big") for key, value in pairs])


class Http2Stream(Stream):
    """A stream of its connection. `number`: its identifier; `window`: what the client still takes; `queue`: the data
    beyond that, before the block of trailers `last` (None: the answer goes on)."""

    __slots__ = ("http", "last", "left_bytes", "no_body", "number", "queue", "untold", "window")

    def __init__(self, http: Http2, number: int, head: Head, window: int) -> None:
        super().__init__(head, http.peer)
        self.http, self.number, self.window = http, number, window
        self.queue: deque[Data] = deque()
        self.last: bytes | None = None
        #: Bytes of the body that have been taken, and that the client doesn't know of.
        self.untold = 0
        #: Bytes of the body that the client announced and hasn't sent; -1: it announced none.
        self.left_bytes = -1
        self.no_body = head.method == "HEAD"

    def took(self, size: int) -> None:
        self.http.took(self, size)

    def respond(self, status: int, fields: Fields, body: Data = b"") -> None:
        self.status = status
        no_body = self.no_body or status in NO_BODY
        self.http.respond(self, _answer_block(status, fields), b"" if no_body else body, b"")

    def answer(self, block: bytes, body: Data, trailers: bytes) -> None:
        """Gives a whole answer whose header blocks are encoded already."""
        self.http.respond(self, block, body, trailers)

    def begin(self, status: int, fields: Fields) -> None:
        self.status = status
        self.no_body = self.no_body or status in NO_BODY
        self.http.begin(self, _answer_block(status, fields))

    def write(self, data: Data) -> None:
        if not self.no_body:
            self.http.write(self, data)

    def finish(self, trailers: Fields = ()) -> None:
        self.http.finish(self, encode(trailers) if trailers else b"")

    def abort(self, *, overloaded: bool = False) -> None:
        self.http.reset(self, ENHANCE_YOUR_CALM if overloaded else INTERNAL_ERROR)


class Http2:
    """One connection. `receive` reads what the client sent; `out` is to be sent, and `pump` adds what flow control held
    back. `blocked`: the socket takes nothing now. `ended`: the connection is to be closed once `out` is sent.
    `queued`: the bytes of all answers that wait."""

    def __init__(
        self, events: Events, peer: Peer, limits: Http2Limits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.events, self.peer, self.limits, self.clock = events, peer, limits, clock
        self.streams: dict[int, Http2Stream] = {}
        self.blocked = self.ended = False
        self.queued = 0
        #: Our pings since we last sent data, and whether the answer to one is missing.
        self.pings, self.pinged = 0, False
        self._greeted = False
        self._rest = b""
        self._decoder = HeaderDecoder(limits.fields_bytes_max)
        self._last_number = 0
        #: Frames of closed streams up to this number may be on their way: these were reset here.
        self._reset_number = 0
        self._goaway_number = NUMBER_MAX
        self._block_bytes_max = BLOCK_FACTOR * limits.fields_bytes_max
        # The block that is being received: its stream, its flags, its parts.
        self._block_number = self._block_flags = self._block_bytes = 0
        self._block: list[bytes] = []
        # The DATA frame that is being received, and the bytes after its data, or of an unknown frame, to leave out.
        self._data_number = self._data_left = self._skip = 0
        self._data_ends = False
        self._window = FIRST_WINDOW_BYTES  # for our data
        self._first_window = FIRST_WINDOW_BYTES
        self._frame_bytes_max = SMALL_FRAME_BYTES_MAX
        self._untold = 0  # bytes that have been taken, and that the client doesn't know of
        self._received = 0  # bytes that count for the connection's window
        #: The table that the client has for our blocks, which don't use it. It must be told once that a smaller one is
        #: known here: by the beginning of the next block (4.3.1).
        self._table_bytes, self._table_shrinks = TABLE_BYTES_MAX, False
        self._known: tuple[tuple[Field, ...], Head, int] | None = None  # the fields of the last request, and their head
        self._ready: dict[int, Http2Stream] = {}  # streams whose queues may be sent, in turn
        self._resets = _Budget(limits.resets_max, limits.resets_per_s)
        self._window_changes = _Budget(WINDOW_CHANGES_MAX, WINDOW_CHANGES_PER_S)
        self._ping_s, self._strikes = -1.0, 0
        self._sent_s = 0.0  # when queued data was last sent
        mine = _settings(
            (SETTINGS_MAX_CONCURRENT_STREAMS, limits.streams_max),
            (SETTINGS_INITIAL_WINDOW_SIZE, STREAM_WINDOW_BYTES),
            (SETTINGS_MAX_FRAME_SIZE, FRAME_BYTES_MAX),
            (SETTINGS_MAX_HEADER_LIST_SIZE, limits.fields_bytes_max),
        )
        more = (CONNECTION_WINDOW_BYTES - FIRST_WINDOW_BYTES).to_bytes(4, "big")
        self.out: list[Data] = [frame(SETTINGS, 0, 0, mine) + frame(WINDOW_UPDATE, 0, 0, more)]

    # --- 4. Frames

    def receive(self, data: bytes) -> None:
        """Reads bytes of the client. A connection error ends the connection: the reason is the last frame in `out`."""
        if self.ended:
            return
        try:
            self._read(data)
        except Violation as error:
            self.close(error.code, str(error))

    def _read(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
            self._rest = b""
        at, size = 0, len(data)
        if not self._greeted:
            at = len(PREFACE)
            if data[:at] != PREFACE[:size]:
                raise Violation(PROTOCOL_ERROR, "The connection doesn't begin with the preface of HTTP/2")
            if size < at + FRAME_HEAD_BYTES:
                self._rest = data
                return
            if data[at + 3] != SETTINGS:
                raise Violation(PROTOCOL_ERROR, "The first frame isn't SETTINGS")
            self._greeted = True
        if self._data_left:
            at = self._read_data(data, at)
        while True:
            if self._skip:
                at += self._skip
                self._skip = 0
                if at > size:
                    self._skip = at - size
                    return
            if size - at < FRAME_HEAD_BYTES:
                break
            length = data[at] << 16 | data[at + 1] << 8 | data[at + 2]
            kind, flags = data[at + 3], data[at + 4]
            number = (data[at + 5] << 24 | data[at + 6] << 16 | data[at + 7] << 8 | data[at + 8]) & NUMBER_MAX
            begin = at + FRAME_HEAD_BYTES
            if self._block_number and (kind != CONTINUATION or number != self._block_number):
                raise Violation(PROTOCOL_ERROR, "A header block is interrupted by another frame")
            if length > FRAME_BYTES_MAX:
                raise Violation(FRAME_SIZE_ERROR, f"A frame of {length} bytes is too large")
            if kind == DATA:
                padding = 0
                if flags & PADDED:
                    if begin >= size and length:
                        break
                    if length == 0 or data[begin] >= length:
                        raise Violation(PROTOCOL_ERROR, "A frame has more padding than bytes")
                    padding = 1 + data[begin]
                    begin += 1
                self._begin_data(number, length, padding, bool(flags & END_STREAM))
                at = self._read_data(data, begin) if self._data_left else begin
                if padding > 1:
                    self._skip = padding - 1
                    if self._data_left:
                        return
                continue
            if kind > CONTINUATION:  # an unknown kind is ignored (4.1, 5.5)
                at, self._skip = begin, length
                continue
            if length > self._block_bytes_max:
                raise Violation(FRAME_SIZE_ERROR, f"A frame of {length} bytes is too large")
            end = begin + length
            if end > size:
                break
            at = end
            if kind == HEADERS:
                self._headers(number, flags, data, begin, end)
            elif kind == WINDOW_UPDATE:
                self._window_update(number, data, begin, length)
            elif kind == PING:
                self._ping(number, flags, data[begin:end])
            elif kind == RST_STREAM:
                self._rst_stream(number, length)
            elif kind == SETTINGS:
                self._change_settings(number, flags, data[begin:end])
            elif kind == CONTINUATION:
                self._continuation(number, flags, data[begin:end])
            elif kind == PRIORITY:
                if number == 0 or length != 5:
                    raise Violation(FRAME_SIZE_ERROR if number else PROTOCOL_ERROR, "A PRIORITY frame is malformed")
            elif kind == GOAWAY:
                if number or length < 8:
                    raise Violation(PROTOCOL_ERROR if number else FRAME_SIZE_ERROR, "A GOAWAY frame is malformed")
            elif kind == PUSH_PROMISE:
                raise Violation(PROTOCOL_ERROR, "A client can't push")
        if at < size:
            self._rest = data[at:]

    # --- 5. Streams

    def _new_stream(self, number: int, fields: tuple[Field, ...], refusal: Refusal | None, ended: bool) -> None:
        if not number & 1:
            raise Violation(PROTOCOL_ERROR, f"A client can't open stream {number}")
        self._last_number = number
        if number > self._goaway_number:
            self._reset_number = number
            return
        if len(self.streams) >= self.limits.streams_max:
            self._reset(number, REFUSED_STREAM)
            return
        known = self._known
        try:
            if known is not None and known[0] is fields:
                head, announced = known[1], known[2]
            else:
                head, announced = _request(fields, refusal)
                if refusal is None:
                    self._known = (fields, head, announced)
            if ended and announced > 0:
                raise Malformed
        except Malformed:
            self._count_reset()
            self._reset(number, PROTOCOL_ERROR)
            return
        stream = self.streams[number] = Http2Stream(self, number, head, self._first_window)
        stream.left_bytes, stream.ended = announced, ended
        self.events.opened(stream)

    def _forget(self, stream: Http2Stream) -> None:
        stream.done = True
        self._drop_queue(stream)
        self.streams.pop(stream.number, None)
        if stream.pieces_bytes and not stream.ended:
            self._tell_taken(stream.pieces_bytes)
        stream.pieces, stream.pieces_bytes = [], 0
        if self._goaway_number < NUMBER_MAX and not self.streams:
            self.ended = True

    def _drop_queue(self, stream: Http2Stream) -> None:
        if stream.queued:
            self.queued -= stream.queued
            stream.queued = 0
            stream.queue.clear()
            self._ready.pop(stream.number, None)
        stream.wake_writer()

    def _reset(self, number: int, code: int) -> None:
        if number > self._reset_number:
            self._reset_number = number
        self.out.append(frame(RST_STREAM, 0, number, code.to_bytes(4, "big")))

    def reset(self, stream: Http2Stream, code: int) -> None:
        """Ends a stream before its answer is complete."""
        if not stream.done:
            self._forget(stream)
            self._reset(stream.number, code)
            self.events.wrote()

    def _fail_stream(self, stream: Http2Stream, code: int) -> None:
        """Ends a stream for an error of the client (5.4.2), which counts as if the client had reset it."""
        self._count_reset()
        self._forget(stream)
        self._reset(stream.number, code)
        self.events.left(stream)

    def _closed(self, number: int, what: str) -> None:
        """A frame of a stream that isn't open: an error, unless the stream was reset here (5.1)."""
        self._check_begun(number, what)
        if number > self._reset_number:
            raise Violation(STREAM_CLOSED, f"{what} for stream {number}, which is closed")

    def _check_begun(self, number: int, what: str) -> None:
        if number > self._last_number or not number & 1:
            raise Violation(PROTOCOL_ERROR, f"{what} for stream {number}, which isn't open")

    # --- 5.2 Flow control: the client's data

    def took(self, stream: Http2Stream, size: int) -> None:
        """`size` bytes of a body have been taken."""
        stream.untold += size
        if stream.untold >= STREAM_WINDOW_BYTES // 2:
            self.out.append(frame(WINDOW_UPDATE, 0, stream.number, stream.untold.to_bytes(4, "big")))
            stream.untold = 0
            self.events.wrote()
        self._tell_taken(size)

    def _tell_taken(self, size: int) -> None:
        self._untold += size
        if self._untold >= CONNECTION_WINDOW_BYTES // 2:
            self.out.append(frame(WINDOW_UPDATE, 0, 0, self._untold.to_bytes(4, "big")))
            self._received -= self._untold
            self._untold = 0
            self.events.wrote()

    # --- 5.2 Flow control: our data

    def _send(self, stream: Http2Stream, data: Data, size: int) -> None:
        self._window -= size
        stream.window -= size
        self._strikes = self.pings = 0
        most = self._frame_bytes_max
        if size <= most:
            self.out += (frame_head(size, DATA, 0, stream.number), data)
            return
        view = memoryview(data)
        for begin in range(0, size, most):
            piece = view[begin : begin + most]
            self.out += (frame_head(len(piece), DATA, 0, stream.number), piece)

    def stalled(self, latest_s: float) -> list[Stream]:
        """The streams with queued data of which the client has taken nothing since `latest_s`: by the window of the
        stream, or by that of the connection."""
        still = self._sent_s <= latest_s
        return [
            stream
            for stream in self.streams.values()
            if stream.queued and stream.queued_s <= latest_s and (stream.window <= 0 or still)
        ]

    def pump(self) -> bool:
        """Makes frames of at most about TURN_BYTES of the data that waits, a frame of each stream in turn. Returns
        whether there is more that could be sent."""
        left = TURN_BYTES
        while self._ready and self._window > 0:
            if left <= 0:
                return True
            number = next(iter(self._ready))
            stream = self._ready.pop(number)
            room = min(self._window, stream.window, self._frame_bytes_max)
            if room <= 0:
                continue  # its window is empty: WINDOW_UPDATE makes it ready again
            data = stream.queue[0]
            size = len(data)
            if size <= room:
                stream.queue.popleft()
            else:
                view = memoryview(data)
                data, stream.queue[0], size = view[:room], view[room:], room
            self._send(stream, data, size)
            left -= size
            stream.queued -= size
            self.queued -= size
            stream.queued_s = self._sent_s = self.clock()
            if stream.queue:
                self._ready[number] = stream
                continue
            if stream.last is not None:
                self._end(stream, stream.last)
            stream.wake_writer()
        return False

    # --- 6.2 HEADERS, 6.10 CONTINUATION

    def _headers(self, number: int, flags: int, data: bytes, begin: int, end: int) -> None:
        if number == 0:
            raise Violation(PROTOCOL_ERROR, "A HEADERS frame has no stream")
        if flags & PADDED:
            begin, end = _without_padding(data, begin, end)
        if flags & HAS_PRIORITY:
            begin += 5
            if begin > end:
                raise Violation(FRAME_SIZE_ERROR, "A HEADERS frame is too short")
        if flags & END_HEADERS:
            self._whole_block(number, flags, data[begin:end])
        else:
            self._block_number, self._block_flags, self._block_bytes = number, flags, end - begin
            self._block = [data[begin:end]]

    def _continuation(self, number: int, flags: int, part: bytes) -> None:
        if number == 0 or number != self._block_number:
            raise Violation(PROTOCOL_ERROR, "A CONTINUATION frame continues nothing")
        self._block.append(part)
        self._block_bytes += len(part)
        if self._block_bytes > self._block_bytes_max or len(self._block) > CONTINUATIONS_MAX:
            raise Violation(ENHANCE_YOUR_CALM, f"A header block is larger than {self._block_bytes_max} bytes")
        if flags & END_HEADERS:
            block, self._block, self._block_number = b"".join(self._block), [], 0
            self._whole_block(number, self._block_flags, block)

    def _whole_block(self, number: int, flags: int, block: bytes) -> None:
        refusal = None
        try:
            fields = self._decoder.decode(block)
        except BadBlock as error:
            raise Violation(COMPRESSION_ERROR, f"A header block can't be read: {error}") from None
        except FieldsTooLarge as large:  # a name of its own: compiled, a name has one type
            fields, refusal = large.fields, Refusal(431, str(large))
        ended = bool(flags & END_STREAM)
        if number > self._last_number:
            self._new_stream(number, fields, refusal, ended)
            return
        stream = self.streams.get(number)
        if stream is None:
            self._closed(number, "HEADERS")
        elif stream.ended:
            self._fail_stream(stream, STREAM_CLOSED)
        elif not ended or any(name[:1] == b":" for name, _ in fields) or refusal is not None:
            self._fail_stream(stream, PROTOCOL_ERROR)
        else:  # trailers (8.1)
            self._end_request(stream)

    # --- 6.1 DATA

    def _begin_data(self, number: int, length: int, padding: int, ends: bool) -> None:
        """A DATA frame begins. The padding counts for flow control, too."""
        if number == 0:
            raise Violation(PROTOCOL_ERROR, "A DATA frame has no stream")
        self._received += length
        if self._received > CONNECTION_WINDOW_BYTES:
            raise Violation(FLOW_CONTROL_ERROR, "The client sends more than the connection's window")
        stream = self.streams.get(number)
        if stream is None:
            self._closed(number, "DATA")
            self._tell_taken(padding)
        elif stream.ended:
            self._tell_taken(padding)
            self._fail_stream(stream, STREAM_CLOSED)
        elif stream.pieces_bytes + stream.untold + length > STREAM_WINDOW_BYTES:
            raise Violation(FLOW_CONTROL_ERROR, f"Stream {number} sends more than its window")
        elif padding:
            self.took(stream, padding)
        size = length - padding
        self._data_number, self._data_left, self._data_ends = number, size, ends
        if ends and not size and stream is not None and not stream.done:
            self._end_request(stream)

    def _read_data(self, data: bytes, at: int) -> int:
        """Reads a part of the present DATA frame, or all of it, and returns the position after it."""
        end = at + self._data_left
        size = len(data)
        if end > size:
            end = size
        stream = self.streams.get(self._data_number)
        count = end - at
        self._data_left -= count
        if stream is None:  # its stream is closed, perhaps since the frame began
            self._tell_taken(count)
            return end
        if stream.left_bytes >= 0:
            stream.left_bytes -= count
            if stream.left_bytes < 0:
                self._tell_taken(count)
                self._fail_stream(stream, PROTOCOL_ERROR)
                return end
        stream.add(data[at:end])
        if not self._data_left and self._data_ends:
            self._end_request(stream)
        else:
            stream.wake_reader()
        return end

    def _end_request(self, stream: Http2Stream) -> None:
        if stream.left_bytes > 0:
            self._fail_stream(stream, PROTOCOL_ERROR)  # the body is shorter than announced (8.1.1)
            return
        # Its window isn't needed any longer; that of the connection is.
        self._tell_taken(stream.pieces_bytes)
        stream.ended = True
        stream.wake_reader()

    # --- 6.4 RST_STREAM

    def _rst_stream(self, number: int, length: int) -> None:
        if length != 4:
            raise Violation(FRAME_SIZE_ERROR, "An RST_STREAM frame is malformed")
        stream = self.streams.get(number)
        if stream is None:
            self._check_begun(number, "RST_STREAM")
        else:
            self._count_reset()
            self._forget(stream)
            self.events.left(stream)

    def _count_reset(self) -> None:
        """Counts a stream that the client ended before its answer: opening and resetting costs a client little, and the
        server much (CVE-2023-44487)."""
        limits = self.limits
        if not self._resets.spend(self.clock()) and self._goaway_number == NUMBER_MAX:
            text = f"More than {limits.resets_max} streams were reset, and more than {limits.resets_per_s:g} a second"
            self.go_away(ENHANCE_YOUR_CALM, text)
            self.events.flooded(text)

    # --- 6.5 SETTINGS

    def _change_settings(self, number: int, flags: int, payload: bytes) -> None:
        if number:
            raise Violation(PROTOCOL_ERROR, "A SETTINGS frame has a stream")
        if flags & ACK:
            if payload:
                raise Violation(FRAME_SIZE_ERROR, "An acknowledgement of settings isn't empty")
            return
        if len(payload) % 6:
            raise Violation(FRAME_SIZE_ERROR, "A SETTINGS frame is malformed")
        for at in range(0, len(payload), 6):
            key = int.from_bytes(payload[at : at + 2], "big")
            value = int.from_bytes(payload[at + 2 : at + 6], "big")
            if key == SETTINGS_INITIAL_WINDOW_SIZE:
                if value > WINDOW_MAX:
                    raise Violation(FLOW_CONTROL_ERROR, f"The initial window size is {value}")
                if value != self._first_window:
                    self._change_first_window(value)
            elif key == SETTINGS_MAX_FRAME_SIZE:
                if not SMALL_FRAME_BYTES_MAX <= value < 1 << 24:
                    raise Violation(PROTOCOL_ERROR, f"The maximal frame size is {value}")
                self._frame_bytes_max = min(value, FRAME_BYTES_MAX)
            elif key == SETTINGS_ENABLE_PUSH and value > 1:
                raise Violation(PROTOCOL_ERROR, f"ENABLE_PUSH is {value}")
            elif key == SETTINGS_HEADER_TABLE_SIZE and value < self._table_bytes:
                self._table_shrinks = True
        self.out.append(frame(SETTINGS, ACK, 0))

    def _change_first_window(self, value: int) -> None:
        change, self._first_window = value - self._first_window, value
        if self.streams and not self._window_changes.spend(self.clock()):
            raise Violation(ENHANCE_YOUR_CALM, "The initial window size changes too often")
        for stream in self.streams.values():
            stream.window += change
            if stream.window > WINDOW_MAX:
                raise Violation(FLOW_CONTROL_ERROR, f"The window of stream {stream.number} is too large")
            if stream.queue and stream.window > 0:
                self._ready[stream.number] = stream

    # --- 6.7 PING

    def _ping(self, number: int, flags: int, payload: bytes) -> None:
        if number or len(payload) != 8:
            raise Violation(PROTOCOL_ERROR if number else FRAME_SIZE_ERROR, "A PING frame is malformed")
        if flags & ACK:
            self.pinged = False
            return
        interval_s = self.limits.ping_interval_s
        if interval_s:
            now_s = self.clock()
            often = self._ping_s >= 0 and now_s - self._ping_s < interval_s
            if often or not (self.streams or self.limits.idle_pings):
                self._strikes += 1
                if self._strikes > STRIKES_MAX:
                    raise Violation(ENHANCE_YOUR_CALM, "too_many_pings")
            self._ping_s = now_s
        self.out.append(frame(PING, ACK, 0, payload))

    @property
    def within_head(self) -> bool:
        """Whether a header block has begun in one frame and goes on in the next."""
        return self._block_number > 0

    @property
    def within_frame(self) -> bool:
        """Whether a frame or a header block has begun and isn't complete."""
        return bool(self._rest or self._block_number or self._data_left or self._skip)

    def ping(self) -> None:
        """Asks the client for a sign of life, which clears `pinged`."""
        self.pinged = True
        self.pings += 1
        self.out.append(frame(PING, 0, 0, b"liveness"))

    # --- 6.8 GOAWAY

    def go_away(self, code: int = NO_ERROR, text: str = "", *, soon: bool = False) -> None:
        """Takes no more streams; the connection ends with the last one. `soon`: only warns, so that streams that are on
        their way are still taken."""
        last = NUMBER_MAX if soon else self._last_number
        payload = last.to_bytes(4, "big") + code.to_bytes(4, "big") + text.encode()
        self.out.append(frame(GOAWAY, 0, 0, payload))
        self._goaway_number = min(self._goaway_number, last)
        if not soon and not self.streams:
            self.ended = True
        self.events.wrote()

    def close(self, code: int, text: str) -> None:
        payload = self._last_number.to_bytes(4, "big") + code.to_bytes(4, "big") + text.encode()
        self.out.append(frame(GOAWAY, 0, 0, payload))
        self.lose()
        self.events.wrote()

    def lose(self) -> None:
        self.ended = True
        for stream in [*self.streams.values()]:
            self._forget(stream)
            self.events.left(stream)

    # --- 6.9 WINDOW_UPDATE

    def _window_update(self, number: int, data: bytes, begin: int, length: int) -> None:
        if length != 4:
            raise Violation(FRAME_SIZE_ERROR, "A WINDOW_UPDATE frame is malformed")
        more = int.from_bytes(data[begin : begin + 4], "big") & WINDOW_MAX
        if number == 0:
            self._window += more
            if more == 0 or self._window > WINDOW_MAX:
                code = FLOW_CONTROL_ERROR if more else PROTOCOL_ERROR
                raise Violation(code, "The window of the connection is too large, or doesn't grow")
            return
        stream = self.streams.get(number)
        if stream is None:
            self._check_begun(number, "WINDOW_UPDATE")
            return
        stream.window += more
        if more == 0 or stream.window > WINDOW_MAX:
            self._fail_stream(stream, FLOW_CONTROL_ERROR if more else PROTOCOL_ERROR)
        elif stream.queue and stream.window > 0:
            self._ready[number] = stream

    # --- 8. Messages: answers

    def respond(self, stream: Http2Stream, block: bytes, body: Data, trailers: bytes) -> None:
        """Sends a whole answer; with `trailers`, a block, after the body."""
        if stream.done or stream.begun:
            return
        size, number = len(body), stream.number
        if (
            size <= self._frame_bytes_max
            and size <= stream.window
            and size <= self._window
            and not self.blocked
            and len(block) <= SMALL_FRAME_BYTES_MAX
            and len(trailers) <= SMALL_FRAME_BYTES_MAX
            and not self._table_shrinks
        ):
            stream.begun = stream.given = True
            self._window -= size
            self._strikes = self.pings = 0
            if size == 0 and not trailers:
                self.out += (frame_head(len(block), HEADERS, END_HEADERS | END_STREAM, number), block)
            elif trailers:
                self.out += (
                    frame_head(len(block), HEADERS, END_HEADERS, number),
                    block,
                    frame_head(size, DATA, 0, number),
                    body,
                    frame_head(len(trailers), HEADERS, END_HEADERS | END_STREAM, number),
                    trailers,
                )
            else:
                self.out += (
                    frame_head(len(block), HEADERS, END_HEADERS, number),
                    block,
                    frame_head(size, DATA, END_STREAM, number),
                    body,
                )
            self._complete(stream)
            self.events.wrote()
            return
        self.begin(stream, block)
        self.write(stream, body)
        self.finish(stream, trailers)

    def begin(self, stream: Http2Stream, block: bytes) -> None:
        if stream.done or stream.begun:
            return
        stream.begun = True
        self._send_block(stream.number, block, 0)
        self.events.wrote()

    def _send_block(self, number: int, block: bytes, flags: int) -> None:
        most = SMALL_FRAME_BYTES_MAX
        kind = HEADERS
        if self._table_shrinks:
            self._table_shrinks, self._table_bytes = False, 0
            block = NO_TABLE + block
        while len(block) > most:
            self.out += (frame_head(most, kind, flags, number), block[:most])
            block, kind, flags = block[most:], CONTINUATION, 0
        self.out += (frame_head(len(block), kind, flags | END_HEADERS, number), block)

    def write(self, stream: Http2Stream, data: Data) -> None:
        """Sends data, as much as the client takes; the rest is queued. The caller doesn't change it afterwards."""
        size = len(data)
        if stream.done or not size:
            return
        if not stream.queue and not self.blocked and size <= stream.window and size <= self._window:
            self._send(stream, data, size)
        else:
            if not stream.queue:
                stream.queued_s = self.clock()
                self._ready[stream.number] = stream
            stream.queue.append(data)
            stream.queued += size
            self.queued += size
        self.events.wrote()

    def finish(self, stream: Http2Stream, trailers: bytes) -> None:
        if stream.done:
            return
        stream.given = True
        if stream.queue:
            stream.last = trailers
            return
        self._end(stream, trailers)
        self.events.wrote()

    def _end(self, stream: Http2Stream, trailers: bytes) -> None:
        if trailers:
            self._send_block(stream.number, trailers, END_STREAM)
        else:
            self.out.append(frame_head(0, DATA, END_STREAM, stream.number))
        self._complete(stream)

    def _complete(self, stream: Http2Stream) -> None:
        """All of an answer is sent; the client needn't send the rest of its request (8.1)."""
        self._forget(stream)
        if not stream.ended:
            self._reset(stream.number, NO_ERROR)


def _answer_block(status: int, fields: Fields) -> bytes:
    """The header block of an answer, without what HTTP/2 doesn't have."""
    if status in NO_BODY:
        fields = without_length(fields)
    return encode([(b":status", b"%d" % status), *[field for field in fields if field[0] not in _CONNECTION_NAMES]])


def _without_padding(data: bytes, begin: int, end: int) -> tuple[int, int]:
    if begin == end or begin + 1 + data[begin] > end:
        raise Violation(PROTOCOL_ERROR, "A frame has more padding than bytes")
    return begin + 1, end - data[begin]


# --- 8. Messages: requests


def _request(fields: tuple[Field, ...], refusal: Refusal | None) -> tuple[Head, int]:
    """A request's head, and the length of its body if it says so (else -1). Raises Malformed."""
    pseudo: dict[bytes, bytes] = {}
    regular: list[Field] = []
    for field in fields:
        name, value = field
        if not _VALUE.fullmatch(value) or value != value.strip(b" \t"):
            raise Malformed
        if name[:1] == b":":
            if regular or name in pseudo or name not in _PSEUDO:
                raise Malformed
            pseudo[name] = value
        elif not _NAME.fullmatch(name) or name in _CONNECTION_NAMES or (name == b"te" and value != b"trailers"):
            raise Malformed
        else:
            regular.append(field)
    method, target = pseudo.get(b":method", b""), pseudo.get(b":path", b"")
    authority = pseudo.get(b":authority")
    if refusal is None:  # else some may be missing
        if method == b"CONNECT":
            if len(pseudo) != 2 or authority is None:
                raise Malformed
        elif not method or not target or b":scheme" not in pseudo:
            raise Malformed
    hosts = [value for name, value in regular if name == b"host"]
    if len(hosts) > 1 or (hosts and authority is not None and hosts[0].lower() != authority.lower()):
        raise Malformed  # two names of the server (8.3.1)
    if not hosts and authority is not None:
        regular.append((b"host", authority))
    head = Head(method.decode("latin-1"), target, _with_one_cookie(regular), refusal)
    announced = head.by_name.get(b"content-length")
    if announced is None:
        return head, -1
    lengths = {value for name, value in regular if name == b"content-length"}
    if len(lengths) != 1 or not announced.isdigit() or len(announced) > 18:
        raise Malformed
    return head, int(announced)


def _with_one_cookie(fields: list[Field]) -> tuple[Field, ...]:
    """Joins the cookies, which clients send apart for the sake of compression (8.2.3)."""
    cookies = [value for name, value in fields if name == b"cookie"]
    if len(cookies) < 2:
        return tuple(fields)
    return (*[field for field in fields if field[0] != b"cookie"], (b"cookie", b"; ".join(cookies)))
