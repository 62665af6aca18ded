"""The machine and the versions of a measurement."""

from __future__ import annotations

import os
import platform
import subprocess
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

import ts.version
from measuring import h2load

BUSY_LOAD = 0.5


def processor() -> str:
    """The processor's name, "" if the system doesn't report it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def describe() -> dict[str, object]:
    """The cores, the memory, and the load before the benchmark."""
    return {
        "system": platform.platform(),
        "processor": processor(),
        "cores": len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average_before": os.getloadavg()[0],
    }


def energy_j(powercap: Path = Path("/sys/class/powercap")) -> float | None:
    """The energy that the processors' packages have used since some time, in joules, where the system tells it to this
    user; else None."""
    packages = [one for one in powercap.glob("intel-rapl:*") if one.name.count(":") == 1]
    try:
        return sum(int((one / "energy_uj").read_text()) for one in packages) / 1e6 if packages else None
    except OSError:
        return None


#: The options of Python's configure script, and their meaning. Debian and Ubuntu optimise by rules of their own, which
#: leave no other trace.
_OPTIMISATIONS = {
    "--enable-optimizations": "PGO",
    "--with-lto": "LTO",
    "--with-wheel-pkg-dir=/usr/share/python-wheels": "PGO by Debian",
}


def optimisations(words: str) -> str:
    """The optimisations of a Python's build, by the options of its configure script: without them, the same code takes
    10 to 20 % more CPU time."""
    given = [word.strip("'\"").rstrip("/") for word in words.split()]
    found = [name for flag, name in _OPTIMISATIONS.items() if {flag, f"{flag}=full", f"{flag}=yes"} & {*given}]
    return "+".join(found) or "not optimised"


def python_build() -> str:
    """Version and optimisation of this Python."""
    return f"{platform.python_version()} ({optimisations(str(sysconfig.get_config_var('CONFIG_ARGS') or ''))})"


def versions() -> dict[str, str]:
    """The versions of everything that takes part."""
    found = {"torchrelay": ts.version.__version__, "python": python_build(), "h2load": h2load.version()}
    for package in ("httptools", "uvloop", "grpcio", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return {**found, "revision": _revision()}


def _revision() -> str:
    """The revision of this checkout; "unknown" outside of one."""
    words = ["git", "describe", "--always", "--dirty"]
    try:
        ended = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parent)
    except OSError:
        return "unknown"
    return ended.stdout.strip() or "unknown"


def busy() -> str:
    """A warning if other programs use the machine, else "".

    The load average is that of the last minute.
    """
    load = os.getloadavg()[0]
    if load < BUSY_LOAD:
        return ""
    return f"The machine is busy (load average {load:.1f}): read ratios, and those with care."
