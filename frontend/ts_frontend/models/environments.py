"""A model's own packages: a virtual environment with the archive's requirements, over the server's packages.

Environments are kept and shared: models, versions, servers and restarts that need the same packages use the same one.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import sys
import sysconfig
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import unquote

from ts_frontend.config.files import read_file
from ts_frontend.config.load import environment
from ts_frontend.errors import Code, ServeError
from ts_frontend.models.archive import Archive
from ts_frontend.tasks import undone_on_failure
from ts_frontend.workers.launchers import run_tool

log = logging.getLogger(__name__)

RETRY_S = 0.2

#: Makes the environment in the directory; the number is a descriptor to keep open in every process that writes there.
Build = Callable[[Path, int], Awaitable[None]]


class Held:
    """A shared lock on an environment, which stays until the lock is released."""

    def __init__(self, path: Path, record: Path, handle: int) -> None:
        self.path = path
        self._record = record
        self._handle: int | None = handle

    def release(self) -> None:
        """Releases the environment; a second call does nothing."""
        if self._handle is not None:
            with contextlib.suppress(OSError):
                os.utime(self._record)
            os.close(self._handle)
            self._handle = None


class EnvironmentStore:
    """The environments below `directory`. `kept_max`: how many of the last used ones stay; those in use always do."""

    def __init__(self, directory: Path, kept_max: int) -> None:
        self._directory = directory
        self._kept_max = kept_max

    async def obtain(self, key: str, about: Mapping[str, str], build: Build, on_wait: Callable[[], None]) -> Held:
        """The environment `key`, made now if it doesn't exist; `about` is written to a file next to it.

        `on_wait` is called once when another caller is making it. Raises OSError, and the errors of `build`.
        """
        self._prepare()
        told = False
        while True:
            held = self._use(key)
            if held is not None:
                return held
            alone = self._lock(key, fcntl.LOCK_EX)
            if alone is not None:
                try:
                    await self._make(key, about, build, alone)
                finally:
                    os.close(alone)
                continue
            if not told:
                told = True
                on_wait()
            await asyncio.sleep(RETRY_S)

    def prune(self) -> None:
        """Deletes environments beyond `kept_max` and remains of interrupted builds, if they can be. Blocking."""
        if not self._directory.is_dir():
            return
        whole = sorted(self._directory.glob("*.json"), key=_used_s, reverse=True)
        known = {record.stem for record in whole}
        rubbish = [path.name for path in self._directory.iterdir() if path.is_dir() and path.name not in known]
        for key in [*(record.stem for record in whole[self._kept_max :]), *rubbish]:
            alone = self._lock(key, fcntl.LOCK_EX)
            if alone is not None:
                self._delete(key)
                os.close(alone)

    # --- one environment

    def _path(self, key: str) -> Path:
        return self._directory / key

    def _record(self, key: str) -> Path:
        return self._directory / f"{key}.json"

    def _is_whole(self, key: str) -> bool:
        return self._record(key).is_file() and self._path(key).is_dir()

    def _use(self, key: str) -> Held | None:
        handle = self._lock(key, fcntl.LOCK_SH)
        if handle is None:
            return None
        if not self._is_whole(key):
            os.close(handle)
            return None
        os.utime(self._record(key))
        return Held(self._path(key), self._record(key), handle)

    async def _make(self, key: str, about: Mapping[str, str], build: Build, alone: int) -> None:
        if self._is_whole(key):
            return
        path = self._path(key)
        await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
        async with undone_on_failure() as undo:
            undo.push_async_callback(asyncio.to_thread, self._delete, key)
            await build(path, alone)
            await asyncio.to_thread(self._note, key, about)

    def _note(self, key: str, about: Mapping[str, str]) -> None:
        partial = self._directory / f".{key}.json"
        partial.write_text(json.dumps(about, indent=2) + "\n")
        os.replace(partial, self._record(key))

    def _delete(self, key: str) -> None:
        """Deletes an environment; the caller holds its exclusive lock."""
        self._record(key).unlink(missing_ok=True)
        shutil.rmtree(self._path(key), ignore_errors=True)
        (self._directory / f"{key}.lock").unlink(missing_ok=True)

    # --- the directory and its locks

    def _prepare(self) -> None:
        """Makes the directory. Raises OSError unless nobody else may write to it: workers run its files."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.stat(self._directory)
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(
                f"{self._directory} must belong to the user of this server and be writable by no other: "
                "set environments_dir to another directory"
            )

    def _lock(self, key: str, how: int) -> int | None:
        """A descriptor that holds the lock, None while a conflicting lock is held."""
        path = self._directory / f"{key}.lock"
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(handle, how | fcntl.LOCK_NB)
            except OSError:
                os.close(handle)
                return None
            if _is_at(handle, path):
                return handle
            os.close(handle)  # deleted while we opened it


def _used_s(record: Path) -> float:
    try:
        return record.stat().st_mtime
    except OSError:
        return 0.0


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


_NESTED = re.compile(r"^(?:-r|-c|--requirement|--constraint)(?:\s+|=)?(\S+)")
_IN_PLACE = re.compile(r"^(?:(?:-e|--editable)\b|\./?(?:\s|$))")
_LINKS = re.compile(r"^(?:-f|--find-links)(?:\s+|=)?(\S+)")
_PACKAGES = (".whl", ".tar.gz", ".zip")
#: A line that gives torch as a file or URL: its version, if the name has it.
_TORCH_FILE = re.compile(r"^torch\s*(?:\[[^\]]*\]\s*)?@(?:.*/torch-([^-/\s]+)-)?|(?:^|[/=\s])torch-([^-/\s]+)-\S*\.whl")
_LINE_CHARS_MAX = 200
_WORDS = re.compile(r"[\s=@;,]+|file:(?://)?")
_READ_BYTES = 1 << 20


def digest(directory: Path, requirements: str | None, *more: str) -> str:
    """Returns a digest of an archive's requirements file and of the strings in `more`: 32 hexadecimal digits.

    Blocking. Raises OSError when a file can't be read.
    """
    found = hashlib.sha256()
    for part in more:
        found.update(part.encode() + b"\0")
    if requirements is not None:
        for data in _parts(directory, directory / requirements, set()):
            found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()[:32]


def _parts(directory: Path, file: Path, seen: set[Path]) -> Iterator[bytes]:
    if file in seen:
        return
    seen.add(file)
    yield read_file(file)
    for line in _lines(file):
        if _IN_PLACE.match(line):  # the installed package is, or is a link to, this very folder
            yield str(directory).encode()
        nested, links = _NESTED.match(line), _LINKS.match(line)
        for path in _named(line, nested or links, (directory, file.parent)):
            if nested and path.is_file():
                yield from _parts(directory, path, seen)
            else:
                yield from _contents(path, _PACKAGES if links else ("",))


def other_torch(directory: Path, file: Path, torch: str, seen: set[Path]) -> str:
    """The line of a requirements file, or of one that it names, that gives a file of another torch than `torch`, after
    the file's name; "" without one. pip would download it before it compares. Blocking. Raises OSError."""
    if file in seen:
        return ""
    seen.add(file)
    for line in _lines(file):
        if (found := _TORCH_FILE.search(line)) and unquote(found[1] or found[2] or "") != torch:
            return f"{file.name}: {line[:_LINE_CHARS_MAX]!a}"
        nested = _NESTED.match(line)
        for path in _named(line, nested, (directory, file.parent)) if nested else ():
            if path.is_file() and (told := other_torch(directory, path.resolve(), torch, seen)):
                return told
    return ""


def _named(line: str, option: re.Match[str] | None, bases: tuple[Path, ...]) -> Iterator[Path]:
    """The files and folders that a line names; `option` matches an option with its path."""
    words = [option[1]] if option else [word for word in _WORDS.split(line) if word.strip("./")]
    for word in words:
        for base in dict.fromkeys(bases):
            if (base / word).exists():
                yield base / word


def _lines(file: Path) -> list[str]:
    text = read_file(file).decode(errors="replace").replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def _contents(path: Path, endings: tuple[str, ...]) -> Iterator[bytes]:
    """Names and contents of a file, or of a folder's files with one of `endings` ("": of all files at any depth)."""
    found = path.rglob("*") if endings == ("",) else path.glob("*")
    files = [path] if path.is_file() else sorted(one for one in found if one.is_file() and one.name.endswith(endings))
    for one in files:
        yield one.relative_to(path.parent).as_posix().encode()
        with one.open("rb") as source:
            while data := source.read(_READ_BYTES):
                yield data


SHOWN_LINES = 15
SHOWN_CHARS_MAX = 4000
#: Part of every digest: changes with the way in which environments are made.
FORMAT = "2"


class EnvironmentFailed(ServeError):
    """The environment couldn't be made; the message ends with the last lines of the installer's output."""

    remedy = "Correct the requirements file; the model's log has pip's output."
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

    def wanted(self, archive: Archive, use_venv: bool) -> bool:
        return use_venv or (self._install and archive.requirements_file is not None)

    async def of(self, name: str, archive: Archive, use_venv: bool) -> Environment:
        """The environment of model `name`, kept until it is released. Raises EnvironmentFailed."""
        wanted = archive.requirements_file
        if not self.wanted(archive, use_venv):
            return Environment()
        try:
            key = await asyncio.to_thread(digest, archive.dir, wanted, *_ground())
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
        if environment.held is not None:
            environment.held.release()
            await asyncio.to_thread(self._store.prune)


_CREATE = "Virtual environment creation failed for model"
_INSTALL = "Custom pip package installation failed for model"
_KEPT = (
    "But the server has torch {torch}, which its models keep: name torch without a version or with one that this "
    "satisfies, or serve the model with a server that has the other torch"
)
_GROUND = ("format", "python", "interpreter", "packages", "torch")


def _ground() -> tuple[str, ...]:
    """The interpreter and torch below the environments; part of every digest."""
    return FORMAT, sys.version, sys.executable, sysconfig.get_paths()["purelib"], _torch()


def _torch() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


class _Maker:
    """Makes one environment for one model."""

    def __init__(self, name: str, archive: Archive, timeout_s: float) -> None:
        self._name, self._archive, self._timeout_s = name, archive, timeout_s
        self.made = False

    def waits(self) -> None:
        log.info("Model %s waits: another process is making its virtual environment.", self._name)

    async def make(self, directory: Path, lock: int) -> None:
        self.made = True
        wanted = self._archive.requirements_file
        log.info("Making a virtual environment for model %s in %s.", self._name, directory)
        # pip's temporary files: a killed pip leaves them, up to gigabytes, and they go with the directory.
        temporary = directory / "tmp"
        temporary.mkdir(mode=0o700, parents=True)
        await self._run(_CREATE, _create(directory), lock, temporary)
        _show_servers_packages(directory)
        if wanted:
            log.info("Installing %s of model %s.", wanted, self._name)
            await self._install(_pip(directory / "bin" / "python", wanted), wanted, lock, temporary)
            log.info("Installed custom pip packages for model %s.", self._name)
        await asyncio.to_thread(shutil.rmtree, temporary)

    async def _install(self, pip: list[str], wanted: str, lock: int, temporary: Path) -> None:
        if not (torch := _torch()):
            await self._run(_INSTALL, pip, lock, temporary)
            return
        root = self._archive.dir.resolve()
        if line := await asyncio.to_thread(other_torch, root, root / wanted, torch, set()):
            raise EnvironmentFailed(f"{_INSTALL} {self._name}: {line} gives another torch. {_KEPT.format(torch=torch)}")
        constraints = temporary / "constraints.txt"
        constraints.write_text(f"torch=={torch}\n")
        try:
            await self._run(_INSTALL, [*pip, "--constraint", str(constraints)], lock, temporary)
        except EnvironmentFailed as error:
            if "(constraint) torch" not in error.message:
                raise
            raise EnvironmentFailed(f"{error.message}\n{_KEPT.format(torch=torch)}") from None

    async def _run(self, title: str, argv: Sequence[str], lock: int, temporary: Path) -> None:
        last: deque[str] = deque(maxlen=SHOWN_LINES)

        def take(line: str) -> None:
            last.append(line)
            if not line.startswith("Requirement already satisfied"):
                log.info("Model %s: %s", self._name, line)

        # The installer inherits the lock: it still holds it if this process is killed first.
        env = environment() | {"TMPDIR": str(temporary)}
        status = await run_tool(argv, self._archive.dir, self._timeout_s, take, (lock,), env)
        if status is None:
            last.append(f"it took longer than {self._timeout_s:g} s (install_timeout_s) and was ended")
        if status != 0:
            text = "\n".join(last)[-SHOWN_CHARS_MAX:]
            raise EnvironmentFailed(f"{title} {self._name}: {text or f'it ended with status {status}'}")


def _create(directory: Path) -> list[str]:
    """The command that creates the environment: without a pip of its own when the server's is visible in it."""
    without = ["--without-pip"] if PathFinder.find_spec("pip") is not None else []
    return [sys.executable, "-m", "venv", *without, str(directory)]


def _pip(python: Path, wanted: str) -> list[str]:
    words = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    return [*words, "-r", wanted]


def _show_servers_packages(directory: Path) -> None:
    """Adds the server's packages to the path; `--system-site-packages` would add those of the base interpreter."""
    paths = sysconfig.get_paths()
    (own,) = directory.glob("lib/python*/site-packages")
    lines = dict.fromkeys((paths["purelib"], paths["platlib"]))
    (own / "server_packages.pth").write_text("".join(f"{line}\n" for line in lines))
