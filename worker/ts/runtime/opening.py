"""Which kind of batch it is: of TorchServe's requests alone, or with some in a tensor protocol's form."""

from __future__ import annotations

from ts.context import Context
from ts.runtime.handlers import Loaded
from ts.runtime.jobs import Batch
from ts.runtime.requests import is_tensor_request
from ts.runtime.running import Running
from ts.runtime.worker import Link


def opened(batch: Batch, context: Context, link: Link, loaded: Loaded) -> Running:
    """The batch with what reads and writes its requests' forms."""
    if loaded.takes == "rows" and not any(is_tensor_request(job.item) for job in batch.jobs):
        return Running(batch, context, link)
    from ts.runtime.tensor_running import TensorRunning  # brings numpy, which not every worker needs

    return TensorRunning(batch, context, link, loaded)
