"""POST requests of one event loop, over HTTP/1.1 connections that stay open.

`http.client` would need a thread for each call, and the two switches between threads cost more than a small call
itself.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import NoReturn, TypeVar, cast

from ts.compat.kserve_api.grpc_channel import MESSAGE_BYTES_MAX, Unanswered
from ts.protocol.codes import Code

T = TypeVar("T")

#: The most connections to a server.
OPEN_MAX = 64
#: The longest head of an answer, and the longest line between two chunks.
HEAD_BYTES_MAX, LINE_BYTES_MAX = 1 << 16, 1 << 12
#: The largest body: protobuf's largest message, which limits answers over gRPC.
BODY_BYTES_MAX = MESSAGE_BYTES_MAX
_LATE = "the predictor didn't answer in time"
_HEAD_END, _LINE_END = b"\r\n\r\n", b"\r\n"
_VERSIONS = (b"http/1.1", b"http/1.0")
_SIZE = re.compile(rb"[0-9a-f]{1,15}")
_UNSENDABLE = re.compile("[\r\n\0]")
_SWITCHING, _FIRST_FINAL, _WITHOUT_BODY = 101, 200, (204, 304)


class BadAnswer(ValueError):
    """Bytes that are no answer of HTTP/1.1."""


class PostAnswer:
    """The answer to one POST, read from bytes that come in pieces of any size. Pure. `keeps_open`: the connection can
    take another request after it."""

    __slots__ = ("_ends_with_connection", "_left", "_missing", "_pieces", "_size", "_stage", "keeps_open", "status")

    def __init__(self) -> None:
        self.status = 0
        self.keeps_open = False
        self._stage: Callable[[bytes, int], int | None] = self._head
        self._left = b""
        self._pieces: list[bytes] = []
        self._missing = self._size = 0
        self._ends_with_connection = False

    @property
    def is_begun(self) -> bool:
        return bool(self.status or self._left)

    @property
    def body(self) -> bytes:
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)

    def feed(self, data: bytes) -> bool:
        """Reads the next bytes, and returns whether the answer is complete. Raises BadAnswer."""
        if self._left:
            data, self._left = self._left + data, b""
        at = 0
        while True:
            end = self._stage(data, at)
            if end is None:
                return False
            at = end
            if self._stage == self._end:
                self.keeps_open &= at == len(data)
                return True

    def ends(self) -> bool:
        """Whether the end of the connection completes the answer."""
        return self._ends_with_connection

    # --- stages: each gets the position of its part, and returns the one after it, or None when it needs more

    def _head(self, data: bytes, at: int) -> int | None:
        end = data.find(_HEAD_END, at, at + HEAD_BYTES_MAX + len(_HEAD_END))
        if end < 0:
            return self._wait(data, at, HEAD_BYTES_MAX, len(_HEAD_END))
        first, *lines = data[at:end].lower().split(_LINE_END)
        version, _, said = first.partition(b" ")
        if version not in _VERSIONS or not said[:3].isdigit() or len(said) < 3:
            raise BadAnswer("it speaks no HTTP/1.1")
        status = int(said[:3])
        end += len(_HEAD_END)
        if status < _FIRST_FINAL:
            if status == _SWITCHING:
                raise BadAnswer("it changes to another protocol")
            return end
        self.status = status
        sizes, codings, options = set(), b"", b""
        for line in lines:
            name, _, value = line.partition(b":")
            if name == b"content-length":
                sizes.add(value.strip())
            elif name == b"transfer-encoding":
                codings += b"," + value
            elif name == b"connection":
                options += b"," + value
        self._body_follows(sizes, [one.strip() for one in codings.split(b",") if one.strip()])
        given = {one.strip() for one in options.split(b",")}
        self.keeps_open = not self._ends_with_connection and not (sizes and codings) and b"close" not in given
        self.keeps_open &= version == _VERSIONS[0] or b"keep-alive" in given
        return end

    def _body_follows(self, sizes: set[bytes], codings: list[bytes]) -> None:
        """Chooses the stage after the head."""
        if self.status in _WITHOUT_BODY:
            self._stage = self._end
        elif codings:
            if codings != [b"chunked"]:
                raise BadAnswer(f"it is coded as {b', '.join(codings).decode('latin-1')}")
            self._stage = self._chunk_size
        elif sizes:
            size = sizes.pop()
            if sizes or not size.isdigit() or len(size) > 15:
                raise BadAnswer("its size is no number")
            self._missing = int(size)
            self._count(self._missing)
            self._stage = self._sized if self._missing else self._end
        else:
            self._stage, self._ends_with_connection = self._unsized, True

    def _count(self, more: int) -> None:
        """Counts bytes of the body."""
        self._size += more
        if self._size > BODY_BYTES_MAX:
            raise BadAnswer(f"its body is over {BODY_BYTES_MAX} bytes")

    def _taken(self, data: bytes, at: int) -> int | None:
        """Takes the missing bytes of the body, or of a chunk, as far as they are there."""
        end = at + self._missing
        piece = data[at:end] if at or end < len(data) else data
        if piece:
            self._pieces.append(piece)
        self._missing -= len(piece)
        return None if self._missing else end

    def _sized(self, data: bytes, at: int) -> int | None:
        end = self._taken(data, at)
        if end is not None:
            self._stage = self._end
        return end

    def _unsized(self, data: bytes, at: int) -> None:
        self._count(len(data) - at)
        if at < len(data):
            self._pieces.append(data[at:])

    def _line(self, data: bytes, at: int) -> int | None:
        """The end of the line at this position."""
        end = data.find(_LINE_END, at, at + LINE_BYTES_MAX + len(_LINE_END))
        return end if end >= 0 else self._wait(data, at, LINE_BYTES_MAX, len(_LINE_END))

    def _chunk_size(self, data: bytes, at: int) -> int | None:
        end = self._line(data, at)
        if end is None:
            return None
        size = _SIZE.fullmatch(data[at:end].partition(b";")[0].strip().lower())
        if size is None:
            raise BadAnswer("the size of a chunk is no number")
        self._missing = int(size[0], 16)
        self._count(self._missing)
        self._stage = self._chunk if self._missing else self._trailer
        return end + len(_LINE_END)

    def _chunk(self, data: bytes, at: int) -> int | None:
        end = self._taken(data, at)
        if end is not None:
            self._stage = self._chunk_end
        return end

    def _chunk_end(self, data: bytes, at: int) -> int | None:
        end = at + len(_LINE_END)
        if len(data) < end:
            return self._wait(data, at, LINE_BYTES_MAX, len(_LINE_END))
        if data[at:end] != _LINE_END:
            raise BadAnswer("a chunk is longer than its size")
        self._stage = self._chunk_size
        return end

    def _trailer(self, data: bytes, at: int) -> int | None:
        """Skips the fields after the last chunk, up to an empty line."""
        end = self._line(data, at)
        if end is None:
            return None
        if end == at:
            self._stage = self._end
        return end + len(_LINE_END)

    def _end(self, data: bytes, at: int) -> NoReturn:
        raise AssertionError("nothing is read after the end")

    def _wait(self, data: bytes, at: int, most: int, end_bytes: int) -> int | None:
        """Keeps the bytes of an incomplete part until more come. `most`: without the end of the part."""
        if len(data) - at >= most + end_bytes:
            raise BadAnswer(f"a part of its head is over {most} bytes")
        self._left = data[at:]
        return None


class Connections:
    """POST requests to `host`, HOST or HOST:PORT. Connections are kept between requests; one that the server has closed
    while it was idle is replaced."""

    def __init__(self, host: str, tls: ssl.SSLContext | None = None) -> None:
        name, _, port = host.rpartition(":") if host.rpartition("]")[2].count(":") == 1 else (host, "", "")
        if port and not port.isdecimal():
            raise ValueError(f"{host!r} is no HOST:PORT")
        self._host, self._name, self._tls = host, name.strip("[]"), tls
        self._port = int(port or (80 if tls is None else 443))
        self._idle: list[_Connection] = []
        self._turns = asyncio.Semaphore(OPEN_MAX)

    async def post(self, path: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> tuple[int, bytes]:
        """Status and body of the answer. Raises Unanswered; ValueError for a header that can't be sent."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        request = self._head(path, len(body), headers) + body
        if self._turns.locked():
            await _in_time(self._turns.acquire(), timeout_s)
        else:
            await self._turns.acquire()
        try:
            while True:
                connection = self._unused()
                is_new = connection is None
                if connection is None:
                    connection = await self._connected(end_s - loop.time())
                try:
                    answer = await connection.ask(request, end_s)
                except _Lost as error:
                    if is_new or error.is_begun:
                        text = f"the predictor {self._host} can't be reached: {error}"
                        raise Unanswered(Code.UNAVAILABLE, text) from error
                    continue  # the server had closed it before the request came
                if connection.is_usable and answer.keeps_open:
                    self._idle.append(connection)
                else:
                    connection.abort()
                return answer.status, answer.body
        finally:
            self._turns.release()

    def close(self) -> None:
        """Closes the idle connections."""
        while self._idle:
            self._idle.pop().abort()

    def _unused(self) -> _Connection | None:
        while self._idle:
            found = self._idle.pop()
            if found.is_usable:
                return found
        return None

    async def _connected(self, timeout_s: float) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            made = loop.create_connection(_Connection, self._name, self._port, ssl=self._tls)
            return (await _in_time(made, timeout_s))[1]
        except OSError as error:  # ssl.SSLError is one
            text = f"the predictor {self._host} can't be reached: {error}"
            raise Unanswered(Code.UNAVAILABLE, text, unseen=True) from error

    def _head(self, path: str, size: int, headers: Mapping[str, str]) -> bytes:
        lines = [f"POST {path} HTTP/1.1", f"host: {self._host}", "accept-encoding: identity", f"content-length: {size}"]
        for name, value in headers.items():
            if _UNSENDABLE.search(value):
                raise ValueError(f"the header {name} has a line end in it")
            lines.append(f"{name}: {value}")
        return "\r\n".join((*lines, "\r\n")).encode("latin-1")


async def _in_time(waited_for: Awaitable[T], timeout_s: float) -> T:
    try:
        return await asyncio.wait_for(waited_for, max(timeout_s, 0.001))
    except asyncio.TimeoutError:
        raise Unanswered(Code.DEADLINE_EXCEEDED, _LATE) from None


class _Lost(Exception):
    """The connection ended, or became unusable, before the answer was complete. `is_begun`: a part of it came."""

    def __init__(self, reason: str, is_begun: bool) -> None:
        super().__init__(reason)
        self.is_begun = is_begun


class _Connection(asyncio.Protocol):
    """One connection, which answers one request at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._answer = PostAnswer()
        self._done: asyncio.Future[PostAnswer] | None = None

    @property
    def is_usable(self) -> bool:
        return not self._transport.is_closing() and not self._transport.get_write_buffer_size()

    def abort(self) -> None:
        self._transport.abort()

    async def ask(self, request: bytes, end_s: float) -> PostAnswer:
        """The answer, whatever its status. Raises Unanswered, after which the connection is closed, and _Lost."""
        answer = self._answer = PostAnswer()
        done = self._done = self._loop.create_future()
        alarm = self._loop.call_at(end_s, self._fail, Unanswered(Code.DEADLINE_EXCEEDED, _LATE))
        self._transport.write(request)
        try:
            await done
        except BaseException:
            self.abort()
            raise
        finally:
            self._done = None
            alarm.cancel()
        return answer

    def _fail(self, error: Unanswered | _Lost) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    def _succeed(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(self._answer)

    # --- asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():  # bytes that nobody asked for
            self.abort()
            return
        try:
            if self._answer.feed(data):
                self._succeed()
        except BadAnswer as error:
            self._fail(_Lost(f"its answer can't be read: {error}", is_begun=True))

    def connection_lost(self, error: Exception | None) -> None:
        if error is None and self._answer.ends():
            self._succeed()
        else:
            reason = f"the connection was lost{f': {error}' if error else ''}"
            self._fail(_Lost(reason, self._answer.is_begun))
