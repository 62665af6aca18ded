"""The place of TorchServe's handler with DALI preprocessing, which is not supported."""

from __future__ import annotations

from abc import ABC

from ts.context import Context
from ts.handler_utils.preprocess.dali import get_dali_pipeline
from ts.torch_handler.base_handler import BaseHandler


class DALIHandler(BaseHandler, ABC):
    """Doesn't load: the error names the alternatives."""

    def initialize(self, context: Context) -> None:
        """Raises ts.handler_utils.preprocess.dali.DaliNotSupported."""
        get_dali_pipeline(context)
