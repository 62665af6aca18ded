"""The targets of the fuzzer that are what clients send: header blocks, frames of HTTP/2, requests of HTTP/1.1."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import h11
import hpack

from ts_frontend.transport.hpack import BadBlock, FieldsTooLarge, HeaderDecoder, encode
from ts_frontend.transport.http1 import Http1
from ts_frontend.transport.http2 import ACK, CONTINUATION, HEADERS, PREFACE, SETTINGS, Http2, Http2Limits, frame
from ts_frontend.transport.stream import Peer, Stream

if TYPE_CHECKING:
    from fuzz.targets import target
else:
    from targets import target

FIELDS_BYTES_MAX = 4096
PEER = Peer(None, None, "2")
#: Bytes that a client's byte may cost in answers: a PING is answered as it is.
ANSWER_BYTES = 64


@target(
    BadBlock,
    FieldsTooLarge,
    words=(b"\x82", b"\xbe", b"\x40\1a\1b", b"\x20", b"\x3f\xe1\x1f", b"\x00\1a\1b", b"\x10", b"\x7f\xff\xff\7", b"\n"),
)
def hpack_blocks(data: bytes) -> None:
    """Blocks, each behind its length: what another implementation reads, too, it reads the same."""
    decoder, other = HeaderDecoder(FIELDS_BYTES_MAX), hpack.Decoder(1 << 24)
    at = 0
    while at < len(data):
        block = data[at + 1 : at + 1 + data[at]]
        at += 1 + data[at]
        try:
            ours = decoder.decode(block)
            too_large = False
        except FieldsTooLarge as error:
            ours, too_large = error.fields, True
        try:
            theirs = tuple((name, value) for name, value in other.decode(block, raw=True))
        except hpack.HPACKError:
            return
        assert ours == theirs[: len(ours)] and too_large == (len(ours) < len(theirs))
        assert sum(32 + len(name) + len(value) for name, value in ours) <= FIELDS_BYTES_MAX
        assert decoder._size == sum(32 + len(name) + len(value) for name, value in decoder._entries) <= 4096
        assert [*reversed(decoder._entries)] == [*map(tuple, other.header_table.dynamic_entries)]
        assert tuple((n, v) for n, v in hpack.Decoder(1 << 24).decode(encode(ours), raw=True)) == ours


class _Served:
    """Answers requests, as soon as their heads or their ends arrive, or not at all, by their numbers."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []

    def opened(self, stream: Stream) -> None:
        self.streams.append(stream)
        if len(self.streams) % 4 == 0:
            stream.respond(200, [(b"a", b"b")], b"at once")
        elif len(self.streams) % 4 == 1:
            stream.begin(200, [])
            stream.write(b"x" * 70_000)

    def left(self, stream: Stream) -> None:
        assert stream.done

    def flooded(self, text: str) -> None:
        pass

    def wrote(self) -> None:
        pass

    def work(self) -> None:
        """What the streams' tasks do."""
        for number, stream in enumerate(self.streams):
            if number % 3 and not stream.done:
                stream.body()
                if stream.ended and not stream.begun:
                    stream.respond(200, [], b"whole")
                elif stream.ended and not stream.given:
                    stream.finish()


def _h2(pieces: list[bytes]) -> tuple[Http2, _Served]:
    events = _Served()
    limits = Http2Limits(8, FIELDS_BYTES_MAX, 20, 1.0, 0.001)
    http = Http2(events, PEER, limits, clock=lambda: 100.0)
    http.receive(PREFACE + frame(SETTINGS, 0, 0))
    received = len(PREFACE)
    for piece in pieces:
        http.receive(piece)
        received += len(piece)
        events.work()
        http.pump()
        http.out = [part for part in http.out if len(part) < 70_000]
        _check_h2(http, events, received)
    ended = http.ended
    for stream in [*http.streams.values()]:
        stream.abort()
    assert http.queued == 0 and not http.streams and not http._ready
    http.go_away()
    assert http.ended
    assert http._received == http._untold + http._data_left or ended
    return http, events


def _check_h2(http: Http2, events: _Served, received: int) -> None:
    streams = http.streams.values()
    assert len(streams) <= 8
    assert http.queued == sum(stream.queued for stream in streams)
    assert all(stream.queued == sum(map(len, stream.queue)) for stream in streams)
    assert sum(stream.pieces_bytes for stream in events.streams) <= received
    assert all(not stream.done for stream in streams)
    assert all(stream.done or stream in streams for stream in events.streams)
    assert len(http._rest) <= 4 * FIELDS_BYTES_MAX + 9 and http._block_bytes <= 4 * FIELDS_BYTES_MAX + (1 << 14)
    assert not http.ended or not streams
    # Streams whose queues can't be sent aren't forgotten.
    waiting = {stream.number for stream in streams if stream.queue and stream.window > 0}
    assert waiting <= http._ready.keys()


_HEAD = encode([(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"a")])


@target(
    words=(
        *(frame(HEADERS, 5, one, _HEAD) for one in (1, 3, 5, 7)),
        *(frame(HEADERS, 4, one, _HEAD) for one in (1, 3, 5, 7)),
        *(frame(HEADERS, 1, 1, _HEAD[:9]), frame(CONTINUATION, 4, 1, _HEAD[9:]), frame(CONTINUATION, 0, 1)),
        *(frame(0, flags, one, b"\2abc\0\0") for one in (1, 3) for flags in (0, 1, 8, 9)),
        *(
            frame(3, 0, 1, b"\0\0\0\5"),
            frame(3, 0, 3, b"\0\0\0\5"),
            frame(6, 0, 0, b"12345678"),
            frame(7, 0, 0, bytes(8)),
        ),
        *(frame(8, 0, 0, b"\0\0\xff\xff"), frame(8, 0, 1, b"\0\0\xff\xff"), frame(8, 0, 1, b"\x7f\xff\xff\xff")),
        *(frame(SETTINGS, 0, 0, b"\0\4\0\0\0\1"), frame(SETTINGS, 0, 0, b"\0\4\0\1\0\0"), frame(SETTINGS, ACK, 0)),
        *(frame(SETTINGS, 0, 0, b"\0\1\0\0\0\0"), frame(2, 0, 3, bytes(5)), frame(5, 0, 1), frame(99, 0, 0, b"abc")),
    )
)
def http2_frames(data: bytes) -> None:
    """What follows the preface: the same requests and the same end, however the bytes are cut. No exception is raised;
    nothing is queued for ever; the window of the connection keeps its size."""
    whole, events = _h2([data])
    size = 1 + len(data) % 7
    _, others = _h2([data[at : at + size] for at in range(0, min(len(data), 4000), size)] + [data[4000:]])
    heads = [(one.head.method, one.head.target, one.head.fields) for one in events.streams]
    cut = [(one.head.method, one.head.target, one.head.fields) for one in others.streams]
    # The server's answers come at other times, after which the rest of a request isn't read.
    count = min(len(heads), len(cut))
    assert heads[:count] == cut[:count]


class _Read(NamedTuple):
    """A request that was read. `status`: that of its refusal, 0 for none; `answered`: it was read to its end."""

    method: str
    target: bytes
    fields: list[tuple[bytes, bytes]]
    body: bytes
    answered: bool = True
    status: int = 0


class _Requests(_Served):
    """Answers each request at its end."""

    def opened(self, stream: Stream) -> None:
        self.streams.append(stream)
        self.bodies.append(b"")

    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[bytes] = []

    def left(self, stream: Stream) -> None:
        pass

    def work(self) -> None:
        """Serves what is there, and what is read then."""
        for _ in range(10_000):
            if not self.streams or self.streams[-1].done:
                return
            stream = self.streams[-1]
            stream.wanted()
            self.bodies[-1] += stream.body()
            if not stream.ended:
                return
            refusal = stream.head.refusal
            stream.respond(refusal.status if refusal else 200, [], b"answer")
        raise AssertionError("there is no end of requests")


def _h1(pieces: list[bytes]) -> list[_Read]:
    events = _Requests()
    http = Http1(events, Peer(None, None, "1.1"), FIELDS_BYTES_MAX)
    for piece in pieces:
        http.receive(piece)
        events.work()
        http.out = []
        assert len(http._rest) <= FIELDS_BYTES_MAX or http.stream is not None or http.ended
    requests: list[_Read] = []
    for stream, body in zip(events.streams, events.bodies, strict=True):
        head = stream.head
        status = head.refusal.status if head.refusal else 0
        body = body if stream.begun else b""
        requests.append(_Read(head.method, head.target, list(head.fields), body, stream.begun, status))
    assert http.queued == 0
    http.lose()
    assert http.stream is None and http.ended
    return requests


@target(
    words=(
        *(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc"),
        *(b"Transfer-Encoding: chunked\r\n", b"Content-Length: 3\r\n", b"Host: a\r\n", b"0\r\n\r\n", b"3\r\nabc\r\n"),
        *(b"Connection: close\r\n", b"Connection: Upgrade\r\nUpgrade: h2c\r\n", b"Expect: 100-continue\r\n", b"\r\n"),
        *(
            b" HTTP/1.0\r\n",
            b"http://b/",
            b"\r\n ",
            b"\n",
            b"\r",
            b"\t",
            b"\x0b",
            b";a=b",
            b"HEAD",
            b"CONNECT",
            b"chunked",
        ),
    )
)
def http1_requests(data: bytes) -> None:
    """The same requests however the bytes are cut, and the same as another implementation reads, where both read."""
    whole = _h1([data])
    size = 1 + len(data) % 5
    pieces = [data[at : at + size] for at in range(0, min(len(data), 3000), size)]
    cut = _h1([*pieces, data[3000:]])
    # Of a refused request nothing is known. A request behind a chunked body in the same piece isn't read.
    taken, again = ([one for one in found if one.answered and not one.status] for found in (whole, cut))
    assert taken[: len(again)] == again[: len(taken)]
    for ours, theirs in zip(whole, _by_h11(data), strict=False):
        if ours.status or not ours.answered or ours.method == "CONNECT":  # whose body, if it has one, isn't read
            break
        assert ours[:2] == theirs[:2] and ours.body == theirs.body
        if ours.target[:1] in (b"/", b"*"):
            assert [_plain(*field) for field in ours.fields] == theirs.fields


def _plain(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    return name, value.lower() if name == b"transfer-encoding" else value


def _by_h11(data: bytes) -> list[_Read]:
    """The requests that h11 reads before its first error."""
    found: list[_Read] = []
    connection = h11.Connection(h11.SERVER)
    try:
        connection.receive_data(data)
        head, body = None, b""
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                head, body = event, b""
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage) and head is not None:
                fields = [(bytes(name), bytes(value)) for name, value in head.headers]
                found.append(_Read(head.method.decode(), bytes(head.target), fields, body))
                connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                connection.start_next_cycle()
            else:
                return found
    except h11.ProtocolError:
        return found
