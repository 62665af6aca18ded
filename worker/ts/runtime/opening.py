"""Which kind of batch it is: of TorchServe's requests alone, or with some in a tensor protocol's form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ts.context import Context
from ts.runtime.handlers import Loaded
from ts.runtime.jobs import Batch
from ts.runtime.requests import is_tensor_request
from ts.runtime.running import Running
from ts.runtime.worker import Link


class Opening:
    """Gives batches what reads and writes their requests' forms."""

    def __init__(self, link: Link, loaded: Loaded) -> None:
        self._link, self._loaded = link, loaded
        self._takes_rows = loaded.takes == "rows"
        self._with_tensors: Callable[[Batch, Context], Running] | None = None

    def opened(self, batch: Batch, context: Context) -> Running:
        if self._takes_rows:
            for job in batch.jobs:
                if is_tensor_request(job.item):
                    break
            else:
                return Running(batch, context, self._link)
        if self._with_tensors is None:
            self._with_tensors = self._with(self._loaded.tensors or {})
        return self._with_tensors(batch, context)

    def _with(self, tensors: dict[str, Any]) -> Callable[[Batch, Context], Running]:
        from ts.runtime.tensor_running import TensorRunning  # brings numpy, which not every worker needs
        from ts.tensors.forms import Model

        model = Model(**{"name": "", "version": "", "inputs": {}, "outputs": {}, **tensors})
        return lambda batch, context: TensorRunning(batch, context, self._link, model, self._takes_rows)
