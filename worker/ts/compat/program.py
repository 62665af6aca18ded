"""Runs a program that was written for another server up to the start of its server: for the adapter of its models,
for `python -m ts.compat.run`, and to list its models."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ts.compat import SHIMS, add_shims
from ts.compat.start import CO_SERVED, MARK, STAND_IN, Reached
from ts.runtime.handlers import HandlerNotUsable, Loaded, Settings


def run_program(
    file: str,
    module: str,
    argv: Sequence[str],
    *,
    in_worker: bool = False,
    stand_in: bool = False,
    co_served: Sequence[str] = (),
) -> None:
    """Runs the program in `file`; `module` is its name if it was started by name. Its exceptions pass through."""
    main = _made(file, module)
    setattr(main, MARK, in_worker)
    setattr(main, STAND_IN, stand_in)
    setattr(main, CO_SERVED, co_served)
    sys.argv = [file, *argv]
    sys.modules["__main__"] = main
    loader = main.__loader__
    assert isinstance(loader, importlib.machinery.SourceFileLoader)
    loader.exec_module(main)


def _made(file: str, module: str) -> ModuleType:
    """The module `__main__` of the program, not yet run. Relative imports work if it was started by name."""
    loader = importlib.machinery.SourceFileLoader("__main__", file)
    spec = importlib.util.spec_from_file_location("__main__", file, loader=loader)
    assert spec is not None
    main = importlib.util.module_from_spec(spec)
    parts = module.rpartition(".")
    main.__package__ = parts[0] if module else ""
    if not module and os.path.dirname(file) not in sys.path:
        sys.path.insert(0, os.path.dirname(file))
    return main


#: The packages of servers: this server's stand-ins replace installed ones.
SERVERS = ("kserve", "aissemble_open_inference_protocol_kserve")


def stand_in() -> None:
    """Makes the shims importable, those of servers before installed packages."""
    sys.path.insert(0, SHIMS)
    for name in SERVERS:
        importlib.import_module(name)
    sys.path.remove(SHIMS)
    add_shims()


def load(settings: Settings) -> Loaded:
    """`adapter_settings`: `program`, `module`, `argv`, `path` and `directory` as given by `ts.compat.start`, and
    `latency_logging`. The program determines the adapter of its models (`ts.compat.KIND` with `serving(model,
    settings)`)."""
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
    """Runs the program and returns the models it would serve. Raises HandlerNotUsable if it starts no server."""
    os.chdir(adapted["directory"])
    sys.path[:] = list(dict.fromkeys((*adapted["path"], *sys.path)))
    if adapted.get("stand_in"):
        stand_in()
    add_shims()
    try:
        run_program(adapted["program"], adapted["module"], adapted["argv"], in_worker=True)
    except Reached as reached:
        return reached
    raise HandlerNotUsable(f"{adapted['program']} ended without starting its server")


def list_models(words: Sequence[str]) -> None:
    """Writes to a file, as JSON, the names of the models that a program would serve, and whether it has imported
    torch. `words`: the file, the program, and its arguments. Ends the process, with status 1 if the program ended
    without starting a server."""
    result, program, *argv = words
    stand_in()
    try:
        run_program(program, "", argv, in_worker=True)
    except Reached as reached:
        Path(result).write_text(json.dumps({"models": list(reached.models), "torch": "torch" in sys.modules}))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)  # as at its server's start: nothing of the program runs any more, not its threads either
    sys.exit("it ended without starting its server")
