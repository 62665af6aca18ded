"""`mlserver.handlers.custom`: methods that a runtime wants served under a path of their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

_F = TypeVar("_F", bound="Callable[..., Any]")
_ATTRIBUTE = "__custom_handler__"


@dataclass
class CustomHandler:
    rest_path: str
    rest_method: str = "POST"


def custom_handler(rest_path: str, rest_method: str = "POST") -> Callable[[_F], _F]:
    def marked(method: _F) -> _F:
        setattr(method, _ATTRIBUTE, CustomHandler(rest_path, rest_method))
        return method

    return marked


def get_custom_handlers(model: Any) -> list[tuple[CustomHandler, Callable[..., Any]]]:
    methods = [member for _, member in inspect.getmembers(model, callable)]
    return [(getattr(one, _ATTRIBUTE), one) for one in methods if hasattr(one, _ATTRIBUTE)]
