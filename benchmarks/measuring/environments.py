"""Virtual environments of other servers, so that their packages don't conflict with ours."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from measuring.processes import BenchmarkFailed

PLACE = (Path(__file__).resolve().parent.parent / ".envs").resolve()


class NotInstalled(BenchmarkFailed):
    """Another server can't be installed or run here; the message has the remedy."""


def ensure(name: str, packages: Sequence[Sequence[str]], say: Callable[[str], None]) -> Path:
    """The folder of the environment `name`, into which pip has installed each of `packages`, in this order. Creates it
    if necessary. Raises NotInstalled."""
    folder = PLACE / name
    wanted = "\n".join(word for words in packages for word in words)
    stamp = folder / "installed.txt"
    if not stamp.exists() or stamp.read_text() != wanted:
        say(f"Installing {' '.join(packages[-1])} into {folder} ...")
        python = str(folder / "bin" / "python")
        if not Path(python).exists():
            _step([sys.executable, "-m", "venv", str(folder)])
        for words in packages:
            _step([python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *words])
        stamp.write_text(wanted)
    return folder


def python_of(environment: Path) -> tuple[str, str]:
    """The version of the environment's Python, such as 3.11, and the folder of its shared library. An environment that
    another Python has made needs the library of that one."""
    asked = "import sysconfig as s; print(s.get_python_version(), s.get_config_var('LIBDIR'))"
    answer = subprocess.run([environment / "bin" / "python", "-c", asked], check=True, capture_output=True, text=True)
    version, folder = answer.stdout.strip().split(" ", 1)
    return version, folder


def _step(words: list[str]) -> None:
    ended = subprocess.run(words)
    if ended.returncode:
        raise NotInstalled(f"{' '.join(words)} ended with status {ended.returncode}")
