"""What handlers import to stream and to find classes, under TorchServe's names."""

from __future__ import annotations

import importlib
import inspect
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


def import_class(module_name: str, class_name: str | None = None, module_prefix: str | None = None) -> type:
    """The class `class_name` of a module; without a name its only class. ImportError, AttributeError, ValueError."""
    name = f"{module_prefix}.{module_name}" if module_prefix else module_name
    module = importlib.import_module(name)
    if class_name is not None:
        found = getattr(module, class_name)
        if not isinstance(found, type):
            raise ValueError(f"{class_name} of {name} is no class")
        return found
    classes = [one for _, one in inspect.getmembers(module, inspect.isclass) if one.__module__ == module.__name__]
    if len(classes) != 1:
        names = ", ".join(one.__name__ for one in classes) or "none"
        raise ValueError(f"expected one class in {name}, found {len(classes)}: {names}")
    return classes[0]
