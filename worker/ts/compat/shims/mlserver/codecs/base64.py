"""`mlserver.codecs.base64`: lists of bytes, as base64 on their way."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from .base import register_input_codec
from .utils import ListCodec


@register_input_codec
class Base64Codec(ListCodec):
    ContentType = "base64"
    TypeHint = list[bytes]
    ElementType = bytes

    @classmethod
    def encoded(cls, value: Any) -> str:
        return base64.b64encode(value.encode("ascii") if isinstance(value, str) else value).decode()

    @classmethod
    def decoded(cls, value: Any) -> bytes:
        """Decodes base64; any other value stays as it is, in bytes."""
        raw: bytes = value.encode("ascii") if isinstance(value, str) else value
        try:
            return base64.b64decode(raw, validate=True)
        except binascii.Error:
            return raw
