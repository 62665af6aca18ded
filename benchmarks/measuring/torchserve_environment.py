"""TorchServe in a virtual environment of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from measuring import environments
from measuring.environments import NotInstalled

VERSION = "0.12.0"
JAVA_MISSING = "TorchServe needs Java 17. Install it: apt-get install openjdk-17-jre-headless."
PACKAGES = (f"torchserve=={VERSION}", "numpy", "packaging", "pillow", "psutil", "pyyaml", "setuptools", "wheel")


def torch_spec() -> list[str]:
    """What pip installs as torch; the same variable as in the Makefile."""
    return os.environ.get("TORCH_SPEC", "torch==2.13.0").split()


def java_version() -> str:
    """The first line of `java -version`. Raises NotInstalled."""
    if shutil.which("java") is None:
        raise NotInstalled(JAVA_MISSING)
    printed = subprocess.run(["java", "-version"], capture_output=True, text=True).stderr
    found = re.search(r'version "(\d+)', printed)
    if found is None or int(found[1]) < 17:
        raise NotInstalled(f"{JAVA_MISSING} `java -version` says: {printed.strip()}")
    return printed.splitlines()[0]


def ensure(say: Callable[[str], None]) -> Path:
    """The folder with TorchServe's commands; installs it first where that hasn't been done. Raises NotInstalled."""
    java_version()
    # torch first: TorchServe would take any.
    return environments.ensure("torchserve", (torch_spec(), PACKAGES), say) / "bin"


def command_environment(bin_folder: Path) -> dict[str, str]:
    """What must stand in the environment so that TorchServe's own Python is the one its workers get."""
    return {"PATH": f"{bin_folder}{os.pathsep}{os.environ.get('PATH', '')}", "VIRTUAL_ENV": str(bin_folder.parent)}
