"""The report of `torchserve doctor`: the machine and the packages that a server with given settings would use: Python,
directories, ports, limits, devices. Each check adds its findings to a section; values of the system are arguments of
the checks, so that a test can give others."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import resource
import shlex
import shutil
import stat
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil

import ts.version
from ts_frontend.config.checks import who_may
from ts_frontend.config.kinds import unix_path
from ts_frontend.config.table import ServerConfig
from ts_frontend.diagnosis.report import Report, Section, size
from ts_frontend.errors import ServeError
from ts_frontend.listeners.descriptors import open_files_max
from ts_frontend.listeners.sockets import Listener, ListenFailed, listen
from ts_frontend.models.formats.formats import known_formats
from ts_frontend.models.store.store import NAMES_SHOWN_MAX, ModelStore
from ts_frontend.process import PidFileError, pid_path, prepare, running_server
from ts_frontend.server import missing_torch
from ts_frontend.workers.launchers import run_tool
from ts_frontend.workers.resources import Inventory, available_bytes
from ts_frontend.workers.spawning import worker_env
from ts_frontend.workers.supervisor import find_accelerators

#: This server's distribution, its commands, and the packages that other distributions bring too.
OWN = "torchrelay"
COMMANDS = ("torchserve", "torch-model-archiver", "torch-workflow-archiver")
PACKAGES = ("ts", "model_archiver", "workflow_archiver")
#: The limits below which a warning is given: open files (each client and worker takes some), free memory, free disk.
OPEN_FILES_MIN = 4096
FREE_MEMORY_BYTES_MIN = 1 << 30
FREE_DISK_BYTES_MIN = 2 << 30
#: Options of a Python that was built with optimisation.
_BUILT_WITH = {"--enable-optimizations": "PGO", "--with-lto": "LTO"}


# --- Python and its packages


def python(section: Section, built_with: str, *, without_gil: bool) -> None:
    """`built_with`: the options of the interpreter's build."""
    where = f"{platform.python_implementation()} {platform.python_version()} in {sys.executable}"
    lacking = [name for option, name in _BUILT_WITH.items() if option not in built_with]
    if lacking:
        section.warn(
            "python", f"{where} was built without {' and '.join(lacking)}: the server takes more time per request"
        )
    else:
        section.ok("python", f"{where}, built with PGO and LTO")
    if without_gil:
        section.warn("python", "this is a build without the GIL, on which the server is not tested")


def form(section: Section, *, compiled: bool) -> None:
    section.facts["compiled"] = compiled
    section.ok(
        "form",
        "compiled: a request takes less time"
        if compiled
        else "pure Python: TORCHRELAY_COMPILE=1 pip install . compiles a part",
    )


class Brought(NamedTuple):
    """An installed distribution, with its commands and top-level packages."""

    name: str
    commands: tuple[str, ...]
    packages: tuple[str, ...]
    place: str = ""


def installed() -> list[Brought]:
    """All distributions of this Python that contain one of our commands or packages. Blocking."""
    found = []
    for one in importlib.metadata.distributions():
        commands = tuple(entry.name for entry in one.entry_points if entry.group == "console_scripts")
        packages = tuple((one.read_text("top_level.txt") or "").split())
        if set(commands) & set(COMMANDS) or set(packages) & set(PACKAGES):
            found.append(Brought(str(one.metadata["Name"]), commands, packages, str(one.locate_file(""))))
    return found


def packages_in_the_way(section: Section, found: Iterable[Brought], path_command: str | None, own_command: str) -> None:
    """`path_command`: the `torchserve` that a shell finds, None without one; `own_command`: that of this Python."""
    others = [one for one in found if one.name.lower().replace("_", "-") != OWN]
    for one in others:
        same = [
            *(name for name in COMMANDS if name in one.commands),
            *(name for name in PACKAGES if name in one.packages),
        ]
        section.warn(
            "packages",
            f"{one.name} (in {one.place}) brings {', '.join(same)} as this server does, and the one that was installed "
            f"last wins: {shlex.quote(sys.executable)} -m pip uninstall {one.name}, then install {OWN} again",
        )
    for folder in dict.fromkeys(map(os.path.realpath, filter(None, sys.path))):
        other = Path(folder, "ts", "__init__.py")
        if other.is_file() and not os.path.samefile(other.parent, Path(ts.version.__file__).parent):
            section.warn("packages", f"{other.parent} is another package ts: programs may import it in place of ours")
    if path_command is None:
        section.warn("packages", f"no torchserve is on the PATH: add {Path(own_command).parent}")
    elif os.path.realpath(path_command) != os.path.realpath(own_command) and Path(own_command).exists():
        section.warn("packages", f"torchserve on the PATH is {path_command}, and this Python's is {own_command}")
    if not section.findings:
        section.ok("packages", "no other package brings ts, torchserve or torch-model-archiver")


def python_packages(section: Section) -> None:
    python(
        section,
        str(sysconfig.get_config_var("CONFIG_ARGS")),
        without_gil=bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    )
    form(section, compiled=ts.version.is_compiled())
    apart = Section("")
    own_command = str(Path(sys.executable).parent / "torchserve")
    packages_in_the_way(apart, installed(), shutil.which("torchserve"), own_command)
    section.findings += apart.findings


# --- directories


def directory(section: Section, about: str, path: Path, *, runs_code: bool = False) -> None:
    """A directory that the server writes to. `runs_code`: libraries are built and loaded there."""
    parent = next((one for one in (path, *path.absolute().parents) if one.exists()), path)
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        section.error(about, f"{path} can't be written to: {error.strerror}. {_REMEDY.get(about, '')}".rstrip())
        return
    free_bytes = shutil.disk_usage(parent).free
    section.facts[f"{about}_free_bytes"] = free_bytes
    if free_bytes < FREE_DISK_BYTES_MIN:
        section.warn(about, f"{path} has {size(free_bytes)} left")
    elif runs_code and os.statvfs(parent).f_flag & os.ST_NOEXEC:
        section.warn(
            about, f"{path} is mounted noexec: environments of models and torch.compile can't run what they put there"
        )
    else:
        section.ok(about, f"{path}, {size(free_bytes)} left")


_REMEDY = {
    "temp_dir": "Set TMPDIR, or --work-dir for all files",
    "log_location": "Set LOG_LOCATION, or --work-dir for all files",
}


def pid_file(section: Section, path: Path, running: int | None) -> None:
    """`running`: the process id of the server that holds the file, None without one."""
    if running is not None:
        section.ok("pid file", f"a server runs as process {running} ({path})")
    elif path.exists():
        section.warn("pid file", f"{path} is left over: no server has it any more, and the next start removes it")
    else:
        section.ok("pid file", f"no server runs here ({path})")


# --- ports


def listeners(config: ServerConfig) -> list[Listener]:
    """The addresses of a server with these settings, each once, without services."""
    found: dict[tuple[object, ...], Listener] = {}
    for name in ("inference", "management"):
        host, port = getattr(config, f"grpc_{name}_address"), getattr(config, f"grpc_{name}_port")
        if config.enable_grpc:
            path = unix_path(host)
            found.setdefault((path, host, port), Listener(f"grpc_{name}", "" if path else host, port, {}, path=path))
    for name in ("inference", "management", "metrics"):
        address = getattr(config, f"{name}_address")
        if name != "metrics" or config.enable_metrics_api:
            place = (address.path, address.host, address.port)
            found.setdefault(place, Listener(f"http_{name}", address.host, address.port, {}, path=address.path))
    return list(found.values())


def ports(section: Section, found: Sequence[Listener], running: int | None) -> None:
    """Whether the addresses are free. `running`: the process of a server that may hold them."""
    family = _family(running)
    for one in found:
        where = one.path or f"{one.host}:{one.port}"
        if one.path:
            _socket_folder(section, one)
            continue
        if not one.port:
            section.ok("ports", f"{one.name} takes a free one")
            continue
        try:
            listen(one).close()
        except ListenFailed as error:
            if any(f"(process {pid})" in str(error) for pid in family):
                section.ok("ports", f"{one.name} {where}: the running server has it")
            else:
                section.error("ports", str(error))
        else:
            section.ok("ports", f"{one.name} {where} is free")


def _family(running: int | None) -> list[int]:
    if running is None:
        return []
    with contextlib.suppress(psutil.Error):
        return [running, *(child.pid for child in psutil.Process(running).children(recursive=True))]
    return [running]


def _socket_folder(section: Section, one: Listener) -> None:
    folder = Path(one.path).parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        section.error("ports", f"{one.name} {one.path}: {folder} isn't there, or can't be written to")
    elif os.path.lexists(one.path) and not stat.S_ISSOCK(os.lstat(one.path).st_mode):
        section.error("ports", f"{one.name} {one.path}: something that isn't a socket has this name; delete it")
    else:
        section.ok("ports", f"{one.name} {one.path}")


# --- limits


def limits(section: Section, open_files: int, free_memory_bytes: int, total_memory_bytes: int) -> None:
    """`open_files`: how many this process may have; memory that processes may take, in all and now."""
    section.facts |= {"open_files_max": open_files, "free_memory_bytes": free_memory_bytes}
    if open_files < OPEN_FILES_MIN:
        text = f"{open_files} open files are allowed, and each client and worker takes some: ulimit -n 65536"
        section.warn("open files", f"{text} (LimitNOFILE= of systemd)")
    else:
        section.ok("open files", f"{open_files} are allowed")
    if free_memory_bytes < FREE_MEMORY_BYTES_MIN:
        section.warn(
            "memory",
            f"{size(free_memory_bytes)} of {size(total_memory_bytes)} are free, counting the limit of the container: "
            "workers may be killed. `torchserve check` shows how much one takes",
        )
    else:
        section.ok("memory", f"{size(free_memory_bytes)} of {size(total_memory_bytes)} are free")


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
    python_packages(report.section("Python"))
    if config.ray_address:
        ray(report.sections[-1], config.ray_address, [name for name in RAY if importlib.util.find_spec(name) is None])
    asyncio.run(_devices(report.section("Torch and devices"), config))
    running = _running(report.section("Server"), config)
    ports(report.sections[-1], listeners(config), running)
    places = report.section("Directories")
    directory(places, "temp_dir", config.temp_dir, runs_code=True)
    directory(places, "log_location", config.log_location)
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
    pid_file(section, path, None if server is None else server.pid)
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
    limits(
        section,
        open_files_max(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        available_bytes(),
        int(psutil.virtual_memory().total),
    )
