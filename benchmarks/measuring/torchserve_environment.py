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
    """pip's requirement for torch; the same variable as in the Makefile."""
    return os.environ.get("TORCH_SPEC", "torch==2.13.0").split()


def _check_java() -> None:
    """Raises NotInstalled unless Java is 17 or newer."""
    if shutil.which("java") is None:
        raise NotInstalled(JAVA_MISSING)
    printed = subprocess.run(["java", "-version"], capture_output=True, text=True).stderr
    found = re.search(r'version "(\d+)', printed)
    if found is None or int(found[1]) < 17:
        raise NotInstalled(f"{JAVA_MISSING} `java -version` says: {printed.strip()}")


def ensure(say: Callable[[str], None]) -> Path:
    """The folder with TorchServe's commands, after installing it if necessary. Raises NotInstalled."""
    _check_java()
    # torch first: TorchServe's requirements would install any version.
    return environments.ensure("torchserve", (torch_spec(), PACKAGES), say) / "bin"


def command_environment(bin_folder: Path) -> dict[str, str]:
    """The environment variables that make TorchServe's workers use its own Python."""
    return {"PATH": f"{bin_folder}{os.pathsep}{os.environ.get('PATH', '')}", "VIRTUAL_ENV": str(bin_folder.parent)}
