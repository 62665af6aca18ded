"""Serves what a program made for another server: the program is run up to the start of its server."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

from ts.compat import add_shims, programs
from ts.compat.start import Reached
from ts.runtime.handlers import HandlerNotUsable, Loaded, Settings


def load(settings: Settings) -> Loaded:
    """`adapter_settings`: `program`, `module`, `argv`, `path` and `directory` as `ts.compat.start` tells them, and
    `latency_logging`. How its models are called (`ts.compat.KIND` has `serving(model, settings)`) the program says."""
    adapted = settings["adapter_settings"]
    reached = _reached(adapted)
    model = _chosen(reached.models, str(settings["model_name"]), adapted["program"])
    loaded: Loaded = importlib.import_module(f"ts.compat.{reached.kind}").serving(model, settings)
    return loaded


def _chosen(models: Mapping[str, Any], name: str, program: str) -> Any:
    """The program's model of this name; its only one under any name."""
    if name in models:
        return models[name]
    if len(models) != 1:
        raise HandlerNotUsable(f"{program} serves {', '.join(models) or 'nothing'} here, but no {name!r}")
    return next(iter(models.values()))


def _reached(adapted: Mapping[str, Any]) -> Reached:
    """What the program serves."""
    os.chdir(adapted["directory"])
    sys.path[:] = list(dict.fromkeys((*adapted["path"], *sys.path)))
    if adapted.get("stand_in"):
        importlib.import_module("ts.compat.run").stand_in()
    add_shims()
    try:
        programs.run(adapted["program"], adapted["module"], adapted["argv"], in_worker=True)
    except Reached as reached:
        return reached
    raise HandlerNotUsable(f"{adapted['program']} ended without starting its server")
