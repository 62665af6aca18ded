"""TorchServe's old place of the streaming call, and the call that made its wire format."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from ts.handler_utils.utils import create_predict_response
from ts.handler_utils.utils import send_intermediate_predict_response as send

__all__ = ["create_predict_response", "send_intermediate_predict_response"]


def send_intermediate_predict_response(
    ret: Sequence[Any], req_id_map: dict[int, str], message: str, code: int, context: Any = None
) -> None:
    """The same as `ts.handler_utils.utils.send_intermediate_predict_response`."""
    warnings.warn(
        "import send_intermediate_predict_response from ts.handler_utils.utils", PendingDeprecationWarning, stacklevel=2
    )
    send(ret, req_id_map, message, code, context)
