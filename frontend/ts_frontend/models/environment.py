"""A model's own interpreter: a virtual environment with the archive's requirements, over the server's packages."""

from __future__ import annotations

import logging
import secrets
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from ts_frontend.errors import Code, ServeError
from ts_frontend.models.archive import Archive
from ts_frontend.workers.process import run_tool

log = logging.getLogger(__name__)

INSTALL_S_MAX = 1800.0
SHOWN_LINES = 15


class EnvironmentFailed(ServeError):
    """The environment couldn't be made; the message ends with what the installer said last."""

    code, http_status, type_name = Code.INVALID_ARGUMENT, 400, "ModelException"


@dataclass(frozen=True, slots=True)
class Environment:
    """`python`: the interpreter, "" for the server's own."""

    python: str = ""
    dir: Path | None = None

    def remove(self) -> None:
        """Deletes it. Blocking, never fails."""
        if self.dir is not None:
            shutil.rmtree(self.dir, ignore_errors=True)


async def make_environment(name: str, archive: Archive, work_dir: Path) -> Environment:
    """A virtual environment for model `name` (`useVenv`). It sees the server's packages behind its own.

    Raises EnvironmentFailed.
    """
    environment = Environment(str(work_dir / "venvs" / secrets.token_hex(16) / "bin" / "python"))
    directory = Path(environment.python).parents[1]
    environment = Environment(environment.python, directory)
    try:
        log.info("Making a virtual environment for model %s.", name)
        await _run(name, [sys.executable, "-m", "venv", str(directory)], archive.dir)
        _show_servers_packages(directory)
        if archive.requirements_file:
            log.info("Installing %s of model %s.", archive.requirements_file, name)
            await _run(name, _install(environment.python, archive.requirements_file), archive.dir)
    except BaseException:
        environment.remove()
        raise
    return environment


def _install(python: str, requirements: str) -> list[str]:
    words = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--upgrade"]
    return [*words, "--upgrade-strategy", "only-if-needed", "-r", requirements]


def _show_servers_packages(directory: Path) -> None:
    """`--system-site-packages` would show those of the interpreter the server's environment was made with."""
    paths = sysconfig.get_paths()
    (own,) = directory.glob("lib/python*/site-packages")
    lines = dict.fromkeys((paths["purelib"], paths["platlib"]))
    (own / "server_packages.pth").write_text("".join(f"{line}\n" for line in lines))


async def _run(name: str, argv: list[str], cwd: Path) -> None:
    status, output = await run_tool(argv, cwd, INSTALL_S_MAX)
    if status:
        last = "\n".join(output.splitlines()[-SHOWN_LINES:])
        raise EnvironmentFailed(
            f"Virtual environment creation failed for model {name}: {' '.join(argv[1:4])} …: {last}"
        )
