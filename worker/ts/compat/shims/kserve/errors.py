"""Exceptions of predictors, each with a status."""

from ts.compat.kserve_api.model import InferenceError, InvalidInput, ModelNotFound, ModelNotReady, UnsupportedProtocol

__all__ = ["InferenceError", "InvalidInput", "ModelNotFound", "ModelNotReady", "UnsupportedProtocol"]
