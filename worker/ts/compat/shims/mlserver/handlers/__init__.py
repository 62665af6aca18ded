"""`mlserver.handlers`."""

from .custom import CustomHandler, custom_handler, get_custom_handlers

__all__ = ["CustomHandler", "custom_handler", "get_custom_handlers"]
