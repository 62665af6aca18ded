"""Makes the environment in which the tests of the compiled form run: `compiled` in this interpreter's environment, with
links to this environment's packages, and this checkout installed with TORCHRELAY_COMPILE=1.

Usage: python ts_scripts/compiled_environment.py

It is made anew each time, in about three minutes. Needs a C compiler and Python's headers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = Path(sys.prefix) / "compiled"


def show_packages(theirs: Path, ours: Path) -> None:
    """Links the packages, except torchrelay itself. Models' environments see links too, while files that name other
    folders (`.pth`) would count only here."""
    for entry in theirs.iterdir():
        if "torchrelay" not in entry.name.lower() and entry.name != "__pycache__" and not (ours / entry.name).exists():
            (ours / entry.name).symlink_to(entry)


def main() -> None:
    shutil.rmtree(PLACE, ignore_errors=True)
    venv.create(PLACE, symlinks=True)
    python = str(PLACE / "bin" / "python")
    ours = PLACE / Path(sysconfig.get_paths()["purelib"]).relative_to(sys.prefix)
    for path in dict.fromkeys((sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"])):
        show_packages(Path(path), ours)
    install = ["-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    env = {**os.environ, "TORCHRELAY_COMPILE": "1"}
    sys.exit(subprocess.run([python, *install, str(ROOT)], env=env).returncode)


if __name__ == "__main__":
    main()
