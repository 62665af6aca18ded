"""gRPC's messages as bytes: length prefixes, their limits, and compression. No I/O.

Each message is preceded by five bytes: a flag (1: compressed) and the length as a big-endian u32
(grpc/doc/PROTOCOL-HTTP2.md). A message that is too large is refused from those five bytes, before it is buffered."""

from __future__ import annotations

import binascii
import re
import struct
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, overload
from urllib.parse import quote

from google.protobuf.duration_pb2 import Duration

from ts.protocol.wire import prefix
from ts_frontend.errors import Code, HandlerFailed, MessageTooLarge, ServeError, Unimplemented, WorkerDied
from ts_frontend.protos.google_rpc_status_pb2 import Status
from ts_frontend.transport.limits import PIECE_BYTES

PREFIX = struct.Struct(">BI")
PREFIX_BYTES = PREFIX.size

#: The compressions and their zlib window bits: 31 is gzip, 15 is zlib, which gRPC calls deflate.
_WINDOW_BITS = {"gzip": 31, "deflate": 15}
ACCEPTED_ENCODINGS = ("identity", *_WINDOW_BITS)

#: Smaller answers aren't compressed: compression would cost more than it saves.
COMPRESS_BYTES_MIN = 1024


class BrokenMessages(ServeError):
    """The bytes of a request aren't gRPC messages."""

    remedy = "Fix the client: its bytes are not gRPC."
    code, http_status, type_name = Code.INTERNAL, 400, "BadRequestException"


class WrongMessageCount(Unimplemented):
    """A method that takes one message got none, or several (gRPC's status for it is UNIMPLEMENTED)."""


class Message(NamedTuple):
    """One message as it was received: compressed or not, and its bytes."""

    compressed: bool
    data: bytes


def too_large(size: int, limit: int, *, key: str = "max_request_size", what: str = "Message") -> MessageTooLarge:
    """The refusal of a message, naming its size, the limit, and the setting that raises the limit."""
    return MessageTooLarge(f"{what} of {size} bytes is larger than the limit of {limit} bytes ({key})")


class Decoder:
    """Decodes messages from bytes, in pieces of any size.

    After an error the decoder is unchanged from before the bad prefix, and must not be fed again.
    """

    __slots__ = ("_bytes_max", "_held", "_held_bytes", "_needed")

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._needed = PREFIX_BYTES

    @property
    def held_bytes(self) -> int:
        return self._held_bytes + PIECE_BYTES * len(self._held)

    def feed(self, data: bytes) -> list[Message]:
        """The messages completed by `data`.

        Raises:
            MessageTooLarge: a prefix announces more than the limit.
            BrokenMessages: a prefix has an unknown flag.
        """
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes < self._needed:
            return []
        if self._held_bytes == self._needed > PREFIX_BYTES and len(self._held[0]) >= PREFIX_BYTES:
            return [self._whole()]
        return self._cut(b"".join(self._held))

    def _whole(self) -> Message:
        first, *rest = self._held
        self._held, self._held_bytes, self._needed = [], 0, PREFIX_BYTES
        return Message(first[0] == 1, b"".join((memoryview(first)[PREFIX_BYTES:], *rest)))

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
    """The messages as one piece of a body; with `encoding`, messages that aren't small are compressed."""
    pack = PREFIX.pack
    if encoding is None:
        return b"".join([part for data in messages for part in (pack(0, len(data)), data)])
    parts: list[bytes] = []
    for data in messages:
        flag = 0
        if len(data) >= COMPRESS_BYTES_MIN:
            flag, data = 1, compress(encoding, data)
        parts += (pack(flag, len(data)), data)
    return b"".join(parts)


def compress(encoding: str, data: bytes) -> bytes:
    """`encoding`: gzip or deflate. Level 1, since clients wait for the answer."""
    packer = zlib.compressobj(1, zlib.DEFLATED, _WINDOW_BITS[encoding])
    return packer.compress(data) + packer.flush()


def check_encoding(encoding: str | None) -> None:
    """Raises Unimplemented (gRPC's status for it) for an unsupported compression."""
    if encoding is not None and encoding not in ACCEPTED_ENCODINGS:
        raise Unimplemented(
            f"Messages compressed with {encoding!r} can't be read; use one of {', '.join(ACCEPTED_ENCODINGS)}"
        )


def decompress(encoding: str | None, data: bytes, bytes_max: int) -> bytes:
    """A compressed message's content; stops as soon as it grows past `bytes_max`.

    Raises:
        MessageTooLarge: the content is larger than the limit.
        BrokenMessages: not compressed as announced, truncated, or without an announced compression.
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
    """The compression of the answers: that of the request, if the client accepts it.

    Clients list all compressions they accept (grpcio always does), so that only a compressed request asks for
    compressed answers.
    """
    if request_encoding not in _WINDOW_BITS or accepted is None:
        return None
    return request_encoding if request_encoding in (name.strip() for name in accepted.split(",")) else None


Header = tuple[bytes, bytes]
Entry = tuple[str, "str | bytes"]

CONTENT_TYPE: Header = (b"content-type", b"application/grpc")
ACCEPT_ENCODING: Header = (b"grpc-accept-encoding", ",".join(ACCEPTED_ENCODINGS).encode())
STATUS_OK: Header = (b"grpc-status", b"0")

#: Clients refuse headers above 8 KiB by default (grpcio), and then lose the status too.
STATUS_MESSAGE_BYTES_MAX = 4096
#: A longer message isn't repeated in the status details, which would exceed that limit.
DETAILS_MESSAGE_BYTES_MAX = 1500
STATUS_DETAILS = "grpc-status-details-bin"
#: The length of a traceback's end that clients get.
DEBUG_INFO_BYTES_MAX = 1500
RPC_TYPES = "type.googleapis.com/google.rpc."
RETRY_INFO_URL = f"{RPC_TYPES}RetryInfo"
ERROR_DOMAIN = "torchrelay"
HANDLER_FAILED = "HANDLER_FAILED"

_PLAIN = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")
METADATA_KEY = re.compile(r"[0-9a-z_.\-]+")
METADATA_VALUE = re.compile(r"[\x20-\x7e]*")

#: Headers of HTTP or gRPC itself, which aren't metadata.
_RESERVED = frozenset(
    b"host content-type content-length te accept-encoding grpc-timeout grpc-encoding grpc-accept-encoding".split()
)


class MalformedHeader(ServeError):
    """One of gRPC's own headers is malformed."""

    remedy = "Fix the client: the message names the header."
    code, http_status, type_name = Code.INTERNAL, 400, "BadRequestException"


def is_grpc(content_type: bytes | None) -> bool:
    """Whether it is application/grpc, perhaps with a subtype or parameters; gRPC-Web isn't."""
    if content_type is None or content_type[:16].lower() != b"application/grpc":
        return False
    return content_type[16:17] in (b"", b"+", b";", b" ")


def encode_message(message: str) -> bytes:
    """The value of `grpc-message`: UTF-8, percent-encoded outside printable ASCII, cut to what clients take."""
    encoded = quote(bounded(message), safe=_PLAIN, errors="replace")
    if encoded[:1] == " ":  # a header's value can't begin or end with a space
        encoded = "%20" + encoded[1:]
    if encoded[-1:] == " ":
        encoded = encoded[:-1] + "%20"
    return encoded.encode("ascii")


def bounded(message: str) -> str:
    """The message, cut so that its percent-encoded form fits into STATUS_MESSAGE_BYTES_MAX."""
    if len(message) * 9 <= STATUS_MESSAGE_BYTES_MAX:
        return message
    size = 0
    for index, char in enumerate(message):
        size += len(quote(char, safe=_PLAIN, errors="replace"))
        if size > STATUS_MESSAGE_BYTES_MAX - len(" ...") - len("%20%20"):
            return message[:index] + " ..."
    return message


def status_headers(code: int, message: str) -> list[Header]:
    headers = [(b"grpc-status", str(int(code)).encode())]
    if message:
        headers.append((b"grpc-message", encode_message(message)))
    return headers


def status_details(error: ServeError, request_id: str = "") -> list[Entry]:
    """`grpc-status-details-bin` for errors with more than a code and a message, else nothing."""
    status = status_of(error, request_id)
    if not status.details or len(error.message.encode()) > DETAILS_MESSAGE_BYTES_MAX:
        return []
    return [(STATUS_DETAILS, status.SerializeToString())]


def status_of(error: ServeError, request_id: str = "") -> Status:
    """The error as a google.rpc.Status: with a RetryInfo if there is a time to retry; for an error of the handler and
    the death of its worker a RequestInfo with the request's ID in the log; for an error of the handler also an
    ErrorInfo, and a DebugInfo with the traceback if clients may see it."""
    status = Status(code=int(error.code), message=error.told())
    handlers = error if isinstance(error, HandlerFailed) and error.by_handler else None
    if handlers is not None:
        info = _field(1, HANDLER_FAILED.encode()) + _field(2, ERROR_DOMAIN.encode())
        status.details.add(type_url=f"{RPC_TYPES}ErrorInfo", value=info)
    if request_id and (handlers is not None or isinstance(error, WorkerDied)):
        status.details.add(type_url=f"{RPC_TYPES}RequestInfo", value=_field(1, request_id.encode()))
    if handlers is not None and handlers.traceback:
        status.details.add(type_url=f"{RPC_TYPES}DebugInfo", value=_debug_info(handlers))
    if error.retry_after_s is not None:
        whole, part = divmod(error.retry_after_s, 1)
        delay = Duration(seconds=int(whole), nanos=int(part * 1e9)).SerializeToString()
        status.details.add(type_url=RETRY_INFO_URL, value=_field(1, delay))
    return status


def _debug_info(error: HandlerFailed) -> bytes:
    """The last lines of the traceback, as many as fit, and the message."""
    lines: list[bytes] = []
    left = DEBUG_INFO_BYTES_MAX
    for line in reversed(error.traceback.splitlines()):
        raw = line.encode("utf-8", "replace")
        left -= len(raw)
        if left < 0:
            break
        lines.append(raw)
    return b"".join(_field(1, line) for line in reversed(lines)) + _field(2, error.message.encode("utf-8", "replace"))


def _field(number: int, value: bytes) -> bytes:
    """A field of a message: text, or another message (protobuf's wire type 2)."""
    return prefix(number, len(value)) + value


def decode_metadata(headers: Iterable[Header]) -> list[Entry]:
    """Returns the client's metadata, without gRPC's own headers; `-bin` values as bytes, one entry for each joined
    value.

    Raises MalformedHeader for a `-bin` value that isn't base64.
    """
    entries: list[Entry] = []
    for name, value in headers:
        if name in _RESERVED or name[:1] == b":":
            continue
        key = name.decode("latin-1").lower()
        if key.endswith("-bin"):
            entries.extend((key, _decode_binary(key, part)) for part in value.split(b","))
        else:
            entries.append((key, value.decode("latin-1")))
    return entries


def _decode_binary(key: str, value: bytes) -> bytes:
    value = value.strip()
    try:
        return b64decode(value + b"=" * (-len(value) % 4), validate=True)
    except binascii.Error:
        raise MalformedHeader(f"Metadata {key} is not base64") from None


def encode_metadata(entries: Iterable[Entry]) -> list[Header]:
    """Headers for metadata to send.

    Raises ValueError for a name or value that HTTP/2 or gRPC doesn't allow: a bug of the server.
    """
    return [_encode_entry(key, value) for key, value in entries]


def _encode_entry(key: str, value: str | bytes) -> Header:
    if not METADATA_KEY.fullmatch(key) or (key.startswith("grpc-") and key != "grpc-status-details-bin"):
        raise ValueError(f"{key!r} is not a valid metadata key")
    if key.endswith("-bin"):
        if isinstance(value, str):
            raise ValueError(f"metadata {key!r} takes bytes")
        return key.encode("ascii"), b64encode(value).rstrip(b"=")
    if isinstance(value, bytes) or not METADATA_VALUE.fullmatch(value):
        raise ValueError(f"metadata {key!r} takes printable ASCII text, got {value!r}")
    return key.encode("ascii"), value.strip().encode("ascii")


class ReceivedMetadata(Sequence[Entry]):
    """The metadata of a request, decoded on first use, which most calls never need."""

    __slots__ = ("_entries", "_headers")

    def __init__(self, headers: Sequence[Header]) -> None:
        self._headers = headers
        self._entries: list[Entry] | None = None

    def _decoded(self) -> list[Entry]:
        if self._entries is None:
            self._entries = decode_metadata(self._headers)
            self._headers = ()
        return self._entries

    def __len__(self) -> int:
        return len(self._decoded())

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._decoded())

    @overload
    def __getitem__(self, index: int) -> Entry: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Entry]: ...

    def __getitem__(self, index: int | slice) -> Entry | Sequence[Entry]:
        return self._decoded()[index]
