"""Continues a text, one character at a time, each sent as soon as it is there.

A request is the text to continue, or a JSON object:
`{"prompt": "Tyger", "max_tokens": 120, "temperature": 0.0, "seed": null}`. Temperature 0 takes the likeliest
character each time; above 0 characters are drawn, and the same seed draws the same ones.
"""

from __future__ import annotations

from typing import Any

from continuation import Continuation, parse

from ts.context import Context
from ts.protocol.otf_message_handler import send_intermediate_predict_response
from ts.torch_handler.base_handler import BaseHandler


class TextStream(BaseHandler):
    """Every call of `send_intermediate_predict_response` carries one character per request of the batch."""

    def handle(self, data: list[dict[str, Any]], context: Context) -> list[Any]:
        texts = [Continuation(self.model, self.device, parse(row)) for row in data]
        pieces = [text.next() for text in texts]
        while any(text.left for text in texts) and not getattr(context, "cancelled", False):
            send_intermediate_predict_response(
                pieces, context.request_ids, "Intermediate Prediction success", 200, context
            )
            pieces = [text.next() for text in texts]
        return [text.last(row, piece) for text, row, piece in zip(texts, data, pieces, strict=True)]
