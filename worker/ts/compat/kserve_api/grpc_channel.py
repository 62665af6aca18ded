"""Unary gRPC calls of one event loop, over an HTTP/2 connection that stays open.

grpcio's asyncio channel waits for each answer in a separate thread, which costs several times as much as a small call
itself.
"""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import cast
from urllib.parse import unquote

from ts.compat.kserve_api.header_fields import BadBlock, decoded, encoded
from ts.protocol.codes import Code

Metadata = Sequence[tuple[str, str]]

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PUSH_PROMISE = 0, 1, 3, 4, 5
_PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = 6, 7, 8, 9
_END_STREAM = _ACK = 1
_END_HEADERS, _PADDED, _PRIORITY = 4, 8, 32
_TABLE_BYTES, _PUSH, _STREAMS_MAX, _WINDOW, _FRAME_MAX = 1, 2, 3, 4, 5
_REFUSED, _CANCEL, _CALM = 7, 8, 11
#: The size of a window, and the bytes after which credit is returned: answers aren't held back.
_MOST = (1 << 31) - 1
_GIVE_BACK = 1 << 30
_USUAL_WINDOW, _USUAL_FRAME = 65_535, 16_384
_FRAME_BYTES_MAX, _FRAME_BYTES_MOST = 1 << 20, (1 << 24) - 1
#: The longest block of header fields, and the most bytes of replies that wait for a server which asks for more of them
#: (PING, SETTINGS).
HEAD_BYTES_MAX, REPLIES_BYTES_MAX = 1 << 16, 1 << 16
#: The largest message of protobuf.
MESSAGE_BYTES_MAX = _MOST
_FRAME_HEAD, _MESSAGE_HEAD = 9, 5
#: The head of a frame: its size and kind in one number, flags, stream; and of the only DATA frame of a request, with
#: the head of its message: not compressed, its size.
_HEAD_OF_FRAME, _HEAD_OF_BODY = struct.Struct(">IBI"), struct.Struct(">IBIBI")
#: The most timeouts whose fields are kept: most calls have the configured one.
_TIMEOUTS_MAX = 64
#: The most attempts of a call that failed before the server can have seen it.
_ATTEMPTS_MAX = 10
_PING_BYTES, _WORD_BYTES = 8, 4
#: Before the third attempt, doubled with each further one: a server that takes few calls at a time counts one for a
#: moment after its answer.
_PAUSE_S_FIRST = 0.002
#: The longest wait until a server that was reached announces its limits.
GREETING_S_MAX = 20.0
_BY_NUMBER = {str(code.value): code for code in Code}
#: The fields of an answer that are read.
_FIELDS = frozenset((":status", "grpc-status", "grpc-message"))
#: gRPC's statuses for HTTP statuses that don't come from a gRPC server.
_CODES = {
    "400": Code.INTERNAL,
    "401": Code.UNAUTHENTICATED,
    "403": Code.PERMISSION_DENIED,
    "404": Code.UNIMPLEMENTED,
    "429": Code.UNAVAILABLE,
    "502": Code.UNAVAILABLE,
    "503": Code.UNAVAILABLE,
    "504": Code.UNAVAILABLE,
}


class Unanswered(Exception):
    """A call has no answer. `unseen`: the server hasn't processed it."""

    def __init__(self, code: Code, message: str, unseen: bool = False) -> None:
        super().__init__(message)
        self.code, self.message, self.unseen = code, message, unseen


class Channel:
    """Calls to `target`, HOST:PORT. A broken connection, or one that the server is closing, is replaced at the next
    call."""

    def __init__(self, target: str, tls: ssl.SSLContext | None = None) -> None:
        host, _, port = target.rpartition(":")
        if not port.isdecimal():
            raise ValueError(f"{target!r} is no HOST:PORT")
        self._target, self._host, self._port, self._tls = target, host.strip("[]"), int(port), tls
        self._scheme = "http" if tls is None else "https"
        self._connection: _Connection | None = None
        self._connecting: asyncio.Task[_Connection] | None = None
        self._fields: dict[str, bytes] = {}
        if tls is not None:
            tls.set_alpn_protocols(["h2"])

    async def call(self, path: str, message: bytes, metadata: Metadata, timeout_s: float) -> bytes:
        """The answer's message. Raises Unanswered."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        for attempt in range(1, _ATTEMPTS_MAX + 1):
            connection = self._connection
            if connection is None or not connection.usable:
                connection = await self._connected(end_s - loop.time())
            left_s = max(end_s - loop.time(), 0.001)
            fields = self._head(path) + _timeout_field(math.ceil(left_s * 1000))
            if metadata:
                fields += encoded(metadata)
            try:
                return await connection.ask(fields, message, left_s)
            except Unanswered as error:
                pause_s = _PAUSE_S_FIRST * 2 ** (attempt - 2) if attempt > 1 else 0.0
                if not error.unseen or attempt == _ATTEMPTS_MAX or end_s - loop.time() <= pause_s:
                    raise
                await asyncio.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")

    async def close(self) -> None:
        """Closes the channel; running calls fail."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            await self._connection.close()

    def _head(self, path: str) -> bytes:
        """The common header fields of all calls of a path."""
        found = self._fields.get(path)
        if found is None:
            found = self._fields[path] = encoded(
                (
                    (":method", "POST"),
                    (":scheme", self._scheme),
                    (":path", path),
                    (":authority", self._target),
                    ("content-type", "application/grpc"),
                    ("te", "trailers"),
                )
            )
        return found

    async def _connected(self, timeout_s: float) -> _Connection:
        """Returns a new connection, shared by all calls that wait for one. Raises Unanswered."""
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
            self._connecting.add_done_callback(self._made)
        try:
            return await asyncio.wait_for(asyncio.shield(self._connecting), max(timeout_s, 0.001))
        except asyncio.TimeoutError:
            raise Unanswered(Code.DEADLINE_EXCEEDED, f"{self._target} can't be reached in time") from None
        except (OSError, ssl.SSLError) as error:
            raise Unanswered(Code.UNAVAILABLE, f"{self._target} can't be reached: {error}") from error

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        try:
            await asyncio.wait_for(made.greeted, GREETING_S_MAX)
        except BaseException as error:
            await made.close()
            if isinstance(error, asyncio.TimeoutError):
                raise OSError("it doesn't answer with HTTP/2's settings") from None
            raise
        return made

    def _made(self, task: asyncio.Task[_Connection]) -> None:
        self._connecting = None
        if not task.cancelled() and task.exception() is None:
            self._connection = task.result()


class _Call:
    """One request and its answer. `unsent`: the rest of its body, which waits for the server's window; `end_s`: of
    its time, by the loop's clock."""

    __slots__ = ("done", "end_s", "fields", "heard", "pieces", "size", "unsent", "window")

    def __init__(self, done: asyncio.Future[bytes], window: int, heard: int, end_s: float) -> None:
        self.done, self.window, self.heard, self.end_s = done, window, heard, end_s
        self.fields: Mapping[str, str] = {}
        self.pieces: list[bytes] = []
        self.size = 0
        self.unsent = memoryview(b"")


class _Connection(asyncio.Protocol):
    """One HTTP/2 connection, whose calls are its streams."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._calls: dict[int, _Call] = {}
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._next = 1
        #: Written at the end of the loop's turn: calls that begin together share a write, and the server's read.
        self._outgoing: list[bytes] = []
        self._left = bytearray()
        #: The bytes that the first frame in `_left` takes, once they are known.
        self._wanted = 0
        self._block: tuple[int, int, bytearray] | None = None
        self._window, self._call_window, self._frame_max = _USUAL_WINDOW, _USUAL_WINDOW, _USUAL_FRAME
        self._streams_max = _MOST
        self._given = 0
        self._heard = 0
        self._replies_bytes = 0
        #: Rings when the first call runs out of time, or earlier: most calls are answered before, and a timer of its
        #: own would cost each of them more than it is worth.
        self._alarm: asyncio.TimerHandle | None = None
        self._lost = asyncio.Event()
        self.greeted: asyncio.Future[None] = self._loop.create_future()
        self.usable = True
        self._reason = "the server ends the connection"

    # --- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        plain = transport.get_extra_info("socket")
        if plain is not None and plain.family in (socket.AF_INET, socket.AF_INET6):
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        secured = transport.get_extra_info("ssl_object")
        if secured is not None and secured.selected_alpn_protocol() != "h2":
            self._break("it offers no HTTP/2 over TLS")
            return
        settings = ((_TABLE_BYTES, 0), (_PUSH, 0), (_WINDOW, _MOST), (_FRAME_MAX, _FRAME_BYTES_MAX))
        content = b"".join(key.to_bytes(2, "big") + value.to_bytes(4, "big") for key, value in settings)
        more = (_MOST - _USUAL_WINDOW).to_bytes(4, "big")
        self._transport.write(_PREFACE + _frame(_SETTINGS, 0, 0, content) + _frame(_WINDOW_UPDATE, 0, 0, more))

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        self._lost.set()
        if self._alarm is not None:
            self._alarm.cancel()
        self._fail_all(f"the connection was lost{f': {error}' if error else ''}")

    async def close(self) -> None:
        self.usable = False
        self._transport.abort()
        await self._lost.wait()

    def _break(self, reason: str) -> None:
        """Ends a connection after a violation of HTTP/2."""
        self.usable, self._reason = False, reason
        self._fail_all(reason)
        self._transport.abort()

    def _fail_all(self, reason: str) -> None:
        if not self.greeted.done():
            self.greeted.set_exception(OSError(reason))
        for number in list(self._calls):
            self._fail(number, Unanswered(Code.UNAVAILABLE, reason))
        self._let_fail()

    def _close_if_done(self) -> None:
        if not self.usable and not self._calls:
            self._flush()
            self._transport.close()

    # --- calls

    async def ask(self, fields: bytes, message: bytes, timeout_s: float) -> bytes:
        """The answer's message. Raises Unanswered."""
        end_s = self._loop.time() + timeout_s
        while self.usable and len(self._calls) >= self._streams_max:
            await self._turn(end_s)
        number: int = self._next
        done: asyncio.Future[bytes] = self._loop.create_future()
        if number > _MOST:
            self.usable = False
        if not self.usable:
            raise Unanswered(Code.UNAVAILABLE, self._reason, unseen=True)
        self._next += 2
        call = self._calls[number] = _Call(done, self._call_window, self._heard, end_s)
        if self._alarm is None or end_s < self._alarm.when():
            self._set_alarm(end_s)
        request = self._small(number, call, fields, message) or self._large(number, call, fields, message)
        if len(self._calls) == 1:  # nobody to share a write with
            self._write(request)
        else:
            self._write_soon(request)
        try:
            return await done
        except asyncio.CancelledError:
            self._give_up(number)
            raise

    async def _turn(self, end_s: float) -> None:
        """Waits until the server accepts another call. A turn that comes while its call is cancelled goes to the next
        one; asyncio.wait_for would keep it, or the cancel, depending on Python's version."""
        turn = self._loop.create_future()
        self._waiting.append(turn)
        alarm = self._loop.call_at(end_s, self._miss, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._let_begin(1)
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise
        finally:
            alarm.cancel()

    def _miss(self, turn: asyncio.Future[None]) -> None:
        """Ends the wait for a turn that hasn't come in time."""
        if not turn.done():
            text = f"the server answers no more than {self._streams_max} calls at a time, and didn't take it in time"
            self._waiting.remove(turn)
            turn.set_exception(Unanswered(Code.DEADLINE_EXCEEDED, text))

    def _let_begin(self, most: int) -> None:
        """Lets up to `most` waiting calls begin, if the server accepts more."""
        self._end_turns(min(most, self._streams_max - len(self._calls)))

    def _let_fail(self) -> None:
        """Lets all waiting calls find out that the connection is unusable."""
        self._end_turns(len(self._waiting))

    def _end_turns(self, most: int) -> None:
        while most > 0 and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                most -= 1

    def _set_alarm(self, at_s: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._loop.call_at(at_s, self._ring)

    def _ring(self) -> None:
        """Ends the calls that have run out of time, and sets the alarm for those that haven't yet."""
        assert self._alarm is not None
        now_s, self._alarm = max(self._alarm.when(), self._loop.time()), None
        for number, call in list(self._calls.items()):
            if call.end_s <= now_s:
                self._expired(number, call)
        if self._calls:
            self._set_alarm(min(call.end_s for call in self._calls.values()))

    def _expired(self, number: int, call: _Call) -> None:
        if call.heard == self._heard:  # nothing at all since then: a connection that may be dead
            self.usable = False
        self._write(_frame(_RST_STREAM, 0, number, _CANCEL.to_bytes(4, "big")))
        self._fail(number, Unanswered(Code.DEADLINE_EXCEEDED, "it didn't answer in time"))

    def _give_up(self, number: int) -> None:
        """Cancels a call whose caller has given up."""
        if number in self._calls:
            self._write(_frame(_RST_STREAM, 0, number, _CANCEL.to_bytes(4, "big")))
            self._ended(number)

    def _ended(self, number: int) -> _Call:
        """Forgets a call and lets a waiting one begin."""
        call = self._calls.pop(number)
        if self._waiting:
            self._let_begin(1)
        if not self.usable:
            self._close_if_done()
        return call

    def _fail(self, number: int, error: Unanswered) -> None:
        done = self._ended(number).done
        if not done.done():
            done.set_exception(error)

    # --- writing

    def _write(self, data: bytes) -> None:
        """Writes at once, unless what came before is still to be written."""
        if self._outgoing:
            self._outgoing.append(data)
        elif not self._transport.is_closing():
            self._transport.write(data)

    def _write_soon(self, data: bytes) -> None:
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(data)

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if outgoing and not self._transport.is_closing():
            self._transport.write(outgoing[0] if len(outgoing) == 1 else b"".join(outgoing))

    def _reply(self, data: bytes) -> None:
        """Sends what the server asks for, unless it asks without reading."""
        if not self._transport.get_write_buffer_size():
            self._replies_bytes = 0
        self._replies_bytes += len(data)
        if self._replies_bytes > REPLIES_BYTES_MAX:
            raise BadBlock("it doesn't read the replies that it asks for")
        self._write(data)

    def _small(self, number: int, call: _Call, fields: bytes, message: bytes) -> bytes:
        """A request in two frames, the usual case; b"" if it takes more, or more than the server's windows allow."""
        size = _MESSAGE_HEAD + len(message)
        if len(fields) > self._frame_max or size > min(self._window, call.window, self._frame_max):
            return b""
        self._window -= size
        call.window -= size
        head = _HEAD_OF_FRAME.pack(len(fields) << 8 | _HEADERS, _END_HEADERS, number)
        body = _HEAD_OF_BODY.pack(size << 8 | _DATA, _END_STREAM, number, 0, len(message))
        return b"".join((head, fields, body, message))

    def _large(self, number: int, call: _Call, fields: bytes, message: bytes) -> bytes:
        """As much of any request as the server's windows allow."""
        call.unsent = memoryview(b"\0" + len(message).to_bytes(4, "big") + message)
        return b"".join((*self._head_frames(number, fields), *self._body_frames(number, call)))

    def _head_frames(self, number: int, fields: bytes) -> list[bytes]:
        most = self._frame_max
        pieces = [fields[at : at + most] for at in range(0, len(fields), most)]
        kinds = [_HEADERS] + [_CONTINUATION] * (len(pieces) - 1)
        last = len(pieces) - 1
        return [
            _frame(kind, _END_HEADERS if index == last else 0, number, piece)
            for index, (kind, piece) in enumerate(zip(kinds, pieces, strict=True))
        ]

    def _body_frames(self, number: int, call: _Call) -> list[bytes]:
        """As much of the rest of a body as the server's windows allow."""
        found = []
        while call.unsent and min(self._window, call.window) > 0:
            piece = call.unsent[: min(self._window, call.window, self._frame_max)]
            call.unsent = call.unsent[len(piece) :]
            self._window -= len(piece)
            call.window -= len(piece)
            found.append(_frame(_DATA, 0 if call.unsent else _END_STREAM, number, piece))
        return found

    def _send_rest(self) -> None:
        for number, call in list(self._calls.items()):
            if call.unsent and (frames := self._body_frames(number, call)):
                self._write(b"".join(frames))

    # --- reading

    def data_received(self, data: bytes) -> None:
        self._heard += 1
        if self._left:
            self._left += data
            if len(self._left) < self._wanted:
                return
            data = bytes(self._left)
        at, there = 0, len(data)
        try:
            while there - at >= _FRAME_HEAD:
                size, flags, number = _HEAD_OF_FRAME.unpack_from(data, at)
                kind, size = size & 255, size >> 8
                if size > _FRAME_BYTES_MAX:
                    raise BadBlock("it speaks no HTTP/2")
                start = at + _FRAME_HEAD
                end = start + size
                if end > there:
                    self._wanted = end - at
                    break
                self._take(kind, flags, number & _MOST, data[start:end])
                at = end
        except (BadBlock, IndexError) as error:
            self._break(f"its answer can't be read: {error}")
            return
        if at == there:
            self._left.clear()
            return
        self._left = bytearray(memoryview(data)[at:])
        if there - at < _FRAME_HEAD:
            self._wanted = _FRAME_HEAD

    def _take(self, kind: int, flags: int, number: int, content: bytes) -> None:
        if (self._block is None) == (kind == _CONTINUATION) or kind == _PUSH_PROMISE:
            raise BadBlock(f"a frame of kind {kind} out of its turn")
        if kind == _DATA:
            self._data(number, flags, content)
        elif kind == _HEADERS:
            if flags & (_PADDED | _PRIORITY):
                content = _unpadded(content, flags)
                content = content[5:] if flags & _PRIORITY else content
            self._headers(number, flags, content)
        elif kind == _CONTINUATION and self._block is not None:
            begun, begun_flags, block = self._block
            if begun != number:
                raise BadBlock("the header fields of two streams are mixed")
            block += content
            self._headers(number, begun_flags | flags & _END_HEADERS, block)
        elif kind == _RST_STREAM:
            self._reset(number, _word(content))
        elif kind == _SETTINGS and not flags & _ACK:
            self._settings(content)
        elif kind == _PING and not flags & _ACK:
            if len(content) != _PING_BYTES:
                raise BadBlock(f"a PING has {len(content)} bytes")
            self._reply(_frame(_PING, _ACK, 0, content))
        elif kind == _GOAWAY:
            self._going(int.from_bytes(content[:4], "big") & _MOST)
        elif kind == _WINDOW_UPDATE:
            self._widened(number, _word(content) & _MOST)

    def _data(self, number: int, flags: int, content: bytes) -> None:
        self._given += len(content)
        if self._given >= _GIVE_BACK:
            self._write(_frame(_WINDOW_UPDATE, 0, 0, self._given.to_bytes(4, "big")))
            self._given = 0
        call = self._calls.get(number)
        if call is None:
            return
        call.pieces.append(_unpadded(content, flags) if flags & _PADDED else content)
        call.size += len(call.pieces[-1])
        if call.size > MESSAGE_BYTES_MAX:
            self._write(_frame(_RST_STREAM, 0, number, _CANCEL.to_bytes(4, "big")))
            self._fail(number, Unanswered(Code.RESOURCE_EXHAUSTED, f"its answer has over {MESSAGE_BYTES_MAX} bytes"))
        elif flags & _END_STREAM:
            self._complete(number)

    def _headers(self, number: int, flags: int, block: bytes | bytearray) -> None:
        if len(block) > HEAD_BYTES_MAX:
            raise BadBlock(f"a block of header fields has over {HEAD_BYTES_MAX} bytes")
        if not flags & _END_HEADERS:
            self._block = number, flags, block if isinstance(block, bytearray) else bytearray(block)
            return
        self._block = None
        call = self._calls.get(number)
        if call is None:
            return
        found = decoded(bytes(block), _FIELDS)
        call.fields = {**call.fields, **found} if call.fields else found
        if flags & _END_STREAM:
            self._complete(number)

    def _reset(self, number: int, reason: int) -> None:
        if number not in self._calls:
            return
        if reason == _REFUSED:
            self._fail(number, Unanswered(Code.UNAVAILABLE, "the server refused the call", unseen=True))
        else:
            code = {_CANCEL: Code.CANCELLED, _CALM: Code.RESOURCE_EXHAUSTED}.get(reason, Code.INTERNAL)
            self._fail(number, Unanswered(code, f"the server ended the call, with HTTP/2's error {reason}"))

    def _settings(self, content: bytes) -> None:
        for at in range(0, len(content) - 5, 6):
            key, value = int.from_bytes(content[at : at + 2], "big"), int.from_bytes(content[at + 2 : at + 6], "big")
            if key == _STREAMS_MAX:
                self._streams_max = value
            elif key == _FRAME_MAX:
                if not _USUAL_FRAME <= value <= _FRAME_BYTES_MOST:
                    raise BadBlock(f"it announces frames of {value} bytes")
                self._frame_max = value
            elif key == _WINDOW:
                if value > _MOST:
                    raise BadBlock(f"it announces windows of {value} bytes")
                for call in self._calls.values():
                    call.window += value - self._call_window
                self._call_window = value
        self._reply(_frame(_SETTINGS, _ACK, 0, b""))
        if not self.greeted.done():
            self.greeted.set_result(None)
        self._let_begin(len(self._waiting))
        self._send_rest()

    def _going(self, last: int) -> None:
        """Handles GOAWAY: the server accepts no more calls, and hasn't processed those after `last`."""
        self.usable = False
        for number in [one for one in self._calls if one > last]:
            self._fail(number, Unanswered(Code.UNAVAILABLE, self._reason, unseen=True))
        self._let_fail()
        self._close_if_done()

    def _widened(self, number: int, more: int) -> None:
        if number == 0:
            self._window += more
        elif number in self._calls:
            self._calls[number].window += more
        self._send_rest()

    def _complete(self, number: int) -> None:
        """Handles the end of an answer."""
        call = self._calls[number]
        if call.unsent:
            self._write(_frame(_RST_STREAM, 0, number, _CANCEL.to_bytes(4, "big")))
        self._ended(number)
        if call.done.done():
            return
        try:
            call.done.set_result(_message(call))
        except Unanswered as error:
            call.done.set_exception(error)


def _message(call: _Call) -> bytes:
    """Raises Unanswered for an answer with another status than OK."""
    fields = call.fields
    status = fields.get("grpc-status")
    if status != "0":
        http = fields.get(":status", "")
        if status is None and http != "200":
            code = _CODES.get(http, Code.UNKNOWN)
            raise Unanswered(code, f"the answer has HTTP status {http[:3] or 'none'}, and none of gRPC")
        code = _BY_NUMBER.get(status or "", Code.UNKNOWN)
        raise Unanswered(code, unquote(fields.get("grpc-message", "")) or code.name)
    data = call.pieces[0] if len(call.pieces) == 1 else b"".join(call.pieces)
    size = int.from_bytes(data[1:_MESSAGE_HEAD], "big")
    if len(data) < _MESSAGE_HEAD or data[0] or len(data) != _MESSAGE_HEAD + size:
        raise Unanswered(Code.INTERNAL, f"{len(data)} bytes of answer aren't one message without compression")
    return data[_MESSAGE_HEAD:]


def _frame(kind: int, flags: int, number: int, content: bytes | memoryview) -> bytes:
    return b"".join((_HEAD_OF_FRAME.pack(len(content) << 8 | kind, flags, number), content))


def _word(content: bytes) -> int:
    """The number of a frame that has nothing else."""
    if len(content) != _WORD_BYTES:
        raise BadBlock(f"a frame with a number has {len(content)} bytes")
    return int.from_bytes(content, "big")


def _unpadded(content: bytes, flags: int) -> bytes:
    if not flags & _PADDED:
        return content
    if content[0] >= len(content):
        raise BadBlock("a frame is padded by more than it has")
    return content[1 : len(content) - content[0]]


@lru_cache(_TIMEOUTS_MAX)
def _timeout_field(milliseconds: int) -> bytes:
    """The field with a timeout in gRPC's form, which has at most 8 digits."""
    value = f"{milliseconds}m" if milliseconds < 10**8 else f"{math.ceil(milliseconds / 1000)}S"
    return encoded((("grpc-timeout", value),))
