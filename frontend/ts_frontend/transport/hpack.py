"""Header compression for HTTP/2 (HPACK, RFC 7541): header blocks to fields and back. No I/O.

The decoder keeps the dynamic table that the client fills. The encoder uses none, so that a block never depends on an
earlier one: the server's headers are few, and each is encoded once."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final, TypeAlias

#: A header's name, in lower case, and its value.
Field: TypeAlias = "tuple[bytes, bytes]"
#: SETTINGS_HEADER_TABLE_SIZE (RFC 9113, 6.5.2): the size of the dynamic table that a client may fill.
TABLE_BYTES_MAX: Final = 4096
#: The beginning of a block that leaves the dynamic table without room (RFC 7541, 6.3).
NO_TABLE: Final = b"\x20"
#: What an entry counts beside its name and its value (RFC 7541, 4.1).
ENTRY_BYTES: Final = 32
#: The largest index, length or size. Nothing that fits into a header block is larger.
INTEGER_MAX: Final = 1 << 24
#: Blocks that change no table mean the same again: so many of at most so many bytes are kept for a connection. A gRPC
#: client without deadlines sends one block for each method.
KEPT_MAX: Final = 16
KEPT_BYTES_MAX: Final = 256
#: The encoder keeps so many fields, with values of at most so many bytes.
ENCODED_MAX: Final = 512
ENCODED_BYTES_MAX: Final = 128

#: Names of the static table (RFC 7541, appendix A) from its entry 1 on, and the values of those that have one.
_NAMES: Final = [
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
_VALUES: Final = {
    2: "GET",
    3: "POST",
    4: "/",
    5: "/index.html",
    6: "http",
    7: "https",
    16: "gzip, deflate",
    **{8 + index: str(status) for index, status in enumerate((200, 204, 206, 304, 400, 404, 500))},
}
STATIC: Final[list[Field]] = [
    (b"", b""),
    *((name.encode(), _VALUES.get(index, "").encode()) for index, name in enumerate(_NAMES, 1)),
]
STATIC_COUNT: Final = len(STATIC)
#: The bits of each character's Huffman code (appendix B), and of the end's: A for 5. Codes are in the order of
#: (bits, character).
_BITS: Final = (
    "ISXXXXXXXTZXXZXXXXXXXXZXXXXXXXXXBFFHIBDGFFDGDBBBAAABBBBBBBCDKBHFIBCCCCCCCCCCCCCCCCCCCCCCDCDIOIJBKABABABBBACCBBBAB"
    "CBAABCCCCCKGJIXPRPPRRRSRSSSSSTSTTRSTSSSSQRSRSSTRQPRRSSQSRRTQRSSQQRQSRSSPRRRSRRSVVPORSRUVVVWWVTUOQVWWVWTQQVVXWWWPT"
    "PQRQQSRRUUTTVSVWVVWWWWWXWWWWWVZ"
)
_SHORTEST: Final = 5


class BadBlock(ValueError):
    """A block that isn't HPACK: a connection error of type COMPRESSION_ERROR."""


class FieldsTooLarge(ValueError):
    """The fields of a block are larger than the limit; `fields`: those up to it. The table is as after any block."""

    def __init__(self, text: str, fields: tuple[Field, ...]) -> None:
        super().__init__(text)
        self.fields = fields


def _huffman() -> list[int]:
    """A state machine that reads four bits at a time: `[state << 4 | bits]` is the next state << 10, with the character
    + 1 that ends within these bits << 1, and 1 if a text may end here. -1: no code begins like this. State 0 is between
    two characters."""
    nodes: list[list[int]] = [[0, 0]]  # children; a leaf is -1 - character
    code, before = 0, _SHORTEST
    for bits, character in sorted((ord(one) - ord("A") + _SHORTEST, index) for index, one in enumerate(_BITS)):
        code <<= bits - before
        node = 0
        for shift in range(bits - 1, 0, -1):
            bit = code >> shift & 1
            if nodes[node][bit] == 0:
                nodes.append([0, 0])
                nodes[node][bit] = len(nodes) - 1
            node = nodes[node][bit]
        nodes[node][code & 1] = -1 - character
        code, before = code + 1, bits
    # A text may end with fewer than eight bits of the end's code, which are all ones (5.2).
    ending, node = {0}, 0
    for _ in range(7):
        node = nodes[node][1]
        ending.add(node)
    table: list[int] = []
    for state in range(len(nodes)):
        for nibble in range(16):
            node, found = state, 0
            for shift in (3, 2, 1, 0):
                node = nodes[node][nibble >> shift & 1]
                if node < 0:
                    found, node = -node, 0
            ended = found == len(_BITS)  # the end's code within a text is an error
            table.append(-1 if ended else node << 10 | found << 1 | int(node in ending))
    return table


_HUFFMAN: Final[list[int]] = _huffman()


def huffman_decoded(raw: bytes) -> bytes:
    """The text of a Huffman-coded string. Raises BadBlock."""
    table, found, entry = _HUFFMAN, bytearray(), 1
    for byte in raw:
        for bits in (byte >> 4, byte & 15):
            entry = table[entry >> 10 << 4 | bits]
            if entry < 0:
                raise BadBlock("a Huffman-coded text contains the code of its end")
            character = entry >> 1 & 511
            if character:
                found.append(character - 1)
    if not entry & 1:
        raise BadBlock("a Huffman-coded text ends within a character")
    return bytes(found)


def _integer(block: bytes, at: int, most: int) -> tuple[int, int]:
    """An integer whose first byte has the mask `most` (5.1), and the position after it. Raises BadBlock, IndexError."""
    value = block[at] & most
    at += 1
    if value < most:
        return value, at
    shift = 0
    while True:
        byte = block[at]
        at += 1
        value += (byte & 127) << shift
        if value > INTEGER_MAX or shift > 28:
            raise BadBlock("a number is too large")
        if byte < 128:
            return value, at
        shift += 7


def _text(block: bytes, at: int) -> tuple[bytes, int]:
    """A string literal (5.2), and the position after it. Raises BadBlock, IndexError."""
    coded = block[at] & 128
    size, at = _integer(block, at, 127)
    end = at + size
    if end > len(block):
        raise BadBlock("a block ends within a text")
    raw = block[at:end]
    return (huffman_decoded(raw) if coded else raw), end


class Decoder:
    """Decodes a connection's blocks, in their order. `fields_bytes_max`: the largest size of a block's fields, of which
    each counts ENTRY_BYTES besides its name and its value (RFC 9113, 6.5.2)."""

    __slots__ = ("_changed", "_entries", "_fields_bytes_max", "_kept", "_size", "_size_max")

    def __init__(self, fields_bytes_max: int) -> None:
        self._fields_bytes_max = fields_bytes_max
        self._entries: list[Field] = []  # the newest is the last
        self._size = 0
        self._size_max = TABLE_BYTES_MAX
        self._changed = False
        self._kept: dict[bytes, tuple[Field, ...]] = {}

    def decode(self, block: bytes) -> tuple[Field, ...]:
        """A block's fields; equal blocks may give the same tuple.

        Raises:
            BadBlock: the connection can't go on.
            FieldsTooLarge: only this block's fields are lost.
        """
        kept = self._kept.get(block)
        if kept is not None:
            return kept
        self._changed = False
        try:
            fields = self._decode(block)
        except IndexError:
            raise BadBlock("a block ends too early") from None
        if self._changed:
            self._kept.clear()
        elif len(block) <= KEPT_BYTES_MAX and len(self._kept) < KEPT_MAX:
            self._kept[block] = fields
        return fields

    def _decode(self, block: bytes) -> tuple[Field, ...]:
        found: list[Field] = []
        left, at, end = self._fields_bytes_max, 0, len(block)
        while at < end:
            first = block[at]
            if first & 0x80:  # an indexed field (6.1)
                index, at = _integer(block, at, 0x7F)
                field = self._entry(index)
            elif first & 0xE0 == 0x20:  # the size of the table (6.3)
                size, at = _integer(block, at, 0x1F)
                if left < self._fields_bytes_max or size > TABLE_BYTES_MAX:
                    raise BadBlock("the size of the table changes within a block, or is over the limit")
                self._size_max, self._changed = size, True
                self._evict(size)
                continue
            else:  # a literal field (6.2)
                indexed = first & 0x40
                index, at = _integer(block, at, 0x3F if indexed else 0x0F)
                if index:
                    name = self._entry(index)[0]
                else:
                    name, at = _text(block, at)
                value, at = _text(block, at)
                field = (name, value)
                if indexed:
                    self._add(field)
            left -= ENTRY_BYTES + len(field[0]) + len(field[1])
            if left >= 0:
                found.append(field)
        if left < 0:
            if self._changed:
                self._kept.clear()
            raise FieldsTooLarge(f"The headers are larger than {self._fields_bytes_max} bytes", tuple(found))
        return tuple(found)

    def _entry(self, index: int) -> Field:
        """An entry of the static table, or behind it of the dynamic one. Raises BadBlock."""
        if 0 < index < STATIC_COUNT:
            return STATIC[index]
        at = index - STATIC_COUNT
        if at < 0 or at >= len(self._entries):
            raise BadBlock(f"there is no entry {index}")
        return self._entries[-1 - at]

    def _add(self, field: Field) -> None:
        """Adds an entry; one that is larger than the table empties it (4.4)."""
        self._changed = True
        size = ENTRY_BYTES + len(field[0]) + len(field[1])
        self._evict(self._size_max - size)
        if size <= self._size_max:
            self._entries.append(field)
            self._size += size

    def _evict(self, room: int) -> None:
        """Drops the oldest entries until the table has at most `room` bytes."""
        count = 0
        while self._size > room and count < len(self._entries):
            name, value = self._entries[count]
            self._size -= ENTRY_BYTES + len(name) + len(value)
            count += 1
        del self._entries[:count]


_STATIC_INDEX: Final[dict[Field, int]] = {field: index for index, field in enumerate(STATIC) if index and field[1]}
_NAME_INDEX: Final[dict[bytes, int]] = {STATIC[index][0]: index for index in range(len(STATIC) - 1, 0, -1)}


def encode(fields: Iterable[Field]) -> bytes:
    """A block with these fields. Names are in lower case."""
    return b"".join([_kept(field) if len(field[1]) <= ENCODED_BYTES_MAX else _encode(field) for field in fields])


@lru_cache(ENCODED_MAX)
def _kept(field: Field) -> bytes:
    return _encode(field)


def _encode(field: Field) -> bytes:
    """A field of the static table, or a literal that isn't indexed, without Huffman's code."""
    name, value = field
    index = _STATIC_INDEX.get(field)
    if index is not None:
        return bytes((0x80 | index,))
    index = _NAME_INDEX.get(name)
    beginning = _number(0, 0x0F, index) if index else b"\0" + _number(0, 0x7F, len(name)) + name
    return beginning + _number(0, 0x7F, len(value)) + value


def _number(first: int, most: int, value: int) -> bytes:
    if value < most:
        return bytes((first | value,))
    found = bytearray((first | most,))
    value -= most
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)
