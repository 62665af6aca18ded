"""BYTES tensors as the texts that graphs take and give."""

from __future__ import annotations

from typing import Any

import numpy as np

from ts.compat.triton_backend.errors import TritonModelException
from ts.tensors.datatypes import bytes_array
from ts.tensors.types import Tensor


def texts(tensor: Tensor) -> Any:
    """A BYTES tensor as an array of str. TritonModelException for what isn't UTF-8."""
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
