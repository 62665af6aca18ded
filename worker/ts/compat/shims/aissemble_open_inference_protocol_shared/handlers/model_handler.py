"""The class that users derive their handlers from."""

from ts.compat.aissemble_api.handlers import DefaultModelHandler, ModelHandler

__all__ = ["DefaultModelHandler", "ModelHandler"]
