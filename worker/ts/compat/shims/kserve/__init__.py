"""KServe's package of this name, as far as predictors need it, for where that isn't installed (docs/kserve.md)."""

from kserve import model_server
from ts.compat.kserve_api import log as logging
from ts.compat.kserve_api.log import logger
from ts.compat.kserve_api.messages import InferInput, InferOutput, InferRequest, InferResponse
from ts.compat.kserve_api.model import Model, ModelServer, PredictorProtocol

__all__ = [
    "InferInput",
    "InferOutput",
    "InferRequest",
    "InferResponse",
    "Model",
    "ModelServer",
    "PredictorProtocol",
    "logger",
    "logging",
    "model_server",
]
