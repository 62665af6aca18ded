"""`mlserver.codecs.datetime`: lists of points in time, in ISO 8601 on their way."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from .base import register_input_codec
from .utils import ListCodec


@register_input_codec
class DatetimeCodec(ListCodec):
    ContentType = "datetime"
    TypeHint = list[str | datetime]
    ElementType = datetime

    @classmethod
    def encoded(cls, value: Any) -> str:
        return value if isinstance(value, str) else str(value.isoformat())

    @classmethod
    def decoded(cls, value: Any) -> datetime:
        return datetime.fromisoformat(value.decode("ascii") if isinstance(value, bytes) else value)
