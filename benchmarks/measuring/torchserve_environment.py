"""TorchServe in a virtual environment of its own, so that its packages and ours don't meet."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

VERSION = "0.12.0"
FOLDER = Path(__file__).resolve().parent.parent / ".envs" / "torchserve"
JAVA_MISSING = "TorchServe needs Java 17. Install it: apt-get install openjdk-17-jre-headless."
PACKAGES = (f"torchserve=={VERSION}", "numpy", "packaging", "pillow", "psutil", "pyyaml", "setuptools", "wheel")


class NoTorchServe(Exception):
    """TorchServe can't be installed or run here; the message says what to do."""


def torch_spec() -> list[str]:
    """What pip installs as torch; the same variable as in the Makefile."""
    return os.environ.get("TORCH_SPEC", "torch==2.13.0").split()


def java_version() -> str:
    """The first line of `java -version`. Raises NoTorchServe."""
    if shutil.which("java") is None:
        raise NoTorchServe(JAVA_MISSING)
    printed = subprocess.run(["java", "-version"], capture_output=True, text=True).stderr
    found = re.search(r'version "(\d+)', printed)
    if found is None or int(found[1]) < 17:
        raise NoTorchServe(f"{JAVA_MISSING} `java -version` says: {printed.strip()}")
    return printed.splitlines()[0]


def ensure(say: Callable[[str], None]) -> Path:
    """The folder with TorchServe's commands; installs it first where that hasn't been done. Raises NoTorchServe."""
    java_version()
    wanted = "\n".join([*torch_spec(), *PACKAGES])
    stamp = FOLDER / "installed.txt"
    if not stamp.exists() or stamp.read_text() != wanted:
        _install(say)
        stamp.write_text(wanted)
    return FOLDER / "bin"


def _install(say: Callable[[str], None]) -> None:
    python = str(FOLDER / "bin" / "python")
    say(f"Installing TorchServe {VERSION} into {FOLDER} (torch is the largest download) ...")
    if not Path(python).exists():
        _step([sys.executable, "-m", "venv", str(FOLDER)])
    # torch first: TorchServe would take any.
    for packages in (torch_spec(), list(PACKAGES)):
        _step([python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *packages])


def _step(words: list[str]) -> None:
    ended = subprocess.run(words)
    if ended.returncode:
        raise NoTorchServe(f"{' '.join(words)} ended with status {ended.returncode}")


def command_environment(bin_folder: Path) -> dict[str, str]:
    """What must stand in the environment so that TorchServe's own Python is the one its workers get."""
    return {"PATH": f"{bin_folder}{os.pathsep}{os.environ.get('PATH', '')}", "VIRTUAL_ENV": str(bin_folder.parent)}
