"""`mlserver.codecs.errors`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import MLServerError


class CodecError(MLServerError):
    def __init__(self, msg: str) -> None:
        super().__init__(f"There was an error encoding / decoding the payload: {msg}")


class CodecNotFound(MLServerError):
    def __init__(
        self, name: str | None = None, payload_type: str | None = None, is_input: bool = False, is_request: bool = False
    ) -> None:
        what = ("input" if is_input else "output") + (" request" if is_request else " field")
        of_type = f" of type {payload_type}" if payload_type else ""
        super().__init__(f"Codec not found for {what}{f' {name!r}' if name else ''}{of_type}")


class InputsNotFound(MLServerError):
    def __init__(self, inputs: Sequence[Any], input_hints: dict[str, Any]) -> None:
        names = ", ".join(repr(one.name) for one in inputs)
        super().__init__(f"Unexpected input {names}; the model takes: {', '.join(map(repr, input_hints))}")


class OutputNotFound(MLServerError):
    def __init__(self, output_idx: int, output_type: type, output_hints: Sequence[Any]) -> None:
        hints = ", ".join(map(str, output_hints)) or "nothing"
        super().__init__(f"Output {output_idx} is of type {output_type}; the model's annotation says {hints}")
