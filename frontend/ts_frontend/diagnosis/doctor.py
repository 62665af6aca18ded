"""The report of `torchserve doctor`: the machine and the packages that a server with given settings would use."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import json
import logging
import platform
import resource
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from ts_frontend.config.checks import who_may
from ts_frontend.config.table import ServerConfig
from ts_frontend.diagnosis import machine
from ts_frontend.diagnosis.report import Report, Section
from ts_frontend.errors import ServeError
from ts_frontend.listeners.descriptors import open_files_max
from ts_frontend.models.formats.formats import known_formats
from ts_frontend.models.store.store import NAMES_SHOWN_MAX, ModelStore
from ts_frontend.process import PidFileError, pid_path, prepare, running_server
from ts_frontend.server import missing_torch
from ts_frontend.workers.devices import Inventory
from ts_frontend.workers.launchers import run_tool
from ts_frontend.workers.limits import available_bytes
from ts_frontend.workers.spawning import worker_env
from ts_frontend.workers.supervisor import find_accelerators

#: The longest time for importing torch and starting its CUDA.
TORCH_S_MAX = 120.0
#: Packages that a server with workers in a cluster needs besides its own.
RAY = ("ray", "cryptography")
_TORCH = """
import json, os, sys, torch
bytecode = [m.__spec__.cached for m in [*sys.modules.values()] if getattr(getattr(m, "__spec__", None), "cached", None)]
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads(),
    "devices": torch.cuda.device_count() if torch.cuda.is_available() else 0, "folder": os.path.dirname(torch.__file__),
    "modules": len(bytecode), "compiled_at_each_start": sum(not os.path.exists(file) for file in bytecode),
}))
"""


def examine(config: ServerConfig | None, problem: str = "") -> Report:
    """The report. `config` None: the settings can't be used, for `problem`'s reasons; defaults are checked."""
    report = Report("area")
    _settings(report.section("Settings"), config, problem)
    config = config or ServerConfig()
    machine.python_packages(report.section("Python"))
    if config.ray_address:
        ray(report.sections[-1], config.ray_address, [name for name in RAY if importlib.util.find_spec(name) is None])
    asyncio.run(_devices(report.section("Torch and devices"), config))
    running = _running(report.section("Server"), config)
    machine.ports(report.sections[-1], machine.listeners(config), running)
    places = report.section("Directories")
    machine.directory(places, "temp_dir", config.temp_dir, runs_code=True)
    machine.directory(places, "log_location", config.log_location)
    _store(report.section("Models"), config)
    _limits(report.section("Limits"))
    return report


def _settings(section: Section, config: ServerConfig | None, problem: str) -> None:
    for line in problem.splitlines():
        section.error("settings", line)
    if config is None:
        section.warn("settings", "none of the settings can be used until then: the rest is checked with the defaults")
        return
    for note in config.notes:
        if note.level >= logging.WARNING:
            section.warn("settings", note.text)
    try:
        prepare(_without_traces(config))
    except ServeError as error:
        section.error("settings", error.message)
    changed = len(config.sources)
    if not section.findings:
        section.ok("settings", f"{changed} are set; `torchserve config --changed` shows them")
    for sentence in who_may(config):
        section.ok("access", sentence)


def _without_traces(config: ServerConfig) -> ServerConfig:
    """The settings for the checks of the files that they name: no directory is made, and none is needed yet."""
    apart = config.work_dir is not None
    return replace(
        config,
        model_store=config.model_store or Path.cwd(),
        work_dir=None,
        temp_dir=Path(tempfile.gettempdir()) if apart else config.temp_dir,
    )


async def _devices(section: Section, config: ServerConfig) -> None:
    inventory = await find_accelerators(config.number_of_gpu, sys.platform, platform.machine())
    lines: list[str] = []
    if not config.preload_torch:
        section.ok("torch", "not checked: preload_torch is false, as for models that don't need it")
        return
    if missing := missing_torch(config):
        section.error("torch", missing[0])
        return
    argv = [sys.executable, "-c", _TORCH]
    status = await run_tool(argv, Path("/"), TORCH_S_MAX, lines.append, env=worker_env(config))
    found = _json(lines[-1]) if status == 0 and lines else None
    if found is None:
        took = f"it takes longer than {TORCH_S_MAX:g} s" if status is None else f"exit status {status}"
        section.error("torch", f"torch can't be imported by a worker's Python: {took}", lines)
        return
    torch(section, found, inventory)


def _json(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def torch(section: Section, found: dict[str, Any], inventory: Inventory) -> None:
    """`found`: `version`, `cuda` (of the build, None without), `devices`, `threads`, torch's `folder`, the number of
    `modules` that it imports, and of those without bytecode; `inventory`: the devices that the server places workers
    on."""
    section.facts |= found
    built = f"built for CUDA {found['cuda']}" if found["cuda"] else "built without CUDA"
    section.ok("torch", f"{found['version']}, {built}, {found['threads']} threads")
    if (compiled := found["compiled_at_each_start"]) > found["modules"] / 2:
        section.warn(
            "torch",
            f"{compiled} of the {found['modules']} modules that it imports have no bytecode: each start compiles them "
            f"again, for seconds. `{sys.executable} -m compileall -q {found['folder']}` writes it once",
        )
    if inventory.kind == "cuda" and found["devices"] < inventory.count:
        why = "this build of torch has no CUDA" if not found["cuda"] else "CUDA doesn't start: check the driver"
        section.error(
            "devices",
            f"nvidia-smi lists {inventory.count} GPUs, and torch sees {found['devices']}: {why}. number_of_gpu=0 "
            "serves on the CPU",
        )
    elif inventory.count:
        section.ok("devices", f"{inventory.count} of kind {inventory.kind}")
    elif found["devices"]:
        section.warn("devices", f"torch sees {found['devices']} GPUs, and the server has none: nvidia-smi is missing")
    else:
        section.ok("devices", "no GPU: workers run on the CPU")


def ray(section: Section, address: str, missing: list[str]) -> None:
    """Whether workers can be placed by the cluster at `address`. `missing`: its packages that aren't installed."""
    if missing:
        section.error(
            "ray",
            f"--ray-address {address} needs {' and '.join(missing)}, which this Python lacks: "
            "pip install torchrelay[ray]",
        )
    else:
        section.ok("ray", f"Ray {importlib.metadata.version('ray')} is installed; the cluster is at {address}")


def _running(section: Section, config: ServerConfig) -> int | None:
    """The process id of the server that runs with these settings' pid file."""
    try:
        path = pid_path(config.work_dir)
        server = running_server(path)
    except PidFileError as error:
        section.error("pid file", error.message)
        return None
    machine.pid_file(section, path, None if server is None else server.pid)
    return None if server is None else server.pid


def _store(section: Section, config: ServerConfig) -> None:
    if config.model_store is None:
        section.warn(
            "model store", "none is set: --model-store names one, and a start needs it (or --model-repository)"
        )
        return
    _guarded(section, "model store", lambda: _names(section, config))


def _names(section: Section, config: ServerConfig) -> None:
    assert config.model_store is not None
    formats = known_formats(config, env=worker_env(config), work_dir=config.temp_dir, gpus=0)
    names = ModelStore(config.model_store, formats=formats).names()
    shown = ", ".join(names[:NAMES_SHOWN_MAX]) + (", …" if len(names) > NAMES_SHOWN_MAX else "")
    section.facts["models"] = len(names)
    if names:
        section.ok(
            "model store", f"{config.model_store} has {shown}. `torchserve check {config.model_store}` tries them"
        )
    else:
        section.warn("model store", f"{config.model_store} has no archives and no folders of models")


def _guarded(section: Section, about: str, look: Callable[[], None]) -> None:
    try:
        look()
    except (OSError, ServeError) as error:
        section.error(about, str(error))


def _limits(section: Section) -> None:
    machine.limits(
        section,
        open_files_max(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        available_bytes(),
        int(psutil.virtual_memory().total),
    )
