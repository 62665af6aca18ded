"""`mlserver.codecs.base64`: lists of bytes, as base64 on their way."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from ..types import Parameters, RequestInput, ResponseOutput, TensorData
from .base import InputCodec, register_input_codec
from .utils import InputOrOutput, as_input, texts_and_bytes


def _encoded(value: Any, use_bytes: bool) -> bytes | str:
    found = base64.b64encode(value.encode("ascii") if isinstance(value, str) else value)
    return found if use_bytes else found.decode()


def _decoded(found: InputOrOutput) -> list[bytes]:
    return [_decoded_one(one) for one in texts_and_bytes(found)]


def _decoded_one(value: Any) -> bytes:
    """Decodes base64; any other value stays as it is, in bytes."""
    raw: bytes = value.encode("ascii") if isinstance(value, str) else value
    try:
        return base64.b64decode(raw, validate=True)
    except binascii.Error:
        return raw


@register_input_codec
class Base64Codec(InputCodec):
    ContentType = "base64"
    TypeHint = list[bytes]

    @classmethod
    def can_encode(cls, payload: Any) -> bool:
        return isinstance(payload, list) and all(isinstance(one, bytes) for one in payload)

    @classmethod
    def encode_output(cls, name: str, payload: Any, use_bytes: bool = True, **kwargs: Any) -> ResponseOutput:
        return ResponseOutput(
            name=name,
            datatype="BYTES",
            shape=[len(payload), 1],
            data=TensorData([_encoded(one, use_bytes) for one in payload]),
            parameters=Parameters(content_type=cls.ContentType),
        )

    @classmethod
    def decode_output(cls, response_output: ResponseOutput) -> list[bytes]:
        return _decoded(response_output)

    @classmethod
    def encode_input(cls, name: str, payload: Any, use_bytes: bool = True, **kwargs: Any) -> RequestInput:
        return as_input(cls.encode_output(name, payload, use_bytes))

    @classmethod
    def decode_input(cls, request_input: RequestInput) -> list[bytes]:
        return _decoded(request_input)
