"""JSON as the tensor protocols have it. The standard library's `json` is the reference; `msgspec` reads and writes the
same several times faster, and is used where it does.

Values it refuses (NaN, halves of characters, numbers beyond a float64) go to `json`. Numbers beyond 64 bits it reads
exactly. Exponents of floats it writes otherwise, which `list_text` mends.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

_DECODER = msgspec.json.Decoder()
_ENCODER = msgspec.json.Encoder()
#: Types that both write alike; `json` writes other values (dates, bytes, sets, subclasses, floats).
_ALIKE = frozenset({str, int, bool, type(None)})
#: Longer lists and deeper values aren't checked, and go to `json`.
_LIST_MAX, _DEPTH_MAX = 64, 8
_FLOATS_WITH_EXPONENT = re.compile(rb"[^\[,]*(?:e|0\.0000)[^\],]*")


def loaded(data: bytes) -> Any:
    """The value that `json.loads` gives. Raises ValueError (UnicodeDecodeError among them) and RecursionError."""
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return json.loads(data)


def dumped(message: Any) -> bytes:
    """JSON in UTF-8; text that UTF-8 can't encode (lone surrogates) is escaped, and values unknown to JSON become their
    text."""
    try:
        if _is_alike(message):
            return _ENCODER.encode(message)
        return json.dumps(message, ensure_ascii=False, separators=(",", ":"), default=str).encode()
    except UnicodeEncodeError:
        return json.dumps(message, separators=(",", ":"), default=str).encode()


def _is_alike(value: Any, depth: int = _DEPTH_MAX) -> bool:
    """Whether both write it alike, as far as that is looked into."""
    kind = type(value)
    if kind is dict:
        return depth > 0 and all(type(name) is str and _is_alike(one, depth - 1) for name, one in value.items())
    if kind is list:
        return depth > 0 and len(value) <= _LIST_MAX and all(_is_alike(one, depth - 1) for one in value)
    return kind in _ALIKE


def list_text(values: list[Any]) -> bytes:
    """A flat list of texts, truth values, whole numbers or floats, all of one of these types. Floats are written as
    their `repr`, those that aren't finite as null."""
    text = _ENCODER.encode(values)
    if values and type(values[0]) is float and (b"e" in text or b"0.0000" in text):
        return _FLOATS_WITH_EXPONENT.sub(lambda found: repr(float(found[0])).encode(), text)
    return text
