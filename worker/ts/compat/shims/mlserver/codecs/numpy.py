"""`mlserver.codecs.numpy`: arrays. One of shape [N] is sent as [N, 1]."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ts.protocol.datatypes import STANDARD

from ..types import Parameters, RequestInput, ResponseOutput, TensorData
from .base import InputCodec, register_input_codec, register_request_codec
from .errors import CodecError
from .utils import InputOrOutput, SingleInputRequestCodec, as_input, inject_batch_dimension, texts_and_bytes

_DTYPES = {row.name: row.array_type for row in STANDARD if row.element is not bytes}
_DATATYPES = {np.dtype(dtype): datatype for datatype, dtype in _DTYPES.items()}


def is_numeric(found: InputOrOutput) -> bool:
    return str(found.datatype) != "BYTES"


def to_dtype(input_or_output: InputOrOutput) -> np.dtype[Any]:
    if is_numeric(input_or_output):
        return np.dtype(_DTYPES[str(input_or_output.datatype)])
    values = texts_and_bytes(input_or_output)
    return np.dtype(str if values and isinstance(values[0], str) else bytes)


def to_datatype(dtype: np.dtype[Any]) -> str:
    if dtype.kind in "OSU":
        return "BYTES"
    try:
        return _DATATYPES[dtype if dtype.isnative else dtype.newbyteorder("=")]
    except KeyError:
        raise CodecError(f"an array of {dtype} has no datatype of the protocol") from None


def _array(found: InputOrOutput) -> np.ndarray[Any, Any]:
    """Texts become an array of texts, bytes one of bytes."""
    array = found.data.array()
    if is_numeric(found):
        return np.array(found.data.root if array is None else array, to_dtype(found))
    values, count = texts_and_bytes(found), math.prod(found.shape)
    if len(values) == 1 and count > 1:  # all elements in one piece, each of the same size
        return np.frombuffer(values[0], f"S{len(values[0]) // count}")
    return np.array(values, to_dtype(found))


def _data(payload: np.ndarray[Any, Any]) -> Any:
    """Numbers stay an array until the list is read."""
    if payload.dtype.kind not in "OSU":
        return payload.ravel()
    return [value.encode() if isinstance(value, str) else value for value in payload.ravel().tolist()]


@register_input_codec
class NumpyCodec(InputCodec):
    ContentType = "np"
    TypeHint = np.ndarray

    @classmethod
    def can_encode(cls, payload: Any) -> bool:
        return isinstance(payload, np.ndarray)

    @classmethod
    def encode_output(cls, name: str, payload: Any, **kwargs: Any) -> ResponseOutput:
        return ResponseOutput(
            name=name,
            datatype=to_datatype(payload.dtype),
            shape=inject_batch_dimension(list(payload.shape)),
            data=TensorData(_data(payload)),
            parameters=Parameters(content_type=cls.ContentType),
        )

    @classmethod
    def decode_output(cls, response_output: ResponseOutput) -> np.ndarray[Any, Any]:
        return _array(response_output).reshape(response_output.shape)

    @classmethod
    def encode_input(cls, name: str, payload: Any, **kwargs: Any) -> RequestInput:
        return as_input(cls.encode_output(name, payload))

    @classmethod
    def decode_input(cls, request_input: RequestInput) -> np.ndarray[Any, Any]:
        return _array(request_input).reshape(request_input.shape)


@register_request_codec
class NumpyRequestCodec(SingleInputRequestCodec):
    InputCodec = NumpyCodec
    ContentType = "np"
    TypeHint = np.ndarray
