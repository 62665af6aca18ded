"""TorchServe's old place of the streaming call, and the call that made its wire format."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ts.context import Context

__all__ = ["create_predict_response", "send_intermediate_predict_response"]


def send_intermediate_predict_response(
    ret: Sequence[Any], req_id_map: dict[int, str], message: str, code: int, context: Context | None = None
) -> None:
    """Use `ts.handler_utils.utils.send_intermediate_predict_response`: the same."""
    warnings.warn(
        "import send_intermediate_predict_response from ts.handler_utils.utils",
        PendingDeprecationWarning,
        stacklevel=2,
    )
    from ts.handler_utils.utils import send_intermediate_predict_response as send

    send(ret, req_id_map, message, code, context)


def create_predict_response(
    ret: Sequence[Any],
    req_id_map: dict[int, str],
    message: str,
    code: int,
    context: Context | None = None,
    ts_stream_next: bool = False,
) -> bytes:
    """Pieces of answers as bytes for `context.cl_socket.sendall`; the handler's return value still comes last.

    The bytes are this server's frames with positions in the batch as keys: nothing else can read them.
    """
    from ts.protocol.frames import Chunk, Failed, encode_bytes
    from ts.runtime.jobs import Failure
    from ts.runtime.running import failure_with, outcome

    pieces = []
    for idx in req_id_map:
        value = outcome(ret[idx]) if code == 200 else failure_with(code, message)
        if isinstance(value, Failure):
            reply: Failed | Chunk = Failed(idx, value.code, value.message)
        else:
            reply = Chunk(idx, value, last=not ts_stream_next)
        pieces.append(encode_bytes(reply))
    return b"".join(pieces)
