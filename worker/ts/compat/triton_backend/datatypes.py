"""Triton's names and numbers of datatypes, and the serialised form of BYTES tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ts.tensors.datatypes import Array, bytes_array, datatype_of, encode_raw, split_bytes

_ORDER = (
    *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "BYTES", "BF16"),
)
#: As in TRITONSERVER_DataType
NUMBERS = {name: number for number, name in enumerate(_ORDER, 1)}
_NAMES = {number: name for name, number in NUMBERS.items()}
_NUMPY: dict[str, Any] = {
    "BOOL": bool,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    "BYTES": np.object_,
}


def of_config(name: str) -> str:
    """`TYPE_STRING` -> `BYTES`, `TYPE_FP32` -> `FP32`."""
    short = name.removeprefix("TYPE_")
    return "BYTES" if short == "STRING" else short


def to_config(name: str) -> str:
    return "TYPE_STRING" if name == "BYTES" else f"TYPE_{name}"


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """`TYPE_FP32` -> numpy's type; ValueError for what has none."""
    try:
        return _NUMPY[of_config(triton_type_string)]
    except KeyError:
        raise ValueError(f"{triton_type_string!r} has no numpy type") from None


def triton_to_numpy_type(data_type: int) -> Any:
    try:
        return _NUMPY[_NAMES[int(data_type)]]
    except KeyError:
        raise ValueError(f"datatype {data_type!r} has no numpy type") from None


def numpy_to_triton_type(data_type: Any) -> int:
    return NUMBERS[datatype_of(np.empty(0, data_type))]


def serialize_byte_tensor(input_tensor: Array) -> Array | None:
    """The elements with their lengths, as one array of uint8; None for an empty tensor."""
    if input_tensor.size == 0:
        return None
    return np.frombuffer(encode_raw("BYTES", input_tensor), np.uint8)


def deserialize_bytes_tensor(encoded_tensor: bytes | npt.NDArray[np.uint8]) -> Array:
    """The elements in what `serialize_byte_tensor` gives."""
    data, count, at = bytes(encoded_tensor), 0, 0
    while at + 4 <= len(data):
        at += 4 + int.from_bytes(data[at : at + 4], "little")
        count += 1
    return bytes_array(split_bytes(data, count, "tensor"), [count])
