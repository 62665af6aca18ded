"""What a predictor raises for a status of its own."""

from ts.compat.kserve_api.model import InferenceError, InvalidInput, ModelNotFound, ModelNotReady, UnsupportedProtocol

__all__ = ["InferenceError", "InvalidInput", "ModelNotFound", "ModelNotReady", "UnsupportedProtocol"]
