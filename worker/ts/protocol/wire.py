"""The wire format of protobuf: numbers, sizes and fields, for messages that are read or written without its parser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from ts.protocol.frames import Buffer

#: The kinds of fields: a number, bytes with a size before them, and the begin and the end of a group.
VARINT: Final = 0
SIZED: Final = 2
_GROUP: Final = 3
_GROUP_END: Final = 4
_FIXED_BYTES: Final = {1: 8, 5: 4}
_VARINT_SHIFT_MAX: Final = 63
#: The shift of the last byte of a size, which has 32 bits at most.
_SIZE_SHIFT_MAX: Final = 28
_TAG_MAX: Final = (1 << 32) - 1
#: The most groups in each other.
_GROUPS_MAX: Final = 16_384


class Malformed(ValueError):
    """The bytes aren't a message; the text gives the reason."""


class Field(NamedTuple):
    """A field of a message: its tag begins at `start`, its content reaches from `value` to `end`."""

    number: int
    kind: int
    start: int
    value: int
    end: int


def fields(data: Buffer, at: int, end: int) -> Iterator[Field]:
    """Yields the fields between `at` and `end`; those of a group are one field. Raises Malformed."""
    groups: list[tuple[int, int]] = []
    while at < end:
        start = at
        tag, at = varint(data, at, end)
        number, kind = tag >> 3, tag & 7
        if not number or tag > _TAG_MAX:
            raise Malformed(f"its byte {start} begins no field")
        value = at
        if kind == SIZED:
            size, value = size_at(data, at, end)
            at = value + size
        elif kind == VARINT:
            _, at = varint(data, at, end)
        elif kind in _FIXED_BYTES:
            at += _FIXED_BYTES[kind]
        elif kind == _GROUP:
            groups.append((number, start))
            if len(groups) > _GROUPS_MAX:
                raise Malformed(f"it has more than {_GROUPS_MAX} groups in each other")
        elif kind == _GROUP_END and groups and groups[-1][0] == number:
            _, start = groups.pop()
        else:
            raise Malformed(f"its byte {start} begins no field")
        if at > end:
            raise Malformed(f"it ends inside the field {number}")
        if not groups:
            yield Field(number, kind, start, value, at)
    if groups:
        raise Malformed(f"it ends inside the group {groups[-1][0]}")


def varint(data: Buffer, at: int, end: int, shift_max: int = _VARINT_SHIFT_MAX) -> tuple[int, int]:
    """Returns the number that begins at `at`, and the position after it. Raises Malformed."""
    number = shift = 0
    while at < end and shift <= shift_max:
        byte = data[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
        shift += 7
    raise Malformed(f"its byte {at} is inside a number without an end")


def size_at(data: Buffer, at: int, end: int) -> tuple[int, int]:
    """Returns the size of a field that begins at `at`, and the position after it. Raises Malformed."""
    return varint(data, at, end, _SIZE_SHIFT_MAX)


def varint_of(number: int) -> bytes:
    """Returns the bytes of a number, 7 bits a byte, the lowest first."""
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)


def prefix(field: int, size: int) -> bytes:
    """Returns the bytes before a field of `size` bytes: its tag, whose number is below 16, and its size."""
    tag = field << 3 | SIZED
    return bytes((tag, size)) if size < 128 else bytes((tag,)) + varint_of(size)
