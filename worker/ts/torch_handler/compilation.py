"""`pt2` of model-config.yaml: the compilation of a model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from ts.utils.util import check_valid_pt2_backend

logger = logging.getLogger(__name__)


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name)
    return dict(value) if isinstance(value, Mapping) else {}


def compile_options(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Arguments for torch.compile from a model-config.yaml; None: don't compile.

    `pt2: {compile: {enable: true, backend: B, …}}`, or the older `pt2: B` and `pt2: {backend: B, …}`.
    """
    pt2 = config.get("pt2")
    if isinstance(pt2, str):
        return {"backend": pt2}
    if not isinstance(pt2, Mapping):
        return None
    if "compile" not in pt2:
        return {key: value for key, value in pt2.items() if key != "export"} or None
    options = _section(pt2, "compile")
    return options if options.pop("enable", True) and pt2["compile"] is not False else None


def wants_ahead_of_time(config: Mapping[str, Any]) -> bool:
    """`pt2: {export: {aot_compile: true}}`: the serialized file is a library of machine code."""
    return bool(_section(_section(config, "pt2"), "export").get("aot_compile", False))


def compiled(model: Any, options: dict[str, Any]) -> Any:
    """`model` through torch.compile, or unchanged (and a warning) when that can't be done."""
    if not check_valid_pt2_backend(options.get("backend", "inductor")):
        logger.warning("The model runs uncompiled")
        return model
    if isinstance(model, torch.jit.ScriptModule) or not isinstance(model, torch.nn.Module):
        logger.warning("A %s can't be compiled: the model runs as it is", type(model).__name__)
        return model
    try:
        return torch.compile(model, **options)
    except Exception as error:
        logger.warning("torch.compile(%s) failed, the model runs uncompiled: %s", options, error)
        return model
