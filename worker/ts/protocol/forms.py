"""HTML forms as HTTP bodies: `application/x-www-form-urlencoded` and `multipart/form-data` (RFC 7578). No I/O.

Lenient, as parsers of forms are: a part without a name is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

URLENCODED = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data"
#: The longest names and parts; longer ones are refused.
PARTS_MAX = 4096
PART_HEAD_BYTES_MAX = 16 * 1024
#: The most content types from clients that are cached.
CONTENT_TYPES_MAX = 256

_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]{1,200})"|([^\s;"]{1,200}))', re.IGNORECASE)
_PARAMETER = re.compile(r';\s*([\w*-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;]*))')


class Part(NamedTuple):
    """A form's field. `content_type` is that of a file, "" for a field without a file name."""

    name: str
    content_type: str
    data: bytes


class MalformedForm(ValueError):
    """The body isn't a valid form of its content type."""


@lru_cache(maxsize=CONTENT_TYPES_MAX)
def is_form(content_type: str) -> bool:
    """True for the two content types of forms (compared case-insensitively, as in RFC 9110)."""
    return _base(content_type) in (URLENCODED, MULTIPART)


def _base(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def check(content_type: str, body: bytes) -> None:
    """Raises MalformedForm if `parts` couldn't read all of the body; takes a few searches at any size."""
    if _base(content_type) != URLENCODED:
        _check_multipart(_delimiter(content_type), body)
    elif body.count(b"&") >= PARTS_MAX:
        raise MalformedForm(f"The form has more than {PARTS_MAX} fields")


def _check_multipart(delimiter: bytes, body: bytes) -> None:
    line = b"\r\n" + delimiter
    end = -2 if body.startswith(delimiter) else body.find(line)
    for number in range(1, PARTS_MAX + 2):
        begin = end + len(line)
        if end != -1 and body.startswith(b"--", begin):
            return
        end = body.find(line, begin) if end != -1 else -1
        if end < 0:
            raise MalformedForm(f"The multipart body does not end with its closing boundary {delimiter + b'--'!r}")
        if body.find(b"\r\n\r\n", begin, min(end, begin + PART_HEAD_BYTES_MAX)) < 0:
            raise MalformedForm(
                f"Part {number} of the multipart body has no headers, or more than {PART_HEAD_BYTES_MAX} bytes of them"
            )
    raise MalformedForm(f"The multipart body has more than {PARTS_MAX} parts")


def parts(content_type: str, body: bytes) -> list[Part]:
    """The fields in their order. Raises MalformedForm for a multipart type without a boundary, or too many fields."""
    if _base(content_type) == URLENCODED:
        return _urlencoded(body)
    return list(_multipart(_delimiter(content_type), body))


def _urlencoded(body: bytes) -> list[Part]:
    """Parses bytes: `urllib.parse.parse_qsl` handles ASCII only."""
    check(URLENCODED, body)
    pairs = [field.partition(b"=") for field in body.split(b"&") if field]
    return [Part(_unquoted(name).decode("utf-8", "replace"), "", _unquoted(value)) for name, _, value in pairs]


def _unquoted(text: bytes) -> bytes:
    return unquote_to_bytes(text.replace(b"+", b" "))


def _delimiter(content_type: str) -> bytes:
    match = _BOUNDARY.search(content_type)
    if match is None:
        raise MalformedForm(f"The content type names no boundary: {content_type[:200]}")
    return b"--" + (match[1] or match[2]).encode("utf-8", "replace")


def _multipart(delimiter: bytes, body: bytes) -> Iterator[Part]:
    for block in (b"\r\n" + body).split(b"\r\n" + delimiter)[1 : PARTS_MAX + 1]:
        if block.startswith(b"--"):
            return
        head, blank, data = block.partition(b"\r\n\r\n")
        if blank and len(head) <= PART_HEAD_BYTES_MAX:
            yield from _part(head, data)


def _part(head: bytes, data: bytes) -> Iterator[Part]:
    headers: dict[str, str] = {}
    for line in head.decode("utf-8", "replace").split("\r\n"):
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip().lower()] = value.strip()
    parameters = {
        name.lower(): re.sub(r"\\(.)", r"\1", quoted) if quoted else plain
        for name, quoted, plain in _PARAMETER.findall(headers.get("content-disposition", ""))
    }
    if "name" in parameters:
        is_file = "filename" in parameters or "filename*" in parameters
        yield Part(parameters["name"], headers.get("content-type", "") if is_file else "", data)
