"""The class that users derive their predictors from."""

from ts.compat.kserve_api.model import Model, PredictorProtocol

__all__ = ["Model", "PredictorProtocol"]
