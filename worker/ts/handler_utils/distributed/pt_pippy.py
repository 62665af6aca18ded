"""A model cut into stages by PiPPy, one for each process of torchrun. Calls need the package `pippy`."""

from __future__ import annotations

import inspect
import os
from typing import Any

import torch

from ts.context import Context
from ts.handler_utils.utils import needed, section_of

_PACKAGE = "torchpippy"


def initialize_rpc_workers(local_rank: int, world_size: int, ctx: Context) -> None:
    """Joins the RPC group of torchrun's processes, configured by `pippy: {rpc_timeout, num_worker_threads}`; blocks
    until all have joined. Each process gets the GPU of its rank, if there are GPUs."""
    section = section_of(ctx, "pippy", "rpc_timeout", "num_worker_threads")
    rpc = torch.distributed.rpc
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=section["num_worker_threads"], rpc_timeout=section["rpc_timeout"]
    )
    gpus = torch.cuda.device_count()
    for rank in range(world_size if gpus else 0):
        options.set_device_map(f"worker{rank}", {local_rank % gpus: rank % gpus})
    rpc.init_rpc(f"worker{local_rank}", rank=local_rank, world_size=world_size, rpc_backend_options=options)


def get_pipeline_driver(model: Any, world_size: int, ctx: Context) -> Any:
    """The driver that runs `model` in `world_size` stages, as `pippy: {input_names, model_type, chunks}` and `handler:
    {model_path, index_filename}` configure it. With `model_type: HF` it is the model itself with a replaced `forward`.

    Raises ValueError, PackageMissing.
    """
    section = section_of(ctx, "pippy", "input_names", "model_type")
    handler = section_of(ctx, "handler", "model_path")
    pippy = needed("pippy", _PACKAGE, "get_pipeline_driver")
    from_hf = section["model_type"] == "HF"
    adapter = needed("pippy.hf", _PACKAGE, "get_pipeline_driver") if from_hf else None
    driver, _ = pippy.all_compile(
        model.eval(),
        num_ranks=world_size,
        num_chunks=section.get("chunks", 1),
        schedule="FillDrain",
        split_policy=pippy.split_into_equal_size(world_size),
        tracer=adapter.PiPPyHFTracer() if adapter is not None else None,
        concrete_args=_fixed_arguments(model, section["input_names"], from_hf),
        index_filename=_index_file(handler),
        checkpoint_prefix=None,
    )
    if adapter is None:
        return driver
    adapter.inject_pipeline_forward(model, driver)
    return model


def _fixed_arguments(model: Any, input_names: list[str], from_hf: bool) -> dict[str, Any]:
    parameters = inspect.signature(model.forward).parameters.values()
    fixed = {one.name: one.default for one in parameters if one.name not in input_names}
    if from_hf and "bloom" in str(type(model)).lower():
        fixed.setdefault("deprecated_arguments", {})
    return fixed


def _index_file(handler: dict[str, Any]) -> str | None:
    name = handler.get("index_filename")
    if name is None:
        return None
    path = os.path.join(str(handler["model_path"]), str(name))
    if not os.path.exists(path):
        raise ValueError(f"index file {path} isn't there")
    return path
