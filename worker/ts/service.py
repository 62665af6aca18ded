"""TorchServe's old place of `PredictionException`."""

from ts.utils.util import PredictionException

__all__ = ["PredictionException"]
