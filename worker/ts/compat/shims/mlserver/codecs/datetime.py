"""`mlserver.codecs.datetime`: lists of points in time, in ISO 8601 on their way."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from ..types import Parameters, RequestInput, ResponseOutput, TensorData
from .base import InputCodec, register_input_codec
from .utils import InputOrOutput, as_input, texts_and_bytes


def _encoded(value: Any, use_bytes: bool) -> bytes | str:
    text: str = value if isinstance(value, str) else value.isoformat()
    return text.encode("ascii") if use_bytes else text


def _decoded(found: InputOrOutput) -> list[datetime]:
    values = texts_and_bytes(found)
    return [datetime.fromisoformat(one.decode("ascii") if isinstance(one, bytes) else one) for one in values]


@register_input_codec
class DatetimeCodec(InputCodec):
    ContentType = "datetime"
    TypeHint = list[str | datetime]

    @classmethod
    def can_encode(cls, payload: Any) -> bool:
        return isinstance(payload, list) and all(isinstance(one, datetime) for one in payload)

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
    def decode_output(cls, response_output: ResponseOutput) -> list[datetime]:
        return _decoded(response_output)

    @classmethod
    def encode_input(cls, name: str, payload: Any, use_bytes: bool = True, **kwargs: Any) -> RequestInput:
        return as_input(cls.encode_output(name, payload, use_bytes))

    @classmethod
    def decode_input(cls, request_input: RequestInput) -> list[datetime]:
        return _decoded(request_input)
