"""Checks of the machine: Python and its packages, directories, ports, limits. Each function adds its
findings to a section; values of the system are arguments, so that a test can give others."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import stat
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

import ts.version
from ts_frontend.config.addresses import unix_path
from ts_frontend.config.table import ServerConfig
from ts_frontend.diagnosis.report import Section, size
from ts_frontend.listeners.listener import Listener
from ts_frontend.listeners.sockets import ListenFailed, listen

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
