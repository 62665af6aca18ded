"""`body`: the handler gets each request's `data` or `body` instead of the row."""

from __future__ import annotations

from typing import Any

from ts.handler_utils.utils import row_value
from ts.torch_handler.request_envelope.base import Handle


class BodyEnvelope:
    """Answers pass unchanged."""

    def __init__(self, handle_fn: Handle) -> None:
        self._handle_fn = handle_fn

    def handle(self, data: Any, context: Any) -> Any:
        return self.format_output(self._handle_fn(self.parse_input(data), context))

    def parse_input(self, data: Any) -> list[Any]:
        return [row_value(row) for row in data or ()]

    def format_output(self, results: Any) -> Any:
        return results
