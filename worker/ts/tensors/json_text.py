"""JSON as the tensor protocols have it. The standard library's `json` is the reference; `msgspec` reads and writes the
same several times faster, and is used where it does.

A model's own environment may lack `msgspec`: `json` does everything there. Values that `msgspec` refuses (NaN, halves
of characters, numbers beyond a float64) go to `json`, too. Numbers beyond 64 bits it reads exactly. Exponents of floats
it writes otherwise, which `list_text` mends.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

try:
    import msgspec
except ImportError:
    _decode: Callable[[bytes], Any] | None = None
    _encode: Callable[[Any], bytes] | None = None
else:
    _decode, _encode = msgspec.json.Decoder().decode, msgspec.json.Encoder().encode

#: The types that both write in the same way; `json` writes other values (dates, bytes, sets, subclasses, floats).
_ALIKE = frozenset({str, int, bool, type(None)})
#: The longest lists and deepest values that are checked; others go to `json`.
_LIST_MAX, _DEPTH_MAX = 64, 8
_FLOATS_WITH_EXPONENT = re.compile(rb"[^\[,]*(?:e|0\.0000)[^\],]*")


def loaded(data: bytes) -> Any:
    """The value that `json.loads` gives. Raises ValueError (UnicodeDecodeError among them) and RecursionError."""
    if _decode is not None:
        try:
            return _decode(data)
        except (ValueError, RecursionError):  # its DecodeError is a ValueError
            pass
    return json.loads(data)


def dumped(message: Any) -> bytes:
    """JSON in UTF-8; lone surrogates are escaped, and values unknown to JSON become their text."""
    try:
        if _encode is not None and _is_alike(message):
            return _encode(message)
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
    if _encode is None:
        finite = [None if type(value) is float and not math.isfinite(value) else value for value in values]
        return json.dumps(finite, ensure_ascii=False, separators=(",", ":")).encode()
    text = _encode(values)
    # `in` costs a dozen times as much as `find`: it makes and drops an exception, as the operand is no number.
    if values and type(values[0]) is float and (text.find(b"e") >= 0 or text.find(b"0.0000") >= 0):
        return _FLOATS_WITH_EXPONENT.sub(lambda found: repr(float(found[0])).encode(), text)
    return text
