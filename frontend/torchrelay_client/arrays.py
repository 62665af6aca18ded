"""Values of callers to the protocol's tensors, and answers' tensors to numpy arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from torchrelay_client.grpc_predict_v2_pb2 import InferTensorContents
from ts.tensors.datatypes import Array, BadTensor, bytes_array, datatype, decode_raw, elements, encode_raw
from ts.tensors.types import Tensor

__all__ = ["Array", "BadTensor", "Typed", "encoded", "from_contents", "from_raw"]

_BF16_SHIFT, _BF16_HALF = 16, 0x7FFF


@dataclass(frozen=True, slots=True)
class Typed:
    """A value with the datatype it shall have (`"INT32"`, `"BF16"`, …), where the value alone doesn't say. `value` is
    anything numpy makes an array of; for BF16 numbers, which are rounded to the nearest."""

    datatype: str
    value: Any


def encoded(name: str, value: Any) -> tuple[str, list[int], bytes]:
    """Datatype, shape and raw bytes of an input.

    Numpy arrays keep their type and shape, torch tensors too; nested lists become INT64, FP64, BOOL or BYTES; text and
    bytes are BYTES of shape [1]. Raises BadTensor, naming the input, for what is none.
    """
    try:
        tensor = _typed(name, value) if isinstance(value, Typed) else _plain(name, value)
    except (BadTensor, ValueError, TypeError, OverflowError) as error:
        raise BadTensor(f"input {name!r}: {error}") from None
    return tensor.datatype, list(tensor.shape), encode_raw(tensor.datatype, tensor.array)


def _plain(name: str, value: Any) -> Tensor:
    if getattr(getattr(value, "dtype", None), "name", "") == "bfloat16":
        return _bf16(name, np.asarray(value).astype(np.float32))
    tensor = Tensor.of(name, value)
    if tensor.array.dtype == object:
        for element in tensor.array.ravel():
            if not isinstance(element, (str, bytes, bytearray, memoryview)):
                raise BadTensor(f"{element!r} is no number, truth value, text or bytes")
    return tensor


def _typed(name: str, wanted: Typed) -> Tensor:
    kind = datatype(wanted.datatype, "Typed")
    if kind.name == "BF16":
        return _bf16(name, np.asarray(wanted.value, np.float32))
    if kind.name == "BYTES":
        tensor = Tensor.of(name, wanted.value)
        return tensor if tensor.datatype == "BYTES" else Tensor(name, "BYTES", tensor.array.astype(object))
    return Tensor(name, kind.name, np.asarray(wanted.value, kind.dtype))


def _bf16(name: str, numbers: Array) -> Tensor:
    """The upper halves of float32's bits, rounded to the nearest (ties to even); NaN stays NaN."""
    bits = np.ascontiguousarray(numbers, "<f4").view("<u4").astype(np.uint64)
    rounded = ((bits + _BF16_HALF + ((bits >> _BF16_SHIFT) & 1)) >> _BF16_SHIFT).astype("<u2")
    return Tensor(name, "BF16", np.where(np.isnan(numbers), np.uint16(0x7FC0), rounded).astype("<u2"))


def _from_bf16(bits: Array) -> Array:
    return (bits.astype("<u4") << _BF16_SHIFT).view("<f4")


def from_raw(name: str, kind: str, shape: list[int], data: bytes) -> Array:
    """An output's array: BYTES as objects of type bytes, BF16 as float32. A single BYTES element may come without its
    length before it. Raises BadTensor when bytes and shape don't agree."""
    label = f"output {name!r}"
    found = datatype(kind, label)
    if kind == "BYTES" and elements(shape, label) == 1 and not _has_length(data):
        return bytes_array([data], shape)
    array = decode_raw(found, shape, data, label)
    return _from_bf16(array) if kind == "BF16" else array


def _has_length(data: bytes) -> bool:
    return len(data) >= 4 and int.from_bytes(data[:4], "little") == len(data) - 4


def from_contents(name: str, kind: str, shape: list[int], contents: InferTensorContents) -> Array:
    """The array of an output with typed contents. Without a datatype: of the field that has elements, in one row."""
    filled = [(field.name, values) for field, values in contents.ListFields()]
    field, values = filled[0] if filled else ("", [])
    if kind == "BYTES" or field == "bytes_contents":
        return bytes_array(list(values), shape or [len(values)])
    dtype = datatype(kind, f"output {name!r}").dtype if kind else _DTYPES.get(field, np.dtype("f4"))
    try:
        return np.array(values, dtype).reshape(tuple(shape) if shape or kind else (-1,))
    except ValueError as error:
        raise BadTensor(f"output {name!r}: {error}") from None


_DTYPES = {
    "bool_contents": np.dtype("?"),
    "int_contents": np.dtype("<i4"),
    "int64_contents": np.dtype("<i8"),
    "uint_contents": np.dtype("<u4"),
    "uint64_contents": np.dtype("<u8"),
    "fp32_contents": np.dtype("<f4"),
    "fp64_contents": np.dtype("<f8"),
}
