"""gRPC's headers as values: timeout, metadata, status. No I/O.

Names are lower-case ASCII bytes, as HTTP/2 has them. Sources: grpc/doc/PROTOCOL-HTTP2.md, RFC 9110, RFC 9113.
"""

from __future__ import annotations

import binascii
import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Sequence
from typing import overload
from urllib.parse import quote

from google.protobuf.duration_pb2 import Duration

from ts_frontend.errors import Code, ServeError
from ts_frontend.ingress.grpc_protocol import ACCEPTED_ENCODINGS
from ts_frontend.protos.google_rpc_status_pb2 import Status

Header = tuple[bytes, bytes]
Entry = tuple[str, "str | bytes"]

CONTENT_TYPE: Header = (b"content-type", b"application/grpc")
ACCEPT_ENCODING: Header = (b"grpc-accept-encoding", ",".join(ACCEPTED_ENCODINGS).encode())
STATUS_OK: Header = (b"grpc-status", b"0")

#: Clients refuse headers above 8 KiB by default (grpcio), and then lose the status too.
STATUS_MESSAGE_BYTES_MAX = 4096
#: A longer message isn't said a second time in the status details: with both, the headers would be above that.
DETAILS_MESSAGE_BYTES_MAX = 1500
STATUS_DETAILS = "grpc-status-details-bin"
RETRY_INFO_URL = "type.googleapis.com/google.rpc.RetryInfo"

_PLAIN = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNIT_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_KEY = re.compile(r"[0-9a-z_.\-]+")
_VALUE = re.compile(r"[\x20-\x7e]*")

#: Headers that belong to HTTP or to gRPC itself and are no metadata.
_RESERVED = frozenset(
    b"host content-type content-length te accept-encoding grpc-timeout grpc-encoding grpc-accept-encoding".split()
)


class MalformedHeader(ServeError):
    """A header of gRPC's own can't be read."""

    code, http_status, type_name = Code.INTERNAL, 400, "BadRequestException"


#: How much before a deadline its passing is answered: a LAN's way to the client and back, and a timer's grain.
EARLY_S_MAX = 0.005
EARLY_SHARE = 0.05


def timeout_s(value: bytes) -> float:
    """Seconds of a `grpc-timeout` value such as b"250m". Raises MalformedHeader."""
    match = _TIMEOUT.fullmatch(value)
    if match is None:
        raise MalformedHeader(
            f"grpc-timeout is malformed: {value.decode('latin-1')!r}; write up to 8 digits and a unit"
        )
    return int(match[1]) * _UNIT_S[match[2]]


def answering_s(seconds: float) -> float:
    """When to answer that a deadline in so many seconds has passed: a little early, so that the client hears of it and
    needn't cancel the call itself. h2corn closes connections with more than 200 cancelled calls in 10 s."""
    return seconds - min(EARLY_S_MAX, seconds * EARLY_SHARE)


def is_grpc(content_type: bytes | None) -> bool:
    """Whether it is application/grpc, perhaps with a subtype or parameters; gRPC-Web is something else."""
    if content_type is None or content_type[:16].lower() != b"application/grpc":
        return False
    return content_type[16:17] in (b"", b"+", b";", b" ")


def encode_message(message: str) -> bytes:
    """`grpc-message`: UTF-8, percent-encoded where it isn't printable ASCII, cut to what clients take."""
    encoded = quote(bounded(message), safe=_PLAIN, errors="replace")
    if encoded != encoded.strip():
        encoded = encoded.replace(" ", "%20")
    return encoded.encode("ascii")


def bounded(message: str) -> str:
    """The message, cut so that its percent-encoded form fits into STATUS_MESSAGE_BYTES_MAX."""
    if len(message) * 9 <= STATUS_MESSAGE_BYTES_MAX:
        return message
    size = 0
    for index, char in enumerate(message):
        size += len(quote(char, safe=_PLAIN, errors="replace"))
        if size > STATUS_MESSAGE_BYTES_MAX - len(" ..."):
            return message[:index] + " ..."
    return message


def status_headers(code: int, message: str) -> list[Header]:
    """`grpc-status`, and `grpc-message` where there is one."""
    headers = [(b"grpc-status", str(int(code)).encode())]
    if message:
        headers.append((b"grpc-message", encode_message(message)))
    return headers


def retry_details(error: ServeError) -> list[Entry]:
    """`grpc-status-details-bin` with a google.rpc.RetryInfo, for errors that say when to ask again; else nothing."""
    if error.retry_after_s is None or len(error.message.encode()) > DETAILS_MESSAGE_BYTES_MAX:
        return []
    return [(STATUS_DETAILS, status_of(error).SerializeToString())]


def status_of(error: ServeError) -> Status:
    """The error as a google.rpc.Status, with when to ask again where that is known."""
    status = Status(code=int(error.code), message=error.message)
    if error.retry_after_s is not None:
        whole, part = divmod(error.retry_after_s, 1)
        delay = Duration(seconds=int(whole), nanos=int(part * 1e9)).SerializeToString()
        # RetryInfo is a message with one field, 1, the delay.
        status.details.add(type_url=RETRY_INFO_URL, value=bytes((0x0A, len(delay))) + delay)
    return status


def decode_metadata(headers: Iterable[Header]) -> list[Entry]:
    """What the client sent beside gRPC's own headers; `-bin` values as bytes, one entry for each joined value.

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
    """Headers for metadata that we send.

    Raises ValueError for a name or value that HTTP/2 or gRPC doesn't allow: a mistake of ours, not of a caller.
    """
    return [_encode_entry(key, value) for key, value in entries]


def _encode_entry(key: str, value: str | bytes) -> Header:
    if not _KEY.fullmatch(key) or (key.startswith("grpc-") and key != "grpc-status-details-bin"):
        raise ValueError(f"{key!r} is no name for metadata")
    if key.endswith("-bin"):
        if isinstance(value, str):
            raise ValueError(f"metadata {key!r} takes bytes")
        return key.encode("ascii"), b64encode(value).rstrip(b"=")
    if isinstance(value, bytes) or not _VALUE.fullmatch(value):
        raise ValueError(f"metadata {key!r} takes printable ASCII text, got {value!r}")
    return key.encode("ascii"), value.strip().encode("ascii")


class ReceivedMetadata(Sequence[Entry]):
    """The metadata of a request, decoded when someone looks: most calls never do."""

    __slots__ = ("_entries", "_headers")

    def __init__(self, headers: Sequence[Header]) -> None:
        self._headers = headers
        self._entries: list[Entry] | None = None

    def _decoded(self) -> list[Entry]:
        if self._entries is None:
            self._entries = decode_metadata(self._headers)
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
