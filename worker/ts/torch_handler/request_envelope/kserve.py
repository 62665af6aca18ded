"""`kserve`: KServe's first protocol, `{"instances": […]}` in, `{"predictions": […]}` or `{"explanations": […]}` out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ts.handler_utils.utils import is_asked
from ts.torch_handler.request_envelope.base import BaseEnvelope, json_object, list_in


class KServeEnvelope(BaseEnvelope):
    """Instances are the handler's rows, so that `{"data": …}` reaches it like TorchServe's own requests."""

    def open(self, value: Any) -> tuple[list[Any], None]:
        return list_in(json_object(value), "instances"), None

    def close(self, results: Sequence[Any], note: None, context: Any, idx: int) -> dict[str, Any]:
        return {"explanations" if is_asked(context, "explain") else "predictions": results}
