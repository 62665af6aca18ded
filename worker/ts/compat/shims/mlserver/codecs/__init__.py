"""`mlserver.codecs`: conversion between tensors and the types that runtimes compute with."""

from __future__ import annotations

from importlib.util import find_spec

from .base import InputCodec, RequestCodec, register_input_codec, register_request_codec
from .base64 import Base64Codec
from .datetime import DatetimeCodec
from .decorator import decode_args
from .errors import CodecError, CodecNotFound
from .numpy import NumpyCodec, NumpyRequestCodec
from .string import StringCodec, StringRequestCodec
from .utils import (
    DecodedParameterName,
    decode_inference_request,
    decode_request_input,
    encode_inference_response,
    encode_response_output,
    get_decoded,
    get_decoded_or_raw,
    has_decoded,
)

if find_spec("pandas") is not None:
    from .pandas import PandasCodec as PandasCodec  # only where pandas is

InputCodecLike = type[InputCodec]
RequestCodecLike = type[RequestCodec]

__all__ = [
    "Base64Codec",
    "CodecError",
    "CodecNotFound",
    "DatetimeCodec",
    "DecodedParameterName",
    "InputCodec",
    "InputCodecLike",
    "NumpyCodec",
    "NumpyRequestCodec",
    "RequestCodec",
    "RequestCodecLike",
    "StringCodec",
    "StringRequestCodec",
    "decode_args",
    "decode_inference_request",
    "decode_request_input",
    "encode_inference_response",
    "encode_response_output",
    "get_decoded",
    "get_decoded_or_raw",
    "has_decoded",
    "register_input_codec",
    "register_request_codec",
]
