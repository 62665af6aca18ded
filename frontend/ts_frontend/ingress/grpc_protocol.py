"""gRPC's messages as bytes: length prefixes, their limits, and compression. No I/O.

Each message is preceded by five bytes: a flag (1: compressed) and the length as a big-endian u32
(grpc/doc/PROTOCOL-HTTP2.md). What is too large is refused from those five bytes, before it is buffered.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from ts_frontend.errors import Code, MessageTooLarge, ServeError, Unimplemented

PREFIX = struct.Struct(">BI")
PREFIX_BYTES = PREFIX.size

#: The compressions of both ways, with zlib's window bits: 31 is gzip's framing, 15 zlib's, which gRPC calls deflate.
_WINDOW_BITS = {"gzip": 31, "deflate": 15}
ACCEPTED_ENCODINGS = ("identity", *_WINDOW_BITS)

#: An answer shorter than this is sent as it is: compressing it would cost more than it saves.
COMPRESS_BYTES_MIN = 1024


class BrokenMessages(ServeError):
    """The bytes of a request aren't gRPC messages."""

    code, http_status, type_name = Code.INTERNAL, 400, "BadRequestException"


class WrongMessageCount(Unimplemented):
    """A method that takes one message got none, or several (gRPC's status for that is UNIMPLEMENTED)."""


class Message(NamedTuple):
    """One message as it was on the wire."""

    compressed: bool
    data: bytes


def too_large(size: int, limit: int, *, key: str = "max_request_size", what: str = "Message") -> MessageTooLarge:
    """The refusal of a message, naming its size, the limit, and the setting that raises the limit."""
    return MessageTooLarge(f"{what} of {size} bytes is larger than the limit of {limit} bytes ({key})")


class Decoder:
    """Bytes in, messages out, whatever the cuts between the pieces.

    An illegal prefix raises and leaves the decoder as it was before that prefix; it is not to be fed again.
    """

    __slots__ = ("_bytes_max", "_held", "_held_bytes", "_needed")

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._needed = PREFIX_BYTES

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are complete now.

        Raises:
            MessageTooLarge: a prefix announces more than the limit.
            BrokenMessages: a prefix has an unknown flag.
        """
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes < self._needed:
            return []
        return self._cut(b"".join(self._held))

    def finish(self) -> None:
        """Raises BrokenMessages when the stream ended inside a message."""
        if self._held_bytes:
            raise BrokenMessages(f"The request ended inside a message, after {self._held_bytes} of its bytes")

    def _cut(self, buffer: bytes) -> list[Message]:
        messages: list[Message] = []
        start, size = 0, len(buffer)
        self._needed = PREFIX_BYTES
        while size - start >= PREFIX_BYTES:
            length = self._length(buffer, start)
            end = start + PREFIX_BYTES + length
            if end > size:
                self._needed = PREFIX_BYTES + length
                break
            messages.append(Message(buffer[start] == 1, buffer[start + PREFIX_BYTES : end]))
            start = end
        rest = buffer[start:]
        self._held, self._held_bytes = ([rest] if rest else []), len(rest)
        return messages

    def _length(self, buffer: bytes, start: int) -> int:
        flag, length = PREFIX.unpack_from(buffer, start)
        if flag > 1:
            raise BrokenMessages(f"A message starts with the flag {flag}; only 0 and 1 exist")
        if length > self._bytes_max:
            raise too_large(length, self._bytes_max)
        return int(length)


def encode(messages: Sequence[bytes], encoding: str | None = None) -> bytes:
    """The messages as one piece of a body; with `encoding`, those worth it are compressed."""
    parts: list[bytes] = []
    for data in messages:
        flag = 0
        if encoding is not None and len(data) >= COMPRESS_BYTES_MIN:
            flag, data = 1, compress(encoding, data)
        parts.append(PREFIX.pack(flag, len(data)))
        parts.append(data)
    return b"".join(parts)


def compress(encoding: str, data: bytes) -> bytes:
    """`encoding` is one of gzip, deflate. Level 1: answers are compressed while someone waits for them."""
    packer = zlib.compressobj(1, zlib.DEFLATED, _WINDOW_BITS[encoding])
    return packer.compress(data) + packer.flush()


def check_encoding(encoding: str | None) -> None:
    """Raises Unimplemented for a compression we don't have (gRPC's status for it)."""
    if encoding is not None and encoding not in ACCEPTED_ENCODINGS:
        raise Unimplemented(
            f"Messages compressed with {encoding!r} can't be read; use one of {', '.join(ACCEPTED_ENCODINGS)}"
        )


def decompress(encoding: str | None, data: bytes, bytes_max: int) -> bytes:
    """A compressed message's content; stops as soon as it grows past `bytes_max`.

    Raises:
        MessageTooLarge: the content is larger than the limit.
        BrokenMessages: not compressed as announced, cut short, or nothing was announced.
    """
    if encoding is None or encoding not in _WINDOW_BITS:
        raise BrokenMessages("A message is marked as compressed, but grpc-encoding names no compression")
    unpacker = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        content = unpacker.decompress(data, bytes_max + 1)
    except zlib.error as error:
        raise BrokenMessages(f"A message can't be decompressed as {encoding}: {error}") from None
    if len(content) > bytes_max:
        raise MessageTooLarge(
            f"Message of {len(data)} compressed bytes decompresses to more than the limit of {bytes_max} bytes"
            " (max_request_size)"
        )
    if not unpacker.eof or unpacker.unused_data:
        raise BrokenMessages(f"A message is not one whole {encoding} stream")
    return content


def answer_encoding(request_encoding: str | None, accepted: str | None) -> str | None:
    """The compression of the answers: the request's own, where the client says that it can read it.

    Clients list what they accept whether they want it or not (grpcio always does), so a client asks for
    compressed answers by sending compressed requests.
    """
    if request_encoding not in _WINDOW_BITS or accepted is None:
        return None
    return request_encoding if request_encoding in (name.strip() for name in accepted.split(",")) else None
