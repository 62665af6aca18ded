"""A model's own packages: a virtual environment with the archive's requirements, over the server's packages.

Environments are kept and shared: models, versions, servers and restarts that need the same packages use the same one.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import sysconfig
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ts_frontend.errors import Code, ServeError
from ts_frontend.models import requirements
from ts_frontend.models.archive import Archive
from ts_frontend.models.environment_store import EnvironmentStore, Held
from ts_frontend.workers.process import run_tool

log = logging.getLogger(__name__)

SHOWN_LINES = 15
SHOWN_CHARS_MAX = 4000
#: Another way of making environments makes other ones.
FORMAT = "1"


class EnvironmentFailed(ServeError):
    """The environment couldn't be made; the message ends with what the installer said last."""

    code, http_status, type_name = Code.INVALID_ARGUMENT, 400, "ModelException"


@dataclass(frozen=True, slots=True)
class Environment:
    """`python`: the interpreter, "" for the server's own."""

    python: str = ""
    held: Held | None = None


class Environments:
    """Finds or makes the environment that a model needs.

    `install`: requirements files are installed also for models without `useVenv` (`install_py_dep_per_model`).
    """

    def __init__(self, store: EnvironmentStore, *, install: bool, timeout_s: float) -> None:
        self._store = store
        self._install = install
        self._timeout_s = timeout_s

    async def of(self, name: str, archive: Archive, use_venv: bool) -> Environment:
        """For model `name`; it stays until it is released. Raises EnvironmentFailed."""
        wanted = archive.requirements_file
        if not use_venv and not (self._install and wanted):
            return Environment()
        try:
            key = await asyncio.to_thread(requirements.digest, archive.dir, wanted, *_ground())
        except OSError as error:
            message = f"{_INSTALL} {name}: {wanted} can't be read: {error.strerror}"
            raise EnvironmentFailed(message) from error
        maker = _Maker(name, archive, self._timeout_s)
        about = {"for": name, "requirements": wanted or "", **dict(zip(_GROUND, _ground(), strict=True))}
        try:
            held = await self._store.obtain(key, about, maker.make, maker.waits)
        except OSError as error:
            raise EnvironmentFailed(f"{_CREATE} {name}: {error}") from error
        if not maker.made:
            log.info("Model %s uses the virtual environment %s.", name, held.path)
        await asyncio.to_thread(self._store.prune)
        return Environment(str(held.path / "bin" / "python"), held)

    async def release(self, environment: Environment) -> None:
        """The model is gone: another may have its environment, or nobody."""
        if environment.held is not None:
            environment.held.release()
            await asyncio.to_thread(self._store.prune)


_CREATE = "Virtual environment creation failed for model"
_INSTALL = "Custom pip package installation failed for model"
_GROUND = ("format", "python", "interpreter", "packages", "torch")


def _ground() -> tuple[str, ...]:
    """What an environment stands on: another interpreter or torch needs another environment."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = ""
    return FORMAT, sys.version, sys.executable, sysconfig.get_paths()["purelib"], torch


class _Maker:
    """Makes one environment for one model."""

    def __init__(self, name: str, archive: Archive, timeout_s: float) -> None:
        self._name, self._archive, self._timeout_s = name, archive, timeout_s
        self.made = False

    def waits(self) -> None:
        log.info("Model %s waits: its virtual environment is being made by somebody else.", self._name)

    async def make(self, directory: Path, lock: int) -> None:
        """Raises EnvironmentFailed, OSError."""
        self.made = True
        wanted = self._archive.requirements_file
        log.info("Making a virtual environment for model %s in %s.", self._name, directory)
        await self._run(_CREATE, _create(directory), lock)
        _show_servers_packages(directory)
        if wanted:
            log.info("Installing %s of model %s.", wanted, self._name)
            await self._run(_INSTALL, _pip(directory / "bin" / "python", wanted), lock)
            log.info("Installed custom pip packages for model %s.", self._name)

    async def _run(self, title: str, argv: Sequence[str], lock: int) -> None:
        last: deque[str] = deque(maxlen=SHOWN_LINES)

        def take(line: str) -> None:
            last.append(line)
            if not line.startswith("Requirement already satisfied"):
                log.info("Model %s: %s", self._name, line)

        # The lock stays with whoever writes there, should this process be killed before it.
        status = await run_tool(argv, self._archive.dir, self._timeout_s, take, (lock,))
        if status is None:
            last.append(f"it took longer than {self._timeout_s:g} s (install_timeout_s) and was ended")
        if status != 0:
            text = "\n".join(last)[-SHOWN_CHARS_MAX:]
            raise EnvironmentFailed(f"{title} {self._name}: {text or f'it ended with status {status}'}")


def _create(directory: Path) -> list[str]:
    """With the server's pip, which shows through, when there is one."""
    without = ["--without-pip"] if PathFinder.find_spec("pip") is not None else []
    return [sys.executable, "-m", "venv", *without, str(directory)]


def _pip(python: Path, wanted: str) -> list[str]:
    words = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    return [*words, "--upgrade", "--upgrade-strategy", "only-if-needed", "-r", wanted]


def _show_servers_packages(directory: Path) -> None:
    """`--system-site-packages` would show those of the interpreter the server's environment was made with."""
    paths = sysconfig.get_paths()
    (own,) = directory.glob("lib/python*/site-packages")
    lines = dict.fromkeys((paths["purelib"], paths["platlib"]))
    (own / "server_packages.pth").write_text("".join(f"{line}\n" for line in lines))
