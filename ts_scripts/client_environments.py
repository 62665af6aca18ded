"""Makes the virtual environments with other systems' clients that tests marked `external` run: one per file
tests/clients/NAME.txt (pip's requirements), under `clients/NAME` in this interpreter's environment.

Usage: python ts_scripts/client_environments.py [NAME...]

Without names, all but those of APART. Two are made at a time. An environment with the same requirements stays as it
is. If one can't be made, the script makes the others and exits with 1.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = ROOT / "tests" / "clients"
PLACE = Path(sys.prefix) / "clients"
STAMP = "made-from.txt"
#: Environments of over a gigabyte, which are made only by name.
APART = frozenset({"vllm"})
#: The beginning of a file whose packages are installed without what they depend on.
ALONE = "# Without what they depend on"


def names() -> list[str]:
    return sorted(path.stem for path in FILES.glob("*.txt"))


def is_current(name: str) -> bool:
    stamp = PLACE / name / STAMP
    return stamp.is_file() and stamp.read_text() == (FILES / f"{name}.txt").read_text()


def make(name: str) -> bool:
    """Makes an environment; returns False if pip could not install the file's packages and has printed the reason."""
    folder, file = PLACE / name, FILES / f"{name}.txt"
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--disable-pip-version-check"]
    # A test imports a small part of these packages: compiling them all would take longer than compiling that part.
    alone = ["--no-deps"] if file.read_text().startswith(ALONE) else []
    if subprocess.run([*pip, "install", "--quiet", "--no-compile", *alone, "-r", str(file)]).returncode:
        return False
    (folder / STAMP).write_text(file.read_text())
    return True


def main() -> None:
    wanted = sys.argv[1:] or [name for name in names() if name not in APART]
    unknown = [name for name in wanted if name not in names()]
    if unknown:
        sys.exit(f"no such environment: {', '.join(unknown)}; there are {', '.join(names())}")
    missing = [name for name in wanted if not is_current(name)]
    with ThreadPoolExecutor(2) as pool:
        failed = [name for name, made in zip(missing, pool.map(make, missing), strict=True) if not made]
    sys.exit(f"not made: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
