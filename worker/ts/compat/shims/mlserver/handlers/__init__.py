"""`mlserver.handlers`."""

from __future__ import annotations

from .custom import CustomHandler, custom_handler, get_custom_handlers

__all__ = ["CustomHandler", "custom_handler", "get_custom_handlers"]
