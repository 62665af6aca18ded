"""The base class of users' predictors."""

from ts.compat.kserve_api.model import Model, PredictorProtocol

__all__ = ["Model", "PredictorProtocol"]
