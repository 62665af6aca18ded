"""The messages of one gRPC request as they arrive. Its own module: asynchronous generators can't be compiled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from ts_frontend.grpc import protocol
from ts_frontend.transport.limits import PIECE_BYTES, ListenerLimits, arrival
from ts_frontend.transport.stream import Stream

if TYPE_CHECKING:
    from ts_frontend.grpc.call import Call

#: Larger compressed messages are decompressed in a thread: they may grow a thousandfold.
THREAD_COMPRESSED_BYTES_MIN = 1024


class Incoming:
    """The messages of a request. `encoding`: the compression that its headers name."""

    __slots__ = ("_call", "_encoding", "_limits", "_stream")

    def __init__(self, call: Call, stream: Stream, limits: ListenerLimits, encoding: str | None) -> None:
        self._call, self._stream, self._limits, self._encoding = call, stream, limits, encoding

    async def only(self, received: bytes = b"") -> bytes:
        """Returns the request's only message; `received`: what was read of it so far. Raises WrongMessageCount."""
        messages = [message async for message in self.all(received, kept=True)]
        if len(messages) != 1:
            raise protocol.WrongMessageCount(f"{self._call.path} takes one message, not {len(messages)}")
        return messages[0]

    async def all(self, received: bytes = b"", *, kept: bool = False) -> AsyncIterator[bytes]:
        """Yields the request's messages as they arrive; `received`: what was read so far. `kept`: the caller keeps them
        until the end of the stream, so that they count as arriving; else the head counts until the first one."""
        stream, decoder = self._stream, protocol.Decoder(self._limits.request_bytes_max)
        held = self._limits.arriving.body()
        head_bytes, kept_bytes = self._call.head_bytes, 0
        try:
            while True:
                data = received or stream.body()
                received = b""
                if not data:
                    if stream.ended:
                        break
                    size = head_bytes + kept_bytes + decoder.held_bytes
                    # A stream may rest before its first message and between two.
                    held.hold(size, timed=kept or decoder.held_bytes > 0)
                    await held.piece(arrival(stream))
                    continue
                messages = decoder.feed(data)
                # A stream may rest with the next line that waits, which then refers to no message.
                data = b""
                messages.reverse()
                while messages:
                    message = messages.pop()
                    content = await self._content(message) if message.compressed else message.data
                    del message
                    if kept:
                        kept_bytes += PIECE_BYTES + len(content)
                    else:
                        head_bytes = 0
                        held.next_message()  # no time passes while the caller doesn't ask for more
                    yield content
                    del content
        finally:
            held.end()
        decoder.finish()

    async def _content(self, message: protocol.Message) -> bytes:
        arguments = (self._encoding, message.data, self._limits.request_bytes_max)
        if len(message.data) < THREAD_COMPRESSED_BYTES_MIN:
            return protocol.decompress(*arguments)
        return await asyncio.to_thread(protocol.decompress, *arguments)
