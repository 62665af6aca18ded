"""`mlserver.codecs.string`: lists of texts."""

from __future__ import annotations

from typing import Any

from .base import register_input_codec, register_request_codec
from .utils import ListCodec, SingleInputRequestCodec


def encode_str(elem: str) -> bytes:
    return elem.encode()


def decode_str(encoded: Any, str_codec: str = "utf-8") -> Any:
    return encoded.decode(str_codec) if isinstance(encoded, bytes) else encoded


@register_input_codec
class StringCodec(ListCodec):
    ContentType = "str"
    TypeHint = list[str]
    ElementType = str

    @classmethod
    def decoded(cls, value: Any) -> Any:
        return decode_str(value)


@register_request_codec
class StringRequestCodec(SingleInputRequestCodec):
    InputCodec = StringCodec
    ContentType = "str"
    TypeHint = list[str]
