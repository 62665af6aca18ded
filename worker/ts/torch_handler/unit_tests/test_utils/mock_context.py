"""TorchServe's stand-in for a context, for tests of handlers. `ts.testing` runs a handler as a server does."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import torch

from ts.metrics.metrics_store import MetricsStore
from ts.utils.util import get_yaml_config


class MockContext:
    """A context with a manifest, the model's directory and metrics, and without a request.

    `model_pt_file`, `model_file`: the names of the weights and of the network's file in `model_dir`, None for a model
    without. `gpu_id` counts on a machine with a GPU. `model_yaml_config_file`: a file in `model_dir`.
    """

    def __init__(
        self,
        model_pt_file: str | None = "model.pt",
        model_dir: str | Path = "ts/torch_handler/unit_tests/models/tmp",
        model_file: str | None = "model.py",
        gpu_id: str | int | None = "0",
        model_name: str = "mnist",
        model_yaml_config_file: str | None = None,
    ) -> None:
        files = {"serializedFile": model_pt_file, "modelFile": model_file}
        self.manifest: dict[str, Any] = {"model": {key: name for key, name in files.items() if name}}
        self.system_properties: dict[str, Any] = {"model_dir": model_dir}
        if gpu_id and torch.cuda.is_available():
            self.system_properties["gpu_id"] = gpu_id
        self.explain = False
        self.metrics = MetricsStore({0: str(uuid.uuid4())}, model_name)
        self.model_yaml_config: dict[str, Any] = {}
        if model_yaml_config_file:
            self.model_yaml_config = get_yaml_config(os.path.join(model_dir, model_yaml_config_file))

    def get_request_header(self, idx: int, exp: str) -> bool:
        """Whether explanations are asked for, as `explain` says; never for the first request, as in TorchServe."""
        return bool(idx and exp and self.explain)
