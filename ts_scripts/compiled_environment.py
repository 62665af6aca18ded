"""Makes an environment with the compiled form: links to this environment's packages, and this checkout installed with
TORCHRELAY_COMPILE=1.

Usage: python ts_scripts/compiled_environment.py [--for-tests]

It is `compiled` in this interpreter's environment; with `--for-tests` it is `compiled_for_tests`, whose C isn't
optimised, which takes a third of the time. One that was made from the same sources and packages stays as it is. Needs a
C compiler and Python's headers.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: What an installed package is made from.
SOURCES = ("worker", "frontend", "setup.py", "setup.cfg", "pyproject.toml", "README.md")
STAMP = "made-from.txt"


def packages() -> list[Path]:
    """What is installed here, except torchrelay itself."""
    folders = dict.fromkeys((sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]))
    entries = sorted(entry for folder in folders for entry in Path(folder).iterdir())
    return [entry for entry in entries if "torchrelay" not in entry.name.lower() and entry.name != "__pycache__"]


def made_from() -> str:
    """A digest of the sources' names and texts, and of the packages' names, which have their versions."""
    digest = hashlib.sha256(os.fsencode(sys.version))
    for package in packages():
        digest.update(os.fsencode(package) + b"\0")
    for source in (ROOT / name for name in SOURCES):
        for file in sorted(source.rglob("*")) if source.is_dir() else [source]:
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(os.fsencode(file.relative_to(ROOT)) + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description="Make an environment with the compiled form.")
    parser.add_argument("--for-tests", action="store_true", help="without optimisation, which takes longest")
    name, level = ("compiled_for_tests", "0") if parser.parse_args().for_tests else ("compiled", "1")
    place = Path(sys.prefix) / name
    stamp, current = place / STAMP, made_from()
    if stamp.is_file() and stamp.read_text() == current:
        return
    shutil.rmtree(place, ignore_errors=True)
    venv.create(place, symlinks=True)
    # Models' environments see links too, while files that name other folders (`.pth`) would count only here.
    ours = place / Path(sysconfig.get_paths()["purelib"]).relative_to(sys.prefix)
    for package in packages():
        if not (ours / package.name).exists():
            (ours / package.name).symlink_to(package)
    python = str(place / "bin" / "python")
    install = ["-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    env = {**os.environ, "TORCHRELAY_COMPILE": "1", "TORCHRELAY_OPT_LEVEL": level}
    if status := subprocess.run([python, *install, str(ROOT)], env=env).returncode:
        sys.exit(status)
    stamp.write_text(current)


if __name__ == "__main__":
    main()
