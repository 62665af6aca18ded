"""For models in DeepSpeed's inference engine (`ts.handler_utils.distributed.deepspeed.get_ds_engine`)."""

from __future__ import annotations

import os
from abc import ABC

from ts.context import Context
from ts.torch_handler.base_handler import BaseHandler


class BaseDeepSpeedHandler(BaseHandler, ABC):
    """A subclass loads the model in its `initialize`, after this one. `device`: the number of this process's GPU."""

    def initialize(self, context: Context) -> None:
        self.device = int(os.environ.get("LOCAL_RANK", 0))
