"""HTTP/1.1 and 1.0 for a server (RFC 9112): bytes in, streams out, and bytes back. No I/O.

httptools (llhttp) reads requests. What it leaves open is decided here: one request at a time, whose successors wait
unread; one Host; no transfer coding but chunked; no upgrade."""

from __future__ import annotations

import re
from collections import deque
from http import HTTPStatus
from typing import Any, Final

import httptools

from ts_frontend.transport.hpack import Field
from ts_frontend.transport.http2 import TURN_BYTES, Events
from ts_frontend.transport.stream import NO_BODY, Data, Fields, Head, Peer, Refusal, Stream, without_length
from ts_frontend.transport.whole import Whole, place

#: Bytes of a body that aren't taken, or of requests behind the present one, above which nothing more is read.
UNREAD_BYTES_MAX: Final = 1 << 20
#: Bodies up to this size come right behind their heads, if the client doesn't wait.
SOON_BYTES_MAX: Final = 64 * 1024
CLOSE: Final[Field] = (b"connection", b"close")
_KEEP: Final[Field] = (b"connection", b"keep-alive")
_CHUNKED: Final[Field] = (b"transfer-encoding", b"chunked")
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_BLANK: Final = re.compile(rb"[\r\n]+")
_HEAD_END: Final = re.compile(rb"\r?\n\r?\n")
_PHRASES: Final = {status.value: status.phrase.encode() for status in HTTPStatus}
LENGTH_DIGITS_MAX: Final = 18
#: Bytes of a chunked body that are parsed at once. Among them is some of the body, or they count as what is beside it.
CHUNKED_BYTES: Final = 32 * 1024
#: What ends the host of a target in the absolute form.
_AUTHORITY: Final = re.compile(rb"[/?#]")
_SPOKEN: Final = frozenset((b" HTTP/1.1", b" HTTP/1.0"))
_VERSION: Final = re.compile(rb" HTTP/\d\.\d")


class _Following(Exception):
    """A request begins in the piece in which a chunked body ends. It isn't read: the connection ends with the answer,
    and the client, which sends no second request without need, repeats it on another one."""


class _Body:
    """What a parser tells that reads a body alone."""

    def __init__(self, http: Http1) -> None:
        self.on_body, self.on_message_complete = http.on_body, http.on_message_complete
        self._begun = False

    def on_message_begin(self) -> None:
        if self._begun:
            raise _Following
        self._begun = True


class _Request:
    """What a head says. `left`: the bytes of the body, -1 if it is chunked."""

    __slots__ = ("expects", "head", "keeps", "left", "raw", "version")

    def __init__(self, raw: bytes, head: Head, version: str, left: int, *, keeps: bool, expects: bool) -> None:
        self.raw, self.head, self.version, self.left = raw, head, version, left
        self.keeps, self.expects = keeps, expects


class Http1Stream(Stream):
    """A request and its answer, one after the other on a connection. `keeps`: another one may follow."""

    __slots__ = ("chunked", "expects", "http", "keeps", "last", "no_body", "queue", "trailers")

    def __init__(self, http: Http1, head: Head, peer: Peer, *, keeps: bool) -> None:
        super().__init__(head, peer)
        self.http, self.keeps = http, keeps
        self.chunked = self.last = False
        self.no_body = head.method == "HEAD"
        self.expects = False
        self.trailers = b""
        self.queue: deque[Data] = deque()

    def wanted(self) -> None:
        if self.expects and not self.begun and not self.ended:
            self.expects = False
            self.http.out.append(_CONTINUE)
            self.http.events.wrote()

    def took(self, size: int) -> None:
        self.http.events.wrote()  # which reads on, if it stopped

    def respond(self, status: int, fields: Fields, body: Data = b"") -> None:
        if not any(name == b"content-length" for name, _ in fields) and status not in NO_BODY:
            fields = (*fields, (b"content-length", b"%d" % len(body)))
        self._begin(status, fields)
        self._write(body)
        self.finish()

    def begin(self, status: int, fields: Fields) -> None:
        self._begin(status, fields)
        self.http.events.wrote()

    def _begin(self, status: int, fields: Fields) -> None:
        if self.done or self.begun:
            return
        self.begun, self.status = True, status
        names = {name for name, _ in fields}
        more: list[Field] = []
        if status in NO_BODY:
            self.no_body = True
            fields = without_length(fields)
        elif b"content-length" not in names:
            self.chunked = self.peer.version == "1.1"
            if self.chunked:
                more.append(_CHUNKED)
            else:
                self.keeps = False
        if CLOSE in fields or self.http.closing or not (self.ended or self.http.may_skip(self, status)):
            self.keeps = False
        if not self.keeps and CLOSE not in fields:
            more.append(CLOSE)
        elif self.keeps and self.peer.version == "1.0":
            more.append(_KEEP)
        lines = [b"HTTP/1.1 %d %s\r\n" % (status, _PHRASES.get(status, b""))]
        for name, value in (*fields, *more):
            lines += (name, b": ", value, b"\r\n")
        lines.append(b"\r\n")
        self.http.out.append(b"".join(lines))

    def write(self, data: Data) -> None:
        self._write(data)
        self.http.events.wrote()

    def _write(self, data: Data) -> None:
        size = len(data)
        if self.done or self.no_body or not size:
            return
        if self.http.blocked or self.queue:
            self.queue.append(data)
            self.queued += size
            self.http.queued += size
        else:
            self._send(data, size)

    def _send(self, data: Data, size: int) -> None:
        if self.chunked:
            self.http.out += (b"%x\r\n" % size, data, b"\r\n")
        else:
            self.http.out.append(data)

    def pump(self, room: int) -> bool:
        """Sends at most about so many bytes of what is queued. Returns whether there is more."""
        queue = self.queue
        while queue and room > 0:
            data = queue.popleft()
            size = len(data)
            if size > room and not self.chunked:
                view = memoryview(data)
                data, size = view[:room], room
                queue.appendleft(view[room:])
            self._send(data, size)
            room -= size
            self.queued -= size
            self.http.queued -= size
        if queue:
            return True
        self.wake_writer()
        if self.last:
            self._complete()
        return False

    def finish(self, trailers: Fields = ()) -> None:
        if self.done:
            return
        self.trailers = b"".join([b"%s: %s\r\n" % field for field in trailers])
        self.last = self.given = True
        if not self.queue:
            self._complete()
            self.http.events.wrote()

    def _complete(self) -> None:
        if self.chunked and not self.no_body:
            self.http.out.append(b"0\r\n" + self.trailers + b"\r\n")
        self.http.answered(self)

    def abort(self, *, overloaded: bool = False) -> None:
        """Cuts the connection: an answer can't end otherwise."""
        if not self.done:
            self.http.forget(self)
            self.http.events.wrote()


class Http1:
    """One connection. `receive` reads what the client sent; `out` is to be sent, and `pump` adds what the socket held
    back. `blocked`: the socket takes nothing now. `closing`: answers announce the end of the connection. `ended`: the
    connection is to be closed once `out` is sent. `queued`: the bytes of the answer that wait. `whole`: the place of
    the body that is arriving; the socket's bytes may be read into it, and told by `placed`."""

    def __init__(self, events: Events, client: Peer, head_bytes_max: int, body_bytes_max: int = 0) -> None:
        self.events, self._head_bytes_max, self._body_bytes_max = events, head_bytes_max, body_bytes_max
        self.out: list[Data] = []
        self.blocked = self.closing = self.ended = False
        self.queued = 0
        self.stream: Http1Stream | None = None
        self.soon = False  # the body of `stream` is small, and usually comes right behind its head
        self._peers = {
            version: Peer(client.client, client.server, version, client.scheme, client.certificate)
            for version in ("1.0", "1.1")
        }
        self._rest = b""
        self._searched = 0  # bytes of the rest in which no head ends
        self._receiving = False  # the body of `stream`
        self.whole: Whole | None = None
        self._left = -1  # bytes of the body still to come; -1: it is chunked
        self._beside = 0  # bytes of a chunked body since its last data
        self._parser: Any = None  # of the head, and of a chunked body
        self._raw = b""
        self._known: _Request | None = None  # the last one: most clients repeat their heads
        self._target: list[bytes] = []
        self._fields: list[Field] = []
        self._head_done = False

    @property
    def full(self) -> bool:
        """Whether nothing more should be read from the socket."""
        stream, whole = self.stream, self.whole
        if stream is None:
            return False
        if whole is not None:
            return whole.count is None and whole.filled > UNREAD_BYTES_MAX
        return stream.pieces_bytes > UNREAD_BYTES_MAX or (not self._receiving and len(self._rest) > UNREAD_BYTES_MAX)

    @property
    def within_head(self) -> bool:
        """Whether a request's head has begun and isn't complete."""
        return self.stream is None and bool(self._rest)

    def receive(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
            self._rest = b""
        at = 0
        while at < len(data) and not self.ended:
            if self._receiving:
                at = self._read_body(data, at)
            elif self.stream is not None:
                break  # the next request waits
            else:
                begin, at = at, self._read_head(data, at)
                if at == begin:
                    break
        if at < len(data) and not self.ended:
            self._rest = data[at:] if at else data

    # --- heads

    def _read_head(self, data: bytes, at: int) -> int:
        if data[at] in b"\r\n":  # empty lines before the request (2.2)
            blank = _BLANK.match(data, at)
            return at if blank is None else blank.end()
        known = self._known
        if known is not None and data.startswith(known.raw, at):
            self._searched = 0
            self._begin(known)
            return at + len(known.raw)
        found = _HEAD_END.search(data, at + max(0, self._searched - 3))
        size = (found.end() if found else len(data)) - at
        if size > self._head_bytes_max:
            status = 431 if b"\n" in data[at : at + self._head_bytes_max] else 414
            self._refuse(Refusal(status, f"The request's head is larger than {self._head_bytes_max} bytes"))
            return len(data)
        if found is None:
            self._searched = size
            return at
        self._searched = 0
        end = found.end()
        raw = data[at:end]
        line_end = data.find(b"\n", at) - 1
        spoken = data[max(at, line_end - 9) : line_end]
        if spoken not in _SPOKEN:
            status = 505 if _VERSION.fullmatch(spoken) else 400
            text = f"The request line ends with {spoken.decode('latin-1')!r}, not HTTP/1.1"
            self._refuse(Refusal(status, text))
        else:
            self._parser, self._raw = httptools.HttpRequestParser(self), raw
            if self._feed(raw) and self.stream is None and not self.ended:
                self._refuse(Refusal(400, "The request's head is malformed"))
        return end

    def _feed(self, data: bytes) -> bool:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # answered as any other request, after which the connection ends
            self._known = None
            if self.stream is not None:
                self.stream.keeps = False
                if self._left < 0 and self.stream.head.method != "CONNECT":
                    self._read_on(self.stream)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            if isinstance(cause, Refusal):
                self._refuse(cause)
            elif isinstance(cause, _Following) and self.stream is not None:
                self.stream.keeps = False
            else:
                raise
            return False
        except httptools.HttpParserInvalidMethodError:
            self._refuse(Refusal(501, "The method isn't one of HTTP"))
            return False
        except httptools.HttpParserError as error:
            self._refuse(Refusal(400, f"The request isn't HTTP: {error}"))
            return False
        return True

    def _read_on(self, stream: Http1Stream) -> None:
        """Reads the chunked body of a request for an upgrade, which the parser takes for the other protocol."""
        self._parser = httptools.HttpRequestParser(_Body(self))
        self._parser.feed_data(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
        self._receiving, stream.ended = True, False

    def _refuse(self, refusal: Refusal) -> None:
        self.whole = None
        former = self.stream
        begun = former is not None and former.begun
        if former is not None:
            self.forget(former)
            self.events.left(former)
        self._receiving = False
        self._rest = b""
        if not begun:
            self.ended = False
            self._open(Head("", b"", (), refusal), "1.1", keeps=False).ended = True

    def _open(self, head: Head, version: str, *, keeps: bool, soon: bool = False) -> Http1Stream:
        self.soon = soon
        self.stream = stream = Http1Stream(self, head, self._peers[version], keeps=keeps and head.refusal is None)
        stream.whole = self.whole
        self.events.opened(stream)
        return stream

    # --- what the parser found

    def on_message_begin(self) -> None:
        if self.stream is not None:
            raise _Following
        self._target, self._fields, self._head_done = [], [], False

    def on_url(self, part: bytes) -> None:
        self._target.append(part)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_done:  # trailers are ignored (7.1.2)
            self._fields.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        self._head_done = True
        parser = self._parser
        version = parser.get_http_version()
        if version not in self._peers:  # such as `CONNECT HTTP/1.1`, which names a target alone
            raise Refusal(505, f"HTTP {version} isn't spoken here; use HTTP/1.1 or HTTP/2")
        method, target = parser.get_method().decode("latin-1"), b"".join(self._target)
        fields = self._fields
        names = [name for name, _ in fields]
        hosts = names.count(b"host")
        if hosts > 1 or (not hosts and version == "1.1"):
            raise Refusal(400, f"A request has one Host header, not {hosts}")
        if target[:1] not in (b"/", b"*") and method != "CONNECT":  # the absolute form's host counts (3.2.2)
            host = _AUTHORITY.split(target.partition(b"://")[2], 1)[0]
            fields = [*[field for field in fields if field[0] != b"host"], (b"host", host)]
        head = Head(method, target, tuple(fields))
        named = head.by_name
        coding, length = named.get(b"transfer-encoding"), named.get(b"content-length", b"0")
        if coding is not None:
            several = names.count(b"transfer-encoding") > 1
            if several or coding.lower() != b"chunked" or version == "1.0":
                text = "several codings" if several else repr(coding.decode("latin-1"))
                raise Refusal(501, f"The transfer coding {text} isn't supported; use chunked with HTTP/1.1")
        if len(length) > LENGTH_DIGITS_MAX or not length.isdigit():
            raise Refusal(400, f"The Content-Length {length.decode('latin-1')!r} isn't a length")
        # Another expectation is ignored (RFC 9110, 10.1.1): clients send texts of their own.
        expects = named.get(b"expect", b"").lower() == b"100-continue" and version == "1.1"
        left = 0 if method == "CONNECT" else -1 if coding is not None else int(length)
        request = _Request(self._raw, head, version, left, keeps=bool(parser.should_keep_alive()), expects=expects)
        self._known = request if left >= 0 else None
        self._begin(request)

    def _begin(self, request: _Request) -> None:
        self._left = request.left
        self._receiving, self._beside = self._left != 0, 0
        soon = 0 < self._left <= SOON_BYTES_MAX and not request.expects
        self.whole = place(self._left, self._body_bytes_max) if self._left > SOON_BYTES_MAX else None
        stream = self._open(request.head, request.version, keeps=request.keeps, soon=soon)
        stream.expects, stream.ended = request.expects, not self._receiving

    def on_body(self, piece: bytes) -> None:
        self._beside = 0
        if self.stream is not None:
            self.stream.expects = False
            self.stream.add(piece)

    def on_message_complete(self) -> None:
        if self._left > 0:
            return  # it is one without a body to the parser, which reads the head alone
        self._receiving, self.whole = False, None
        if self.stream is not None:
            self.stream.ended = True

    # --- bodies

    def _read_body(self, data: bytes, at: int) -> int:
        """Reads the body's next bytes, and returns the position after them."""
        stream, whole = self.stream, self.whole
        if whole is not None:
            end = min(len(data), at + self._left)
            whole.add(memoryview(data)[at:end])
            self._placed(end - at)
        elif self._left >= 0:
            end = min(len(data), at + self._left)
            self._left -= end - at
            self.on_body(data[at:end] if at or end < len(data) else data)
            if not self._left:
                self.on_message_complete()
        else:
            end = min(len(data), at + CHUNKED_BYTES)
            self._beside += end - at
            if self._feed(data[at:end]) and self._receiving and self._beside > self._head_bytes_max:
                self._refuse(Refusal(431, f"The body has more than {self._head_bytes_max} bytes beside its data"))
        if stream is not None and not stream.done and whole is None:
            stream.wake_reader()
        return end

    def placed(self, size: int) -> None:
        """So many bytes of the body are in their place."""
        if self.whole is not None:
            self.whole.filled += size
            self._placed(size)

    def _placed(self, size: int) -> None:
        stream, whole = self.stream, self.whole
        self._left -= size
        if not self._left:
            self.on_message_complete()
        if stream is not None:
            stream.expects = False
            if stream.ended:
                stream.wake_reader()
            elif whole is not None and whole.count is not None:
                whole.count(whole.filled)

    # --- answers

    def pump(self) -> bool:
        """Gives the socket more of what is queued. Returns whether there is more."""
        return self.stream is not None and bool(self.stream.queue) and self.stream.pump(TURN_BYTES)

    def answered(self, stream: Http1Stream) -> None:
        """All of an answer is given: the next request may be read."""
        stream.done = True
        self.stream = None
        if not stream.keeps:
            self.ended, self.whole = True, None
        elif self._rest:
            data, self._rest = self._rest, b""
            self.receive(data)

    def may_skip(self, stream: Http1Stream, status: int) -> bool:
        """Whether the rest of a body may be skipped, so that another request can follow: it will come, and is small."""
        return status < 400 and not stream.expects and 0 <= self._left <= UNREAD_BYTES_MAX

    def forget(self, stream: Http1Stream) -> None:
        stream.done = self.ended = True
        self.queued -= stream.queued
        stream.queued = 0
        stream.queue.clear()
        stream.wake_writer()
        self.stream = self.whole = None

    def go_away(self, *, soon: bool = False) -> None:
        """Takes no more requests; the connection ends with the present one. `soon`: one that is on its way is taken."""
        self.closing = True
        if not soon and self.stream is None:
            self.ended = True

    def lose(self) -> None:
        self.ended = True
        self._parser = self.whole = None  # which refers to this object
        stream = self.stream
        if stream is not None:
            self.forget(stream)
            self.events.left(stream)
