"""Header fields of HTTP/2 (HPACK, RFC 7541) between peers that keep no tables: each block says everything itself.

Pure. Readers announce a table of 0 bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

#: Blocks and texts up to this size, and so many of each, are read once: most answers of a server have the same.
_KEPT_BYTES_MAX, _KEPT_MAX = 512, 256
#: Names of HTTP/2's static table, from its entry 1 on, and the values of those entries that have one.
_STATIC = [
    ":authority", ":method", ":method", ":path", ":path", ":scheme", ":scheme", ":status", ":status", ":status",
    ":status", ":status", ":status", ":status", "accept-charset", "accept-encoding", "accept-language",
    "accept-ranges", "accept", "access-control-allow-origin", "age", "allow", "authorization", "cache-control",
    "content-disposition", "content-encoding", "content-language", "content-length", "content-location",
    "content-range", "content-type", "cookie", "date", "etag", "expect", "expires", "from", "host", "if-match",
    "if-modified-since", "if-none-match", "if-range", "if-unmodified-since", "last-modified", "link", "location",
    "max-forwards", "proxy-authenticate", "proxy-authorization", "range", "referer", "refresh", "retry-after",
    "server", "set-cookie", "strict-transport-security", "transfer-encoding", "user-agent", "vary", "via",
    "www-authenticate",
]  # fmt: skip
_VALUES = {2: "GET", 3: "POST", 4: "/", 5: "/index.html", 6: "http", 7: "https", 16: "gzip, deflate"}
_VALUES |= {8 + index: str(status) for index, status in enumerate((200, 204, 206, 304, 400, 404, 500))}
#: The bits of each character's Huffman code, and of the end's: A for 5. Codes are in the order of (bits, character).
_BITS = (
    "ISXXXXXXXTZXXZXXXXXXXXZXXXXXXXXXBFFHIBDGFFDGDBBBAAABBBBBBBCDKBHFIBCCCCCCCCCCCCCCCCCCCCCCDCDIOIJBKABABABBBACCBBBAB"
    "CBAABCCCCCKGJIXPRPPRRRSRSSSSSTSTTRSTSSSSQRSRSSTRQPRRSSQSRRTQRSSQQRQSRSSPRRRSRRSVVPORSRUVVVWWVTUOQVWWVWTQQVVXWWWPT"
    "PQRQQSRRUUTTVSVWVVWWWWWXWWWWWVZ"
)
_SHORTEST = 5


class BadBlock(ValueError):
    """A block that isn't HPACK, or that refers to a dynamic table."""


def _codes() -> dict[tuple[int, int], int]:
    """Characters by (bits, code); 256 is the end."""
    found: dict[tuple[int, int], int] = {}
    code, before = 0, _SHORTEST
    for bits, character in sorted((ord(one) - ord("A") + _SHORTEST, index) for index, one in enumerate(_BITS)):
        code <<= bits - before
        found[bits, code] = character
        code, before = code + 1, bits
    return found


_CODES = _codes()


def encoded(fields: Iterable[tuple[str, str]]) -> bytes:
    """A block with these fields, in lower case, without indexing."""
    parts = []
    for name, value in fields:
        for text in (name, value):
            raw = text.encode()
            parts.append(_number(len(raw), 7) + raw)
        parts[-2] = b"\0" + parts[-2]
    return b"".join(parts)


def _number(value: int, bits: int) -> bytes:
    most = (1 << bits) - 1
    if value < most:
        return bytes((value,))
    found, value = bytearray((most,)), value - most
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


def decoded(block: bytes, wanted: frozenset[str]) -> Mapping[str, str]:
    """The fields with these names; the last one if a name repeats. Raises BadBlock."""
    return _kept(block, wanted) if len(block) <= _KEPT_BYTES_MAX else _decoded(block, wanted)


@lru_cache(_KEPT_MAX)
def _kept(block: bytes, wanted: frozenset[str]) -> Mapping[str, str]:
    return _decoded(block, wanted)


def _decoded(block: bytes, wanted: frozenset[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    at = 0
    try:
        while at < len(block):
            first = block[at]
            if first & 0x80:  # a field of the table
                index, at = _read_number(block, at, 7)
                found[_name(index)] = _VALUES.get(index, "")
                continue
            if first & 0xE0 == 0x20:  # the table's size
                _, at = _read_number(block, at, 5)
                continue
            index, at = _read_number(block, at, 6 if first & 0x40 else 4)
            start, at = at, at if index else _behind_text(block, at)
            name = _name(index) if index else _text(block[start:at])
            start, at = at, _behind_text(block, at)
            if name in wanted:
                found[name] = _text(block[start:at])
    except IndexError:
        raise BadBlock("a block of header fields ends too early") from None
    return found


def _name(index: int) -> str:
    if not 1 <= index <= len(_STATIC):
        raise BadBlock(f"a header field is said to be entry {index} of a table that has {len(_STATIC)}")
    return _STATIC[index - 1]


def _read_number(block: bytes, at: int, bits: int) -> tuple[int, int]:
    """An integer with a prefix of this many bits, and the position after it."""
    most = (1 << bits) - 1
    value, at = block[at] & most, at + 1
    if value < most:
        return value, at
    for shift in range(0, 32, 7):
        byte, at = block[at], at + 1
        value += (byte & 127) << shift
        if byte < 128:
            return value, at
    raise BadBlock("a number in a block of header fields is too large")


def _behind_text(block: bytes, at: int) -> int:
    size, at = _read_number(block, at, 7)
    if at + size > len(block):
        raise IndexError
    return at + size


def _text(written: bytes) -> str:
    return _kept_text(written) if len(written) <= _KEPT_BYTES_MAX else _read_text(written)


@lru_cache(_KEPT_MAX)
def _kept_text(written: bytes) -> str:
    return _read_text(written)


def _read_text(written: bytes) -> str:
    """The text of a string literal."""
    _, at = _read_number(written, 0, 7)
    raw = written[at:]
    return (_unpacked(raw) if written[0] & 0x80 else raw).decode("utf-8", "replace")


def _unpacked(raw: bytes) -> bytes:
    found, code, bits = bytearray(), 0, 0
    for byte in raw:
        for shift in range(7, -1, -1):
            code, bits = code << 1 | byte >> shift & 1, bits + 1
            character = _CODES.get((bits, code))
            if character is not None:
                if character == len(_BITS) - 1:
                    raise BadBlock("a Huffman code in a block of header fields is the end's")
                found.append(character)
                code = bits = 0
    if bits > 7 or code != (1 << bits) - 1:
        raise BadBlock("a text in a block of header fields ends within a character")
    return bytes(found)
