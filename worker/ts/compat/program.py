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
    """`adapter_settings`: `program`, `module`, `argv`, `path` and `directory` as `ts.compat.start` tells them, `kind`
    (`ts.compat.KIND` has `serving(model, settings)`), and `latency_logging`."""
    adapted = settings["adapter_settings"]
    models = _models(adapted)
    name = str(settings["model_name"])
    if name not in models:
        raise HandlerNotUsable(f"{adapted['program']} serves {', '.join(models) or 'nothing'} here, but no {name!r}")
    loaded: Loaded = importlib.import_module(f"ts.compat.{adapted['kind']}").serving(models[name], settings)
    return loaded


def _models(adapted: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the program serves, by name."""
    os.chdir(adapted["directory"])
    sys.path[:] = list(dict.fromkeys((*adapted["path"], *sys.path)))
    if adapted.get("stand_in"):
        importlib.import_module("ts.compat.run").stand_in()
    add_shims()
    try:
        programs.run(adapted["program"], adapted["module"], adapted["argv"], in_worker=True)
    except Reached as reached:
        return reached.models
    raise HandlerNotUsable(f"{adapted['program']} ended without starting its server")
