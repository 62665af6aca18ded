"""Functions that handlers import to stream and to find classes, under TorchServe's names."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ts.context import Context


def send_intermediate_predict_response(
    ret: Sequence[Any], req_id_map: dict[int, str], message: str, code: int, context: Context | None = None
) -> None:
    """Sends one piece of each request's answer now; the handler's return value is the last piece.

    `ret[idx]` is the piece for request `idx` (bytes, str, tensor or JSON value) for every `idx` of `req_id_map`
    (usually `context.request_ids`). A `code` other than 200 ends these answers with `message`. Waits while a
    reader is too slow. Raises `ts.context.RequestCancelled` when nobody waits for the batch any more.
    """
    if context is None:
        raise TypeError("send_intermediate_predict_response needs the handler's context as its last argument")
    context._running().send(ret, list(req_id_map), message, code)


def import_class(class_name: str, module_prefix: str | None = None) -> type:
    """The class of a dotted name such as "transformers.LlamaForCausalLM"; `module_prefix` goes before it.

    Raises ImportError when the name has no module, or the module no such name.
    """
    module_name, _, name = f"{module_prefix or ''}.{class_name}".strip(".").rpartition(".")
    if not class_name or not module_name:
        raise ImportError(f"a class is named with its module, as in module.Class, not {class_name!r}")
    try:
        found: type = getattr(importlib.import_module(module_name), name)
    except AttributeError as error:
        raise ImportError(f"there is no {name} in {module_name}") from error
    return found
