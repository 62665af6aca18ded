"""Choice of a model's device."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch


def _wants_xpu() -> bool:
    asked = os.environ.get("TS_IPEX_GPU_ENABLE", "false").lower() == "true"
    return asked and bool(torch.xpu.is_available())


def choose_device(gpu_id: int | str | None) -> torch.device:
    """The device of a worker that was given `gpu_id` (None: no accelerator): CUDA, XPU, MPS, XLA, else the CPU."""
    if gpu_id is not None:
        if torch.cuda.is_available():
            return torch.device(f"cuda:{gpu_id}")
        if _wants_xpu():
            return torch.device(f"xpu:{gpu_id}")
        if torch.backends.mps.is_available():
            return torch.device("mps")
    if find_spec("torch_xla") is not None:
        from torch_xla.core import xla_model  # type: ignore[import-not-found, unused-ignore]

        return xla_model.xla_device()
    return torch.device("cpu")
