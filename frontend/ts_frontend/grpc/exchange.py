"""One gRPC call: reads the request, runs the method, writes the answers and the final status."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, Final

from ts.protocol.frames import Buffer
from ts_frontend.errors import ClientGone, Code, Draining, ServeError, Unimplemented
from ts_frontend.grpc import protocol
from ts_frontend.grpc.call import JOIN_BYTES_MAX, Answer, Bidi, Call, Method, ServerStream, Shape, Unary
from ts_frontend.grpc.incoming import Incoming
from ts_frontend.grpc.protocol import (
    ACCEPT_ENCODING,
    CONTENT_TYPE,
    PREFIX,
    PREFIX_BYTES,
    STATUS_OK,
    Header,
    MalformedHeader,
    answering_s,
    encode_metadata,
    status_details,
    status_headers,
    timeout_s,
)
from ts_frontend.tasks import Expiry, current_task, each, uncancel
from ts_frontend.transport.arriving import drained
from ts_frontend.transport.hpack import encode
from ts_frontend.transport.http2 import Http2Stream
from ts_frontend.transport.limits import ListenerLimits

logger: Final = logging.getLogger(__name__)

#: Larger messages are compressed in a thread: at about 200 MB/s, this size blocks the loop for 1 ms.
THREAD_BYTES_MIN: Final = 256 * 1024

UNEXPECTED: Final = "The server failed unexpectedly; its log says why"

_HEADERS: Final = (CONTENT_TYPE,)
#: The header blocks of a usual answer.
_BLOCK: Final = encode([(b":status", b"200"), CONTENT_TYPE])
_BLOCK_OK: Final = encode([STATUS_OK])
#: The headers that a streaming call still needs after its beginning.
_KEPT: Final = frozenset({b"grpc-encoding", b"grpc-timeout"})


class Exchange:
    """One call. `run` sends exactly one status, unless the client leaves."""

    __slots__ = ("_answer_encoding", "_call", "_limits", "_request", "_stream")

    def __init__(self, stream: Http2Stream, limits: ListenerLimits) -> None:
        head = stream.head
        self._call = Call(head.path, None, math.inf, None, stream.peer, (head.fields, head.by_name))
        self._request: Mapping[bytes, bytes] = head.by_name
        self._stream = stream
        self._limits = limits
        self._answer_encoding: str | None = None

    def run(self, method: Method | None) -> Coroutine[Any, Any, None]:
        """Runs `method` (None: unknown path) within the client's deadline."""
        if b"grpc-timeout" not in self._request and method is not None and self._is_usual(method):
            return self._perform_usual(method)
        return self._run(method)

    async def _run(self, method: Method | None) -> None:
        try:
            if b"grpc-timeout" in self._request:
                await self._run_in_time(method)
            else:
                await self._perform(method)
        except ClientGone:
            raise
        except Exception as error:
            await self._fail(error)

    async def _fail(self, error: Exception) -> None:
        if isinstance(error, ServeError):
            self._call.trailing += status_details(error, self._call.request_id)
            await self._finish(error.code, error.told())
        else:
            logger.error("%s failed", self._call.path, exc_info=error)
            await self._finish(Code.INTERNAL, UNEXPECTED)

    async def refuse_draining(self) -> None:
        await self._finish(Draining.code, "The server shut down before the call was answered")

    async def _run_in_time(self, method: Method | None) -> None:
        seconds = timeout_s(self._request[b"grpc-timeout"])
        self._call.deadline_s = time.monotonic() + seconds
        expiry = Expiry(current_task())
        timer = asyncio.get_running_loop().call_later(answering_s(seconds), expiry.expire)
        try:
            if method is not None and self._is_usual(method):
                await self._perform_usual(method)
            else:
                await self._perform(method)
        except asyncio.CancelledError:
            if not expiry.passed:
                raise
            uncancel()
            await self._finish(Code.DEADLINE_EXCEEDED, f"The deadline of {seconds:g} s passed before the call ended")
        finally:
            timer.cancel()
            expiry.task = None

    def _is_usual(self, method: Method) -> bool:
        """Whether `_perform_usual` can perform the call: a unary method and uncompressed messages."""
        request = self._request
        return method.shape is Shape.UNARY and b"grpc-encoding" not in request and request.get(b"te") == b"trailers"

    async def _perform_usual(self, method: Method) -> None:
        """The fast path of `_run` and `_perform` in one coroutine, for a request that has arrived and a small answer
        without metadata; it hands other calls on. With a deadline it runs within `_run`, which ends failed calls."""
        call, limits, stream = self._call, self._limits, self._stream
        try:
            message = self._large_message() if stream.pieces_bytes > JOIN_BYTES_MAX else None
            if message is None:
                body = stream.body() if stream.ended else b""
                message = self._whole_message(body)
                if message is None:
                    message = await self._incoming().only(body)
                del body
            unary: Unary = method.run  # type: ignore[assignment]  # a method of this shape
            answer = await unary(call, message)
            if isinstance(answer, tuple):
                await self._answer(answer)
                return
            size = len(answer)
            if size > JOIN_BYTES_MAX or size > limits.response_bytes_max or not call.adds_nothing:
                await self._answer(answer)
            else:
                stream.status = 200
                stream.answer(_BLOCK, PREFIX.pack(0, size) + answer, _BLOCK_OK)
        except ClientGone:
            raise
        except Exception as error:
            if b"grpc-timeout" in self._request:
                raise
            await self._fail(error)

    def _large_message(self) -> bytes | None:
        """Takes the message if the body is one, and has arrived, in one copy; else None."""
        size = self._stream.pieces_bytes - PREFIX_BYTES
        return self._stream.body_behind(PREFIX.pack(0, size)) if size <= self._limits.request_bytes_max else None

    def _whole_message(self, body: bytes) -> bytes | None:
        """Returns the message if the body is exactly one uncompressed message, else None."""
        size = len(body) - PREFIX_BYTES
        if 0 <= size <= self._limits.request_bytes_max and PREFIX.unpack_from(body) == (0, size):
            return body[PREFIX_BYTES:]
        return None

    async def _perform(self, method: Method | None) -> None:
        if method is None:
            raise Unimplemented(f"Method {self._call.path} is unimplemented")
        if b"grpc-encoding" in self._request or self._request.get(b"te") != b"trailers":
            self._check_headers()
        run = method.run
        if method.shape is Shape.UNARY:
            unary: Unary = run  # type: ignore[assignment]  # the shape says which of the three it is
            await self._answer(await unary(self._call, await self._incoming().only()))
        else:
            await self._perform_stream(method)

    async def _perform_stream(self, method: Method) -> None:
        """Performs a streaming call: it counts until its end, and the headers are left only to the call."""
        call = self._call
        call.stream = stream = self._limits.streams.open(call.head_bytes)
        self._stream.forget_head()
        self._request = {name: value for name, value in self._request.items() if name in _KEPT}
        try:
            if method.shape is Shape.SERVER_STREAM:
                server_stream: ServerStream = method.run  # type: ignore[assignment]
                await self._answer_stream(server_stream(call, await self._incoming().only()))
            else:
                bidi: Bidi = method.run  # type: ignore[assignment]
                await self._answer_stream(bidi(call, self._incoming().all()))
        finally:
            stream.end()

    def _check_headers(self) -> None:
        if self._request.get(b"te") != b"trailers":
            raise MalformedHeader("The header 'te: trailers' is missing: a proxy may drop the status")
        encoding = self._encoding()
        protocol.check_encoding(encoding)
        accepted = self._request.get(b"grpc-accept-encoding", b"").decode("latin-1")
        self._answer_encoding = protocol.answer_encoding(encoding, accepted)

    def _encoding(self) -> str | None:
        value = self._request.get(b"grpc-encoding")
        return None if value is None else value.decode("latin-1")

    def _incoming(self) -> Incoming:
        return Incoming(self._call, self._stream, self._limits, self._encoding())

    # Messages out

    async def _answer(self, message: Answer) -> None:
        if isinstance(message, bytes):
            await self._write((message,))
        elif self._answer_encoding is not None:
            await self._write((b"".join(message),))
        else:
            await self._write_parts(*message)
        self._stream.finish(self._trailers(Code.OK, ""))
        if self._stream.queued:
            await drained(self._stream)

    async def _answer_stream(self, answers: AsyncIterator[Sequence[bytes]]) -> None:
        await each(answers, self._write)
        await self._finish(Code.OK, "")

    async def _write(self, messages: Sequence[bytes]) -> None:
        """Sends messages; waits while the client doesn't read (back-pressure)."""
        if not messages:
            return
        limit, stream = self._limits.response_bytes_max, self._stream
        if max(map(len, messages)) > limit:
            index = next(index for index, message in enumerate(messages) if len(message) > limit)
            await self._write(messages[:index])  # those before it are still sent
            raise protocol.too_large(len(messages[index]), limit, key="max_response_size", what="Answer")
        if not stream.begun:
            self._start()
        if len(messages) == 1 and len(messages[0]) > JOIN_BYTES_MAX and self._answer_encoding is None:
            await self._write_parts(b"", messages[0])
            return
        stream.write(await self._encoded(messages))
        if stream.queued:
            await drained(stream)

    async def _write_parts(self, head: bytes, data: Buffer) -> None:
        limit, stream, size = self._limits.response_bytes_max, self._stream, len(head) + len(data)
        if size > limit:
            raise protocol.too_large(size, limit, key="max_response_size", what="Answer")
        if not stream.begun:
            self._start()
        stream.write(PREFIX.pack(0, size) + head)
        stream.write(data)
        if stream.queued:
            await drained(stream)

    async def _encoded(self, messages: Sequence[bytes]) -> bytes:
        if self._answer_encoding is None or sum(map(len, messages)) < THREAD_BYTES_MIN:
            return protocol.encode(messages, self._answer_encoding)
        return await asyncio.to_thread(protocol.encode, messages, self._answer_encoding)

    def _start(self) -> None:
        headers: Sequence[Header] = _HEADERS
        if self._call.initial:
            headers = (*headers, *encode_metadata(self._call.initial))
        if self._answer_encoding is not None:
            headers = (*headers, (b"grpc-encoding", self._answer_encoding.encode()))
        self._stream.begin(200, headers)

    async def _finish(self, code: Code, message: str) -> None:
        stream = self._stream
        if stream.given:
            return
        trailers = self._trailers(code, message)
        if not stream.begun and not self._call.initial:
            stream.respond(200, (CONTENT_TYPE, ACCEPT_ENCODING, *trailers))
            return
        if not stream.begun:
            self._start()
        stream.finish(trailers)

    def _trailers(self, code: Code, message: str) -> list[Header]:
        return [*status_headers(code, message), *encode_metadata(self._call.last_metadata())]
