"""`mlserver.codecs.string`: lists of texts."""

from __future__ import annotations

from typing import Any

from ..types import Parameters, RequestInput, ResponseOutput, TensorData
from .base import InputCodec, register_input_codec, register_request_codec
from .utils import InputOrOutput, SingleInputRequestCodec, as_input, texts_and_bytes


def encode_str(elem: str) -> bytes:
    return elem.encode()


def decode_str(encoded: Any, str_codec: str = "utf-8") -> Any:
    return encoded.decode(str_codec) if isinstance(encoded, bytes) else encoded


def decoded(found: InputOrOutput) -> list[str]:
    return [decode_str(one) for one in texts_and_bytes(found)]


@register_input_codec
class StringCodec(InputCodec):
    ContentType = "str"
    TypeHint = list[str]

    @classmethod
    def can_encode(cls, payload: Any) -> bool:
        return isinstance(payload, list) and all(isinstance(one, str) for one in payload)

    @classmethod
    def encode_output(cls, name: str, payload: Any, use_bytes: bool = True, **kwargs: Any) -> ResponseOutput:
        return ResponseOutput(
            name=name,
            datatype="BYTES",
            shape=[len(payload), 1],
            data=TensorData([encode_str(one) for one in payload] if use_bytes else list(payload)),
            parameters=Parameters(content_type=cls.ContentType),
        )

    @classmethod
    def decode_output(cls, response_output: ResponseOutput) -> list[str]:
        return decoded(response_output)

    @classmethod
    def encode_input(cls, name: str, payload: Any, use_bytes: bool = True, **kwargs: Any) -> RequestInput:
        return as_input(cls.encode_output(name, payload, use_bytes))

    @classmethod
    def decode_input(cls, request_input: RequestInput) -> list[str]:
        return decoded(request_input)


@register_request_codec
class StringRequestCodec(SingleInputRequestCodec):
    InputCodec = StringCodec
    ContentType = "str"
    TypeHint = list[str]
