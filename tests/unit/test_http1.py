"""HTTP/1 without sockets: whole conversations with another implementation as the client, and what RFC 9112 forbids."""

from __future__ import annotations

import random
from string import ascii_lowercase, digits

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ts_frontend.transport.hpack import Field
from ts_frontend.transport.http1 import UNREAD_BYTES_MAX, Http1, Http1Stream
from ts_frontend.transport.stream import Peer, Stream

PEER = Peer(("127.0.0.1", 1), ("127.0.0.1", 2), "1.1")
HEAD_BYTES_MAX = 1000
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
HEAD = b"POST / HTTP/1.1\r\nHost: a\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


class Served:
    """What happens on a connection."""

    def __init__(self) -> None:
        self.streams: list[Http1Stream] = []
        self.lost: list[Stream] = []

    def opened(self, stream: Stream) -> None:
        assert isinstance(stream, Http1Stream)
        self.streams.append(stream)

    def left(self, stream: Stream) -> None:
        self.lost.append(stream)

    def flooded(self, text: str) -> None:
        raise AssertionError(text)

    def wrote(self) -> None:
        pass


def served() -> tuple[Http1, Served]:
    events = Served()
    return Http1(events, PEER, HEAD_BYTES_MAX), events


def sent(http: Http1) -> bytes:
    data, http.out = b"".join(http.out), []
    return data


def answered(http: Http1, events: Served, fields: tuple[Field, ...] = ()) -> tuple[int, dict[bytes, bytes], bytes]:
    """Answers the present request: its status, its headers and its body."""
    stream = events.streams[-1]
    refusal = stream.head.refusal
    stream.respond(refusal.status if refusal else 200, fields, b"answer")
    head, _, body = sent(http).partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    return int(first.split()[1]), dict(line.split(b": ", 1) for line in lines), body


def requests(data: bytes, size: int = 1 << 20) -> tuple[list[tuple[str, bytes, bytes]], Http1]:
    """What a connection reads if every request is answered: method, target, body; or the status of a refusal."""
    http, events = served()
    found: list[tuple[str, bytes, bytes]] = []
    for at in range(0, len(data), size):
        http.receive(data[at : at + size])
        while http.stream is not None and http.stream.ended:
            stream = http.stream
            body, refusal = stream.body(), stream.head.refusal
            found.append((str(refusal.status) if refusal else stream.head.method, stream.head.target, body))
            stream.respond(refusal.status if refusal else 200, [])
    return found, http


# --- conversations

_METHODS = st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
#: Texts of an alphabet are drawn several times as fast as those of a regular expression.
_TARGETS = st.tuples(
    st.text(ascii_lowercase + digits + "./_-%", max_size=20), st.text(ascii_lowercase + "=&%", max_size=9)
).map(lambda parts: ("/" + parts[0].replace("%", "%2f") + (parts[1] and "?" + parts[1])).encode())
_SEEN = "".join(map(chr, [ord("\t"), *range(ord(" "), 0x7F), *range(0x80, 0x100)]))
_FIELDS = st.lists(
    st.tuples(
        st.text(ascii_lowercase + digits + "!#$%&'*+.^_`|~-", max_size=9).map(lambda name: b"x-" + name.encode()),
        st.text(_SEEN, max_size=12).map(lambda value: value.strip(" \t").encode("latin-1")),
    ),
    max_size=4,
)
_REQUESTS = st.lists(
    st.tuples(
        _METHODS, _TARGETS, _FIELDS, st.sampled_from(["", "length", "chunked", "expect"]), st.binary(max_size=60)
    ),
    min_size=1,
    max_size=5,
)
_ANSWERS = st.sampled_from(["whole", "length", "chunked", "empty", "204", "304"])


@settings(max_examples=200)
@given(_REQUESTS, st.lists(_ANSWERS, min_size=5, max_size=5), st.randoms(use_true_random=False))
def test_conversations(
    wanted: list[tuple[str, bytes, list[Field], str, bytes]], answers: list[str], chance: random.Random
) -> None:
    """Requests one after the other, cut anywhere; the answers are given at any time, in pieces, to a slow socket."""
    http, events = served()
    client = h11.Connection(h11.CLIENT)
    for (method, target, fields, framing, body), answer in zip(wanted, answers, strict=False):
        on_way = b""
        more = [(b"Host", b"a")]
        if framing == "chunked":
            more.append((b"Transfer-Encoding", b"chunked"))
        elif framing:
            more.append((b"Content-Length", b"%d" % len(body)))
        if framing == "expect":
            more.append((b"Expect", b"100-continue"))
        on_way += _bytes(client.send(h11.Request(method=method, target=target, headers=[*more, *fields])))
        if framing == "expect" and body:
            _deliver(http, on_way, chance)
            on_way = b""
            events.streams[-1].wanted()
            events.streams[-1].wanted()
            assert sent(http) == b"HTTP/1.1 100 Continue\r\n\r\n"
        if framing:
            cut = chance.randrange(len(body) + 1)
            on_way += b"".join(_bytes(client.send(h11.Data(data=part))) for part in (body[:cut], body[cut:]))
        on_way += _bytes(client.send(h11.EndOfMessage()))
        _deliver(http, on_way, chance)
        stream = events.streams[-1]
        assert (stream.head.method, stream.head.target) == (method, target) and stream.ended
        assert list(stream.head.fields) == [(name.lower(), value) for name, value in [*more, *fields]]
        assert stream.body() == (body if framing else b"")
        given_body = _answer(http, stream, answer, chance)
        client.receive_data(sent(http))
        response = client.next_event()
        assert isinstance(response, h11.Response) and response.status_code == stream.status
        assert stream.status == 200 or stream.status == 201 or b"content-length" not in dict(response.headers)
        got = b""
        while isinstance(event := client.next_event(), h11.Data):
            got += bytes(event.data)
        assert isinstance(event, h11.EndOfMessage)
        assert got == (b"" if method == "HEAD" else given_body)
        assert stream.done and http.stream is None and not http.ended and http.queued == 0
        client.start_next_cycle()
    assert len(events.streams) == min(len(wanted), len(answers)) and not events.lost


def _bytes(data: bytes | None) -> bytes:
    assert data is not None
    return data


def _deliver(http: Http1, data: bytes, chance: random.Random) -> None:
    while data:
        size = chance.choice((1, 2, 10, 1000))
        http.receive(data[:size])
        data = data[size:]


def _answer(http: Http1, stream: Http1Stream, how: str, chance: random.Random) -> bytes:
    """Gives an answer; returns its body."""
    if how in ("204", "304"):
        stream.respond(int(how), [(b"content-length", b"8")], b"left out")
        return b""
    parts = [chance.randbytes(chance.choice((0, 1, 50))) for _ in range(0 if how == "empty" else 4)]
    body = b"".join(parts)
    if how == "whole":
        stream.respond(200, [(b"a", b"b")], body)
        return body
    stream.begin(201, [(b"content-length", b"%d" % len(body))] if how == "length" else [])
    for part in parts:
        http.blocked = chance.random() < 0.5
        stream.write(part)
    stream.finish()
    http.blocked = False
    while http.pump():
        pass
    return body


@settings(max_examples=200)
@given(_REQUESTS, st.integers(1, 50))
def test_pipelined_requests(wanted: list[tuple[str, bytes, list[Field], str, bytes]], size: int) -> None:
    """The same requests however the bytes are cut. Behind a chunked body in the same piece, the connection ends."""
    data, expected = b"", []
    for method, target, _, framing, body in wanted:
        length = b"Content-Length: %d\r\n" % len(body) if framing else b""
        data += b"\r\n%s %s HTTP/1.1\r\nHost: a\r\n%s\r\n" % (method.encode(), target, length)
        data += body if framing else b""
        expected.append((method, target, body if framing else b""))
    found, http = requests(data, size)
    assert found == expected and not http.ended and not http.within_head


def test_a_request_behind_a_chunked_body_is_served_or_never_read() -> None:
    data = CHUNKED + b"1\r\na\r\n0\r\n\r\n"
    assert requests(data + GET, len(data))[0] == [("POST", b"/", b"a"), ("GET", b"/", b"")]
    found, http = requests(data + GET)
    assert found == [("POST", b"/", b"a")] and http.ended


# --- the connection goes on, or ends


@pytest.mark.parametrize(
    ("version", "asked", "keeps"),
    [
        (b"1.1", b"", True),
        (b"1.1", b"close", False),
        (b"1.1", b"Close, x", False),
        (b"1.0", b"", False),
        (b"1.0", b"keep-alive", True),
        (b"1.0", b"close", False),
    ],
)
def test_which_connections_go_on(version: bytes, asked: bytes, keeps: bool) -> None:
    http, events = served()
    http.receive(b"GET / HTTP/%s\r\nHost: a\r\n%s\r\n" % (version, b"Connection: %s\r\n" % asked if asked else b""))
    _, fields, body = answered(http, events)
    assert http.ended == (not keeps) and body == b"answer"
    assert fields.get(b"connection") == (b"close" if not keeps else b"keep-alive" if version == b"1.0" else None)


def test_an_answer_without_a_length_to_an_old_client_ends_with_the_connection() -> None:
    http, events = served()
    http.receive(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    events.streams[0].begin(200, [])
    events.streams[0].write(b"data")
    events.streams[0].finish()
    assert sent(http).endswith(b"connection: close\r\n\r\ndata") and http.ended


def test_an_answer_that_is_given_up_ends_without_its_last_chunk() -> None:
    http, events = served()
    http.receive(GET + GET)
    events.streams[0].begin(200, [])
    events.streams[0].write(b"data")
    events.streams[0].abort()
    assert sent(http).endswith(b"4\r\ndata\r\n") and http.ended and len(events.streams) == 1


def test_a_lost_connection() -> None:
    http, events = served()
    http.blocked = True
    http.receive(GET)
    events.streams[0].begin(200, [])
    events.streams[0].write(b"data")
    assert http.queued == 4
    http.lose()
    assert http.queued == 0 and events.lost == events.streams[:1] and events.streams[0].done


# --- what isn't a request

BAD = {
    "2.2 LF alone": (b"GET / HTTP/1.1\nHost: a\n\n", 400),
    "2.2 LF alone behind a header": (b"GET / HTTP/1.1\r\nHost: a\nB: c\r\n\r\n", 400),
    "2.2 CR alone in a header": (b"GET / HTTP/1.1\r\nHost: a\rB: c\r\n\r\n", 400),
    "2.2 CR before CRLF": (b"GET / HTTP/1.1\r\nHost: a\r\r\n\r\n", 400),
    "2.2 a blank before the first header": (b"GET / HTTP/1.1\r\n Host: a\r\n\r\n", 400),
    "2.3 an unknown version": (b"GET / HTTP/3.0\r\nHost: a\r\n\r\n", 505),
    "2.3 a version between": (b"GET / HTTP/1.2\r\nHost: a\r\n\r\n", 505),
    "2.3 HTTP/2 without its preface": (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
    "2.3 another protocol": (b"GET / RTSP/1.0\r\nHost: a\r\n\r\n", 400),
    "2.3 no version": (b"GET /\r\nHost: a\r\n\r\n", 400),
    "2.3 a target that is a version": (b"CONNECT HTTP/1.1\r\nHost: a\r\n\r\n", 505),
    "2.3 a target that ends with a version": (b"GET /HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "2.3 a version in lower case": (b"GET / http/1.1\r\nHost: a\r\n\r\n", 400),
    "3 a target with a blank": (b"GET /a b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "3 a blank behind the version": (b"GET / HTTP/1.1 \r\nHost: a\r\n\r\n", 400),
    "3.1 an unknown method": (b"FETCH / HTTP/1.1\r\nHost: a\r\n\r\n", 501),
    "3.1 a method in lower case": (b"get / HTTP/1.1\r\nHost: a\r\n\r\n", 501),
    "3.2 a target that is none": (b"GET a HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "3.2 a target with a control byte": (b"GET /\x01 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "3.2 no Host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "3.2 two Hosts": (b"GET / HTTP/1.1\r\nHost: a\r\nhost: a\r\n\r\n", 400),
    "5 a header without a colon": (b"GET / HTTP/1.1\r\nHost: a\r\nB\r\n\r\n", 400),
    "5 an empty name": (b"GET / HTTP/1.1\r\nHost: a\r\n: c\r\n\r\n", 400),
    "5.1 a blank before the colon": (b"GET / HTTP/1.1\r\nHost : a\r\n\r\n", 400),
    "5.1 a name with a sign": (b"GET / HTTP/1.1\r\nHost: a\r\nB(: c\r\n\r\n", 400),
    "5.2 a header of two lines": (b"GET / HTTP/1.1\r\nHost: a\r\nB: c\r\n d\r\n\r\n", 400),
    "5.5 NUL in a header": (b"GET / HTTP/1.1\r\nHost: a\r\nB: c\0d\r\n\r\n", 400),
    "5.5 a control byte in a header": (b"GET / HTTP/1.1\r\nHost: a\r\nB: \x7f\r\n\r\n", 400),
    "6.1 a coding but chunked": (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    "6.1 a coding in another header": (
        HEAD + b"Transfer-Encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        501,
    ),
    "6.1 chunked in another header": (
        HEAD + b"Transfer-Encoding: chunked\r\ntransfer-encoding: gzip\r\n\r\n0\r\n\r\n",
        400,
    ),
    "6.1 chunked twice": (HEAD + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n", 400),
    "6.1 chunked between quotes": (HEAD + b'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n', 501),
    "6.1 chunked behind a strange blank": (HEAD + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n", 400),
    "6.1 a coding of an old client": (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 501),
    "6.1 a coding and a length": (HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", 400),
    "6.1 a length and a coding": (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "6.3 two lengths": (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\na", 400),
    "6.3 the same length twice": (HEAD + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\na", 400),
    "6.3 two lengths in one header": (HEAD + b"Content-Length: 1, 1\r\n\r\na", 400),
    "6.3 a length with a sign": (HEAD + b"Content-Length: +1\r\n\r\na", 400),
    "6.3 a negative length": (HEAD + b"Content-Length: -1\r\n\r\na", 400),
    "6.3 a length in another base": (HEAD + b"Content-Length: 0x1\r\n\r\na", 400),
    "6.3 an empty length": (HEAD + b"Content-Length: \r\n\r\na", 400),
    "6.3 an endless length": (HEAD + b"Content-Length: 9999999999999999999\r\n\r\na", 400),
    "7.1 a size that is none": (CHUNKED + b"g\r\n", 400),
    "7.1 a size with a sign": (CHUNKED + b"+1\r\na\r\n0\r\n\r\n", 400),
    "7.1 a size with 0x": (CHUNKED + b"0x1\r\na\r\n0\r\n\r\n", 400),
    "7.1 a size behind a blank": (CHUNKED + b" 1\r\na\r\n0\r\n\r\n", 400),
    "7.1 a size before a blank": (CHUNKED + b"1 \r\na\r\n0\r\n\r\n", 400),
    "7.1 an endless size": (CHUNKED + b"fffffffffffffffff\r\n", 400),
    "7.1 no size": (CHUNKED + b"\r\na\r\n0\r\n\r\n", 400),
    "7.1 LF alone behind a size": (CHUNKED + b"1\na\r\n0\r\n\r\n", 400),
    "7.1 LF alone behind data": (CHUNKED + b"1\r\na\n0\r\n\r\n", 400),
    "7.1 data longer than its size": (CHUNKED + b"1\r\nab\r\n0\r\n\r\n", 400),
    "7.1 LF alone at the end": (CHUNKED + b"0\n\n", 400),
    "7.1.1 LF alone in an extension": (CHUNKED + b"1;a\nb\r\na\r\n0\r\n\r\n", 400),
    "7.1.1 CRLF in a quoted extension": (CHUNKED + b'1;a="\r\n"\r\na\r\n0\r\n\r\n', 400),
    "7.1.2 a trailer that is none": (CHUNKED + b"0\r\na b\r\n\r\n", 400),
    "7.1.2 a length as a trailer": (CHUNKED + b"0\r\nContent-Length: 5\r\n\r\n", 400),
    "a target that is too long": (b"GET /" + b"a" * 1000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414),
    "a head that is too large": (b"GET / HTTP/1.1\r\nHost: a\r\nB: " + b"a" * 1000 + b"\r\n\r\n", 431),
    "too many headers": (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"a: b\r\n" * 200 + b"\r\n", 431),
    "trailers without end": (CHUNKED + b"0\r\n" + b"a: b\r\n" * 400, 431),
    "a trailer without end": (CHUNKED + b"0\r\na: " + b"b" * 3000, 431),
    "a chunk extension without end": (CHUNKED + b"1;" + b"a" * 3000, 431),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_what_is_no_request(name: str, size: int) -> None:
    """However the bytes are cut: an answer with the status, the end of the connection, and nothing behind is read."""
    data, status = BAD[name]
    http, events = served()
    for at in range(0, len(data), size):
        http.receive(data[at : at + size])
    http.receive(GET)
    assert http.stream is events.streams[-1] and len(events.lost) == len(events.streams) - 1
    code, fields, _ = answered(http, events)
    assert (code, fields[b"connection"], http.ended) == (status, b"close", True)
    http.receive(GET)
    assert http.stream is None and sent(http) == b""


@pytest.mark.parametrize("begun", [False, True])
def test_a_body_that_breaks_off(begun: bool) -> None:
    """The answer is 400 in place of the one that was on its way, and a cut where it has begun."""
    http, events = served()
    http.receive(CHUNKED + b"1\r\na\r\n")
    if begun:
        events.streams[0].begin(200, [])
        sent(http)
    http.receive(b"none\r\n\r\n")
    assert events.lost == events.streams[:1] and http.ended == begun
    if not begun:
        assert answered(http, events)[0] == 400
    assert sent(http) == b"" and http.ended


# --- what is one


@pytest.mark.parametrize(
    ("target", "host", "path"),
    [
        (b"http://b/x?y=z", b"b", "/x"),
        (b"HTTP://b:80", b"b:80", "/"),
        (b"http://b?y=z", b"b", "/"),
        (b"/http://b/", b"a", "/http://b/"),
    ],
)
def test_the_host_of_an_absolute_target_counts(target: bytes, host: bytes, path: str) -> None:
    """Whoever passed the request on looked at it, and not at the header (3.2.2)."""
    http, events = served()
    http.receive(b"GET %s HTTP/1.1\r\nHost: a\r\n\r\n" % target)
    head = events.streams[0].head
    assert (head.by_name[b"host"], head.path) == (host, path)
    assert [value for name, value in head.fields if name == b"host"] == [host]


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("framing", "body"),
    [
        (b"", b""),
        (b"Content-Length: 0\r\n", b""),
        (b"Content-Length: 3\r\n", b"abc"),
        (b"Transfer-Encoding: chunked\r\n", b"3\r\nabc\r\n0\r\n\r\n"),
    ],
)
def test_a_wish_for_another_protocol_is_ignored(framing: bytes, body: bytes, size: int) -> None:
    """Java's client sends one with its first request, which has a body as any other."""
    found, http = requests(HEAD + UPGRADE + framing + b"\r\n" + body + b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", size)
    assert found == [("POST", b"/", b"abc" if body else b"")] and http.ended


def test_connect_ends_the_connection() -> None:
    """What follows it isn't HTTP."""
    found, http = requests(b"CONNECT b:80 HTTP/1.1\r\nHost: b:80\r\nContent-Length: 3\r\n\r\n" + GET)
    assert found == [("CONNECT", b"b:80", b"")] and http.ended


#: What another server, or a proxy in front, might take for a request of its own.
INNER = b"GET /inner HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"Content-Length: %d\r\n\r\n" % len(INNER) + INNER,
        HEAD + b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % (5 + len(INNER)) + INNER,
        HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + INNER,
        HEAD + b"Content-Length: 0\r\nContent-Length: %d\r\n\r\n" % len(INNER) + INNER,
        HEAD + b"Transfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n" + INNER,
        HEAD + b"Transfer-Encoding: identity\r\n\r\n" + INNER,
        HEAD + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + INNER,
        HEAD + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n" + INNER,
        HEAD + b"X: y\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + INNER,
        HEAD + b"X: y\rTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + INNER,
        HEAD + b"Content-Length\0: 0\r\n\r\n" + INNER,
        CHUNKED + b"0\n\r\n" + INNER,
        CHUNKED + b"1\r\na\r\n0;\n\r\n" + INNER,
        CHUNKED + b"100000000\r\n" + INNER,
        CHUNKED + b"10000000000000000\r\n" + INNER,
        b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + INNER,
        HEAD + UPGRADE + b"Content-Length: %d\r\n\r\n" % len(INNER) + INNER,
        HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(INNER) + INNER,
    ],
)
def test_no_request_within_another(data: bytes, size: int) -> None:
    """Where readers might disagree about a message's end, nothing behind it is read on the same connection."""
    found, _ = requests(data, size)
    assert b"/inner" not in [target for _, target, _ in found]


# --- what waits


def test_a_client_that_sends_ahead_waits() -> None:
    """Neither a body that nobody takes nor later requests fill the memory."""
    http, events = served()
    http.receive(GET)
    http.receive(GET * (UNREAD_BYTES_MAX // len(GET)))
    assert not http.full and len(events.streams) == 1
    http.receive(GET)
    assert http.full
    http, events = served()
    http.receive(HEAD + b"Content-Length: 2000000\r\n\r\n" + bytes(UNREAD_BYTES_MAX))
    assert not http.full
    http.receive(b"a")
    assert http.full and len(events.streams[0].body()) == UNREAD_BYTES_MAX + 1 and not http.full
