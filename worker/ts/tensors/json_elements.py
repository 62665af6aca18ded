"""A tensor's elements in JSON: flat or nested numbers, truth values, texts."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ts.protocol.datatypes import Datatype
from ts.tensors.types import Array, BadTensor, Tensor, as_bytes, bytes_array, elements

#: What to do with elements that are no text.
NO_TEXT = "Send bytes that are no text as binary data, or in base64 with the input's parameter content_type base64"
_SCALARS = (str, int, float, bool)


def from_json(kind: Datatype, shape: Sequence[int], data: Any, parameters: dict[str, Any], label: str) -> Array:
    """`data`, flat or nested, as an array of `shape`; a single element needs no list. Raises BadTensor."""
    count = elements(shape, label)
    flat = _flat([data] if count == 1 and isinstance(data, _SCALARS) else data, label)
    if len(flat) != count:
        raise BadTensor(f"{label}: {len(flat)} elements in data, but shape {list(shape)} takes {count}")
    if kind.name == "BYTES":
        return bytes_array([_bytes(value, parameters, label) for value in flat], shape)
    if kind.as_bits:
        raise BadTensor(f"{label}: {kind.name} has no form in JSON: send it as binary data")
    return _numbers(kind, flat, label).reshape(tuple(shape))


def _flat(data: Any, label: str) -> list[Any]:
    if not isinstance(data, list):
        raise BadTensor(f"{label}: data is a list, not {type(data).__name__}")
    flat: list[Any] = data
    while flat and isinstance(flat[0], list):
        if not all(isinstance(row, list) for row in flat):
            raise BadTensor(f"{label}: data mixes lists and elements")
        flat = [value for row in flat for value in row]
    return flat


def _numbers(kind: Datatype, flat: list[Any], label: str) -> Array:
    wanted: tuple[type, ...] = (kind.element,)
    if kind.element is float:
        wanted = (int, float)
        flat = [math.nan if value is None else value for value in flat]
    for value in flat:
        if type(value) not in wanted:
            raise BadTensor(f"{label}: {value!r} is no {kind.name}")
    try:
        with np.errstate(over="ignore"):
            array = np.array(flat, kind.dtype)
    except OverflowError as error:
        raise BadTensor(f"{label}: an element does not fit {kind.name}: {error}") from None
    if kind.element is int and flat and (min(flat) < np.iinfo(kind.dtype).min or max(flat) > np.iinfo(kind.dtype).max):
        raise BadTensor(f"{label}: an element does not fit {kind.name}")
    return array


def _bytes(value: Any, parameters: dict[str, Any], label: str) -> bytes:
    if not isinstance(value, str):
        raise BadTensor(f"{label}: an element of BYTES is a text, not {value!r}")
    if parameters.get("content_type") == "base64":
        try:
            return base64.b64decode(value, validate=True)
        except ValueError as error:
            raise BadTensor(f"{label}: {value[:40]!r} is not base64: {error}") from None
    return text_bytes(value, label)


def text_bytes(value: str, label: str) -> bytes:
    """A text in UTF-8. BadTensor for one with half a character, which JSON can write (`"\\ud83d"`)."""
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise BadTensor(
            f"{label}: {value[error.start]!r} is half a character, which UTF-8 can't have. {NO_TEXT}"
        ) from None


def to_json(tensor: Tensor, parameters: dict[str, Any]) -> list[Any]:
    """The elements, flat; bytes that are no text become base64, which `parameters` then say."""
    if tensor.datatype == "BYTES":
        return _texts([as_bytes(value) for value in tensor.array.ravel()], parameters)
    flat = tensor.numbers().ravel()
    values: list[Any] = flat.tolist()
    if flat.dtype.kind == "f":
        return [value if math.isfinite(value) else None for value in values]
    return values


def _texts(values: list[bytes], parameters: dict[str, Any]) -> list[Any]:
    if parameters.get("content_type") != "base64":
        try:
            return [value.decode() for value in values]
        except UnicodeDecodeError:
            parameters["content_type"] = "base64"
    return [base64.b64encode(value).decode() for value in values]
