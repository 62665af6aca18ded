"""A handler whose requests and answers are checked."""

from ts.compat.aissemble_api.handlers import DataplaneHandler, ModelHandler

__all__ = ["DataplaneHandler", "ModelHandler"]
