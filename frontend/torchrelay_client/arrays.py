"""Values of callers to the protocol's tensors, and answers' tensors to numpy arrays."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from torchrelay_client.grpc_predict_v2_pb2 import InferTensorContents
from ts.protocol.datatypes import DATATYPES, OF_ARRAY_TYPE, OF_FIELD, Datatype
from ts.tensors.types import (
    Array,
    BadTensor,
    Tensor,
    bytes_array,
    datatype,
    decode_raw,
    elements,
    encode_raw,
    narrowed,
    widened,
)

__all__ = ["Array", "BadTensor", "Typed", "encoded", "from_contents", "from_raw"]


@dataclass(frozen=True, slots=True)
class Typed:
    """A value with the datatype it shall have (`"INT32"`, `"BF16"`, …), where the value alone doesn't say. `value` is
    anything numpy makes an array of; for BF16 numbers, which are rounded to the nearest."""

    datatype: str
    value: Any


def encoded(name: str, value: Any) -> tuple[str, list[int], bytes]:
    """Datatype, shape and raw bytes of an input.

    Numpy arrays keep their type and shape, torch tensors too; nested lists become INT64, FP64, BOOL or BYTES; text and
    bytes are BYTES of shape [1]. Raises BadTensor, naming the input, for other values.
    """
    try:
        tensor = _typed(name, value) if isinstance(value, Typed) else _plain(name, value)
    except (BadTensor, ValueError, TypeError, OverflowError) as error:
        raise BadTensor(f"input {name!r}: {error}") from None
    return tensor.datatype, list(tensor.shape), encode_raw(tensor.datatype, tensor.array)


def _plain(name: str, value: Any) -> Tensor:
    kind = OF_ARRAY_TYPE.get(getattr(getattr(value, "dtype", None), "name", ""))
    if kind is not None and kind.as_bits:
        return _of_numbers(name, kind, np.asarray(value).astype(np.float32))
    tensor = Tensor.of(name, value)
    if tensor.array.dtype == object:
        for element in tensor.array.ravel():
            if not isinstance(element, (str, bytes, bytearray, memoryview)):
                raise BadTensor(f"{element!r} is not a number, boolean, string or bytes")
    return tensor


def _typed(name: str, wanted: Typed) -> Tensor:
    kind = datatype(wanted.datatype, "Typed")
    if kind.as_bits:
        return _of_numbers(name, kind, np.asarray(wanted.value, np.float32))
    if kind.name == "BYTES":
        tensor = Tensor.of(name, wanted.value)
        return tensor if tensor.datatype == "BYTES" else Tensor(name, "BYTES", tensor.array.astype(object))
    return Tensor(name, kind.name, np.asarray(wanted.value, kind.dtype))


def _of_numbers(name: str, kind: Datatype, numbers: Array) -> Tensor:
    return Tensor(name, kind.name, narrowed(kind, numbers))


def from_raw(name: str, kind: str, shape: list[int], data: bytes) -> Array:
    """An output's array: BYTES as objects of type bytes, BF16 as float32. A single BYTES element may come without its
    length before it. Raises BadTensor when bytes and shape don't agree."""
    label = f"output {name!r}"
    found = datatype(kind, label)
    if kind == "BYTES" and elements(shape, label) == 1 and not _has_length(data):
        return bytes_array([data], shape)
    return widened(found, decode_raw(found, shape, data, label))


def _has_length(data: bytes) -> bool:
    return len(data) >= 4 and int.from_bytes(data[:4], "little") == len(data) - 4


def from_contents(name: str, kind: str, shape: list[int], contents: InferTensorContents) -> Array:
    """The array of an output with typed contents. Without a datatype: of the field that has elements, in one row."""
    filled = [(field.name, values) for field, values in contents.ListFields()]
    field, values = filled[0] if filled else ("", [])
    if kind == "BYTES" or field == "bytes_contents":
        return bytes_array(list(values), shape or [len(values)])
    dtype = datatype(kind, f"output {name!r}").dtype if kind else OF_FIELD.get(field, DATATYPES["FP32"]).dtype
    try:
        return np.array(values, dtype).reshape(tuple(shape) if shape or kind else (-1,))
    except ValueError as error:
        raise BadTensor(f"output {name!r}: {error}") from None
