"""For models cut in stages by PiPPy: each process joins the group that torchrun started."""

from __future__ import annotations

import os
from abc import ABC

import torch

from ts.context import Context
from ts.handler_utils.distributed.pt_pippy import initialize_rpc_workers
from ts.torch_handler.base_handler import BaseHandler


class BasePippyHandler(BaseHandler, ABC):
    """A subclass loads the model in its `initialize`, after this one. `local_rank`, `world_size`: of this process."""

    local_rank: int
    world_size: int

    def initialize(self, context: Context) -> None:
        """Raises RuntimeError outside of torchrun, ValueError for entries missing in model-config.yaml."""
        try:
            self.local_rank, self.world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
        except KeyError as error:
            message = f"{error.args[0]} isn't set: a PiPPy model needs `parallelType: pp` in its model-config.yaml"
            raise RuntimeError(message) from error
        gpus = torch.cuda.device_count()
        self.device = self.local_rank % gpus if gpus else torch.device("cpu")
        initialize_rpc_workers(self.local_rank, self.world_size, context)
