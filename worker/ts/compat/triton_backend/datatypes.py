"""Triton's names and numbers of datatypes, and the serialised form of BYTES tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ts.compat.triton_backend.errors import TritonModelException
from ts.protocol.datatypes import DATATYPES, OF_CONFIG_TYPE, OF_NUMBER, Datatype
from ts.tensors.types import Array, Tensor, bytes_array, datatype_of, encode_raw, split_bytes


def of_config(name: str) -> str:
    """`TYPE_STRING` -> `BYTES`, `TYPE_FP32` -> `FP32`; an unknown name loses its prefix."""
    row = OF_CONFIG_TYPE.get(name) or OF_CONFIG_TYPE.get(f"TYPE_{name}")
    return name.removeprefix("TYPE_") if row is None else row.name


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """`TYPE_FP32` -> numpy's type. Raises ValueError for a datatype that numpy lacks."""
    return _numpy_type(DATATYPES.get(of_config(triton_type_string)), triton_type_string)


def triton_to_numpy_type(data_type: int) -> Any:
    """`triton_string_to_numpy` for a number in TRITONSERVER_DataType."""
    return _numpy_type(OF_NUMBER.get(int(data_type)), data_type)


def _numpy_type(row: Datatype | None, given: object) -> Any:
    if row is None or row.as_bits:
        raise ValueError(f"{given!r} has no numpy type")
    return bool if row.element is bool else row.dtype.type


def numpy_to_triton_type(data_type: Any) -> int:
    """The number of numpy's type in TRITONSERVER_DataType. Raises BadTensor for a type without a number."""
    return DATATYPES[datatype_of(np.empty(0, data_type))].number


def serialize_byte_tensor(input_tensor: Array) -> Array | None:
    """The elements with their lengths, as one array of uint8; None for an empty tensor."""
    if input_tensor.size == 0:
        return None
    return np.frombuffer(encode_raw("BYTES", input_tensor), np.uint8)


def deserialize_bytes_tensor(encoded_tensor: bytes | npt.NDArray[np.uint8]) -> Array:
    """Decodes the elements that `serialize_byte_tensor` encoded."""
    data, count, at = bytes(encoded_tensor), 0, 0
    while at + 4 <= len(data):
        at += 4 + int.from_bytes(data[at : at + 4], "little")
        count += 1
    return bytes_array(split_bytes(data, count, "tensor"), [count])


def texts(tensor: Tensor) -> Any:
    """A BYTES tensor as an array of str. Raises TritonModelException for elements that aren't UTF-8."""
    try:
        flat = [bytes(value).decode() for value in tensor.array.ravel()]
    except UnicodeDecodeError as error:
        raise TritonModelException(f"input {tensor.name!r} is not UTF-8: {error}") from None
    found = np.empty(len(flat), dtype=object)
    found[:] = flat
    return found.reshape(tensor.shape)


def bytes_of(name: str, array: Any) -> Tensor:
    """An array of str as a BYTES tensor."""
    flat = [value.encode() if isinstance(value, str) else bytes(value) for value in array.ravel().tolist()]
    return Tensor(name, "BYTES", bytes_array(flat, array.shape))
