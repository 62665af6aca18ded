"""Tensors in, tensors out."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from ts.handler_utils.timer import timed
from ts.handler_utils.utils import row_value
from ts.torch_handler.base_handler import BaseHandler
from ts.utils.util import PredictionException, list_classes_from_module

__all__ = ["DenseNetHandler", "list_classes_from_module"]


class DenseNetHandler(BaseHandler):
    """Rows are tensors as `torch.save` writes them, of one example or of a batch of one; so are the answers."""

    @timed
    def preprocess(self, data: Any) -> Any:
        """One tensor [batch, …] on `device`. Raises PredictionException 400."""
        tensors = [self._tensor(row_value(row)) for row in data]
        return torch.cat([one if one.dim() == 4 else one.unsqueeze(0) for one in tensors])

    def _tensor(self, value: Any) -> Any:
        try:
            return torch.load(io.BytesIO(value), map_location=self.device, weights_only=True)
        except (TypeError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise PredictionException(f"the input is not a saved tensor: {error}", 400) from error

    @timed
    def postprocess(self, data: Any) -> Any:
        """One tensor per request, with a batch dimension of 1."""
        return list(data.split(1))
