"""A model in DeepSpeed's inference engine, configured by model-config.yaml. Calls need the package `deepspeed`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ts.context import Context
from ts.handler_utils.utils import needed, section_of


def create_checkpoints_json(model_path: str | Path, checkpoints_json: str | Path) -> None:
    """Writes DeepSpeed's list of the weight files (.bin, .pt) below `model_path`."""
    files = [str(path) for path in sorted(Path(model_path).rglob("*")) if path.suffix in {".bin", ".pt"}]
    content = {"type": "ds_model", "checkpoints": files, "version": 1.0}
    Path(checkpoints_json).write_text(json.dumps(content))


def get_ds_engine(model: Any, ctx: Context) -> Any:
    """`deepspeed.init_inference` of `model` with `deepspeed: {config: FILE, checkpoint: FILE}` and
    `handler: {model_path: DIR}` of model-config.yaml; files are relative to the model's folder.

    Raises ValueError for a missing entry or file, PackageMissing.
    """
    section, handler = section_of(ctx, "deepspeed"), section_of(ctx, "handler", "model_path")
    folder = Path(ctx.system_properties["model_dir"])
    config = _config(folder, section, getattr(ctx, "model_name", ""))
    checkpoint = None
    if "checkpoint" in section:
        checkpoint = str(folder / section["checkpoint"])
        create_checkpoints_json(handler["model_path"], checkpoint)
    engine = needed("deepspeed", "deepspeed", "get_ds_engine")
    return engine.init_inference(model, config=config, base_dir=handler["model_path"], checkpoint=checkpoint)


def _config(folder: Path, section: dict[str, Any], model_name: str) -> str | None:
    if "config" not in section:
        return None
    path = folder / section["config"]
    if not path.exists():
        raise ValueError(f"model {model_name}: DeepSpeed's configuration {path} isn't there")
    return str(path)
