"""A request and its answer, the same for both versions of HTTP. No I/O.

`Http2Stream` and `Http1Stream` are the two forms. What serves a stream reads `head`, takes the body as it arrives, and
gives the answer in one call or in pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, TypeAlias
from urllib.parse import unquote

from ts_frontend.transport.hpack import Field
from ts_frontend.transport.whole import Whole

if TYPE_CHECKING:
    from asyncio import Future

Fields: TypeAlias = "Sequence[Field]"
Data: TypeAlias = "bytes | bytearray | memoryview"
#: Smaller pieces of a body are joined as they arrive: an object for a byte would cost fifty times as much.
SMALL_PIECE_BYTES: Final = 1024
#: Statuses of answers that have no body.
NO_BODY: Final = frozenset((204, 304))


def without_length(fields: Fields) -> Fields:
    """The headers of an answer whose status has no body, so that no client waits for one."""
    return [field for field in fields if field[0] != b"content-length"]


class Refusal(Exception):
    """A request that is answered with a status without being served, and why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


#: A path (RFC 3986, 3.3), with a little more than it allows.
_PATH: Final = re.compile(rb"/(?:[!-$&-~]|%[0-9A-Fa-f]{2})*|\*?")


class Head:
    """A request's method, target and headers. `path` is percent-decoded, `query` is as it was sent (after the `?`);
    names in `fields` are lower case. `by_name`: the last value of each name. `refusal`: why it can't be served. Streams
    of a connection may share one: it isn't changed."""

    __slots__ = ("by_name", "fields", "method", "path", "query", "refusal", "target")

    def __init__(self, method: str, target: bytes, fields: Fields, refusal: Refusal | None = None) -> None:
        self.method, self.target, self.fields, self.refusal = method, target, fields, refusal
        self.by_name: dict[bytes, bytes] = dict(fields)
        path, _, self.query = target.partition(b"?")
        if path[:1] not in (b"/", b"*") and b"://" in path:  # the absolute form, for proxies
            path = b"/" + path.partition(b"://")[2].partition(b"/")[2]
        if refusal is None and not _PATH.fullmatch(path) and method != "CONNECT":
            self.refusal = Refusal(400, f"The path {path[:80].decode('latin-1')!r} isn't one of a URL")
        text = path.decode("latin-1")
        self.path = _unquoted(text) if "%" in text else text


def _unquoted(path: str) -> str:
    """The decoded path; the same if it isn't UTF-8."""
    try:
        return unquote(path, errors="strict")
    except UnicodeDecodeError:
        return path


_FORGOTTEN: Final = Head("", b"", ())


class Peer:
    """The two ends of a connection: host and port, None for a Unix socket. `version`: HTTP's, "2", "1.1" or "1.0".
    `certificate`: the name in the client's certificate, "" without one."""

    __slots__ = ("certificate", "client", "scheme", "server", "version")

    def __init__(
        self,
        client: tuple[str, int] | None,
        server: tuple[str, int] | None,
        version: str,
        scheme: str = "http",
        certificate: str = "",
    ) -> None:
        self.client, self.server, self.version, self.scheme = client, server, version, scheme
        self.certificate = certificate

    @property
    def name(self) -> str:
        """HOST:PORT of the client, "unix" for a client of a Unix socket."""
        return "unix" if self.client is None else f"{self.client[0]}:{self.client[1]}"

    @property
    def host(self) -> str:
        """The client's address, "unix" for a client of a Unix socket."""
        return "unix" if self.client is None else self.client[0]


class Stream:
    """One request and its answer.

    `ended`: all of the request has arrived. `begun`: the answer's status has been given; `given`: all of it has.
    `done`: all of the answer was sent, or the client has left. `queued`: the bytes of the answer that wait for the
    client, with `queued_s` as the time when the client last took some. `reader` and `writer` are woken when a piece
    arrives, and when nothing is queued any longer. `whole`: the place of a large body, whose reader is woken at the end
    alone. `status`: that of the answer, 0 before. `request_id`: the id under
    which it is served, "" before. `task`: what serves it."""

    __slots__ = (
        *("begun", "done", "ended", "given", "head", "peer", "pieces", "pieces_bytes", "queued", "queued_s"),
        *("reader", "request_id", "status", "task", "whole", "writer"),
    )

    def __init__(self, head: Head, peer: Peer) -> None:
        self.head, self.peer = head, peer
        self.ended = self.begun = self.given = self.done = False
        self.pieces: list[bytes | bytearray] = []
        self.pieces_bytes = 0
        self.whole: Whole | None = None
        self.queued, self.queued_s = 0, 0.0
        self.reader: Future[None] | None = None
        self.writer: Future[None] | None = None
        self.status, self.request_id = 0, ""
        self.task: object = None

    # --- the request

    def forget_head(self) -> None:
        """Drops the head, which nobody needs any longer: the stream may last long."""
        self.head = _FORGOTTEN

    def add(self, piece: bytes) -> None:
        size = len(piece)
        if size:
            pieces = self.pieces
            self.pieces_bytes += size
            if size >= SMALL_PIECE_BYTES or not pieces:
                pieces.append(piece)
            else:
                last = pieces[-1]
                if isinstance(last, bytearray) and len(last) < SMALL_PIECE_BYTES:
                    last += piece
                else:
                    pieces.append(bytearray(piece))

    def body(self) -> bytes:
        """Takes what has arrived of the body since the last time."""
        pieces, whole = self.pieces, self.whole
        if whole is not None and self.ended:
            self.whole = None
            return whole.take()
        if not pieces:
            return b""
        self.pieces = []
        size, self.pieces_bytes = self.pieces_bytes, 0
        if not self.ended:
            self.took(size)
        first = pieces[0]
        return first if len(pieces) == 1 and isinstance(first, bytes) else b"".join(pieces)

    def body_behind(self, prefix: bytes) -> bytes | None:
        """Takes a body that has arrived, without its first bytes; None, and takes nothing, if they aren't `prefix`."""
        pieces, size = self.pieces, len(prefix)
        if not self.ended or len(pieces) < 2 or not pieces[0].startswith(prefix):
            return None
        self.pieces, self.pieces_bytes = [], 0
        return b"".join((memoryview(pieces[0])[size:], *pieces[1:]))

    def wanted(self) -> None:
        """The reader waits for more of the body."""

    def took(self, size: int) -> None:
        """So many bytes of the body have been taken: the client may send more."""

    def wake_reader(self) -> None:
        reader = self.reader
        if reader is not None:
            self.reader = None
            if not reader.done():
                reader.set_result(None)

    def wake_writer(self) -> None:
        writer = self.writer
        if writer is not None:
            self.writer = None
            if not writer.done():
                writer.set_result(None)

    # --- the answer

    def respond(self, status: int, fields: Fields, body: Data = b"") -> None:
        raise NotImplementedError

    def begin(self, status: int, fields: Fields) -> None:
        """Gives the status and headers of an answer whose body follows."""
        raise NotImplementedError

    def write(self, data: Data) -> None:
        """Gives a piece of the body. The caller waits while `queued`."""
        raise NotImplementedError

    def finish(self, trailers: Fields = ()) -> None:
        raise NotImplementedError

    def abort(self, *, overloaded: bool = False) -> None:
        """Ends the stream where it is. `overloaded`: the client asked for more than it read."""
        raise NotImplementedError
