"""An archive's contents: which file goes where in it, and its reproducible bytes (equal files give equal bytes, for any
order, dates, owners and permissions on disk)."""

from __future__ import annotations

import difflib
import filecmp
import glob
import gzip
import io
import logging
import os
import platform
import re
import shutil
import stat
import tarfile
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import yaml

from model_archiver.model_archiver_config import ModelArchiverConfig
from model_archiver.model_archiver_error import MissingFile, ModelArchiverError
from ts_frontend.models.archive import parse_config

_log = logging.getLogger(__name__)
#: The allowed names of models and workflows.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-.]*")
NAME_RULE = "letters, digits, '_', '-' and '.', and the first a letter or a digit"
_CACHE = "__pycache__"
_PATTERN_CHARS = frozenset("*?[")

#: Handlers that come with the server; they aren't copied.
BUILT_IN_HANDLERS = frozenset(
    (
        "base_handler",
        "text_classifier",
        "image_classifier",
        "object_detector",
        "image_segmenter",
        "dali_image_classifier",
        "vllm_handler",
        "trt_llm_handler",
    )
)


class Contents:
    """The files of an archive by their names in it (`/` between directories). `reserved`: its manifest's directory."""

    def __init__(self, reserved: str) -> None:
        self.files: dict[str, Path] = {}
        self._reserved = reserved

    def add(self, name: str, path: Path) -> None:
        """Raises ModelArchiverError if another file already has this name, in any case, unless its content is equal."""
        if name.split("/")[0].upper() == self._reserved:
            raise ModelArchiverError(f"{path}: {self._reserved} in an archive is for its manifest")
        other = self.files.get(name)
        if other is not None and not filecmp.cmp(other, path, shallow=False):
            raise ModelArchiverError(
                f"{other} and {path} would both be {name} in the archive. "
                "Rename one, or keep directories with --preserve-structure."
            )
        self.files.setdefault(name, path)

    def add_extra(self, extra_files: str | Sequence[str] | None, leave_out: Path, *, preserve: bool) -> None:
        """Adds the files of --extra-files. `leave_out`: the archive being made, skipped if it is among them."""
        for path in extra_paths(extra_files):
            for name, file in _placed(path, preserve):
                if not _within(file, leave_out):
                    self.add(name, file)


def gather(config: ModelArchiverConfig, leave_out: Path) -> dict[str, Path]:
    """All files of the archive. `leave_out`: the archive being made, skipped if it is among them.

    Raises ModelArchiverError, MissingFile.
    """
    contents = Contents("MAR-INF")
    for option in ("serialized_file", "model_file", "requirements_file", "config_file"):
        if value := getattr(config, option):
            path = existing(Path(value), "--" + option.replace("_", "-"))
            contents.add(path.name, path)
    if config.config_file:
        yaml_of(Path(config.config_file), "--config-file")
    if handler := handler_file(config):
        if handler.suffix == ".py":
            check_compiles(handler)
        contents.add(handler.name, handler)
    contents.add_extra(config.extra_files, leave_out, preserve=config.preserve_structure)
    return contents.files


def yaml_of(path: Path, option: str) -> dict[str, Any]:
    """The mapping in the file that an option names, read as the server does. Raises ModelArchiverError."""
    try:
        return parse_config(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ModelArchiverError(f"{option}: {path} is not usable as YAML: {error}") from None


def check_compiles(path: Path) -> None:
    """Compiles a handler, without running it. Raises ModelArchiverError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(path.read_bytes(), str(path), "exec")
    except SyntaxError as error:
        raise ModelArchiverError(
            f"--handler: {path}, line {error.lineno}: {type(error).__name__}: {error.msg}"
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ModelArchiverError(f"--handler: {path} can't be compiled: {error or type(error).__name__}") from None


def existing(path: Path, option: str) -> Path:
    """The file an option names. Raises MissingFile."""
    if path.is_dir():
        raise MissingFile(f"{option}: {path} is a directory")
    if not path.is_file():
        raise MissingFile(f"{option}: {path} is not there{_meant(path)}")
    return path


def _meant(path: Path) -> str:
    """`; did you mean X?` for the file beside it with the most similar name, or ""."""
    if not path.parent.is_dir():
        return f"; nor is the directory {path.parent}"
    files = sorted(one.name for one in path.parent.iterdir() if one.is_file())
    close = difflib.get_close_matches(path.name, files, n=1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def split_handler(handler: str) -> tuple[str, str]:
    """("dir/file.py", "function"); the function is "" when none is named. A drive's colon (C:\\x) doesn't count."""
    file, colon, function = handler.rpartition(":")
    if not colon or not function.isidentifier() or (platform.system() == "Windows" and len(file) == 1):
        return handler, ""
    return file, function


def handler_file(config: ModelArchiverConfig) -> Path | None:
    """The handler's source file, None for a built-in one. For C++ it may be a class inside a library: no file then."""
    file, _ = split_handler(str(config.handler))
    if file in BUILT_IN_HANDLERS:
        return None
    if config.runtime == "LSP":
        return Path(file) if Path(file).is_file() else None
    path = Path(file if file.endswith(".py") else f"{file}.py")
    if not path.exists() and (meant := difflib.get_close_matches(file, BUILT_IN_HANDLERS, n=1)):
        raise MissingFile(
            f"--handler: {path} does not exist, and {file} is not a built-in handler; did you mean {meant[0]}?"
        )
    return existing(path, "--handler")


def extra_paths(extra_files: str | Sequence[str] | None) -> Iterator[Path]:
    """The paths of a comma list, patterns resolved. Raises MissingFile for a plain path that isn't there."""
    words = extra_files.split(",") if isinstance(extra_files, str) else list(map(str, extra_files or ()))
    for word in (word.strip() for word in words):
        if not word:
            continue
        if os.path.exists(word):
            yield Path(word)
        elif _PATTERN_CHARS.isdisjoint(word):
            raise MissingFile(f"--extra-files: {word} is not there")
        else:
            yield from _matches(word)


def _matches(pattern: str) -> list[Path]:
    found = sorted(path for path in map(Path, glob.glob(pattern, recursive=True)) if _CACHE not in path.parts)
    if not found:
        _log.warning("--extra-files: nothing matches %s", pattern)
    return found


def _placed(path: Path, preserve: bool) -> Iterator[tuple[str, Path]]:
    """(name in the archive, file) of an extra file or of all that a directory holds."""
    top = _kept(path) if preserve else Path("" if path.is_dir() else path.name)
    if path.is_dir():
        yield from ((f"{(top / inner).as_posix()}", path / inner) for inner in _walk(path))
    elif path.is_file():
        yield top.as_posix(), path
    else:
        raise ModelArchiverError(f"--extra-files: {path} is neither a file nor a directory")


def _kept(path: Path) -> Path:
    """A path's place in the archive: the path itself if it is relative and has no `..`, otherwise its last part."""
    normal = Path(os.path.normpath(path))
    if normal.is_absolute() or ".." in normal.parts:
        return Path(path.resolve().name)
    return normal


def _walk(directory: Path) -> Iterator[Path]:
    """Files below `directory`, relative to it, sorted. Links are followed: an archive holds the files themselves."""
    visited: set[Path] = set()
    for root, directories, files in os.walk(directory, followlinks=True):
        real = Path(root).resolve()
        if real in visited:
            raise ModelArchiverError(
                f"--extra-files: {root} leads back to {real}: the links form a cycle, or lead to one place twice"
            )
        visited.add(real)
        directories[:] = sorted(name for name in directories if name != _CACHE)
        for name in sorted(files):
            path = Path(root, name)
            if not path.is_file():
                raise ModelArchiverError(f"--extra-files: {path} is a broken link, or not a regular file")
            yield path.relative_to(directory)


def _within(path: Path, place: Path) -> bool:
    real, target = path.resolve(), place.resolve()
    return real == target or target in real.parents


_COPY_BYTES = 1 << 20
_ZIP_EARLIEST = (1980, 1, 1, 0, 0, 0)
_ZIP_LATEST = (2107, 12, 31, 23, 59, 58)

#: Names to files, or to the bytes of generated files.
Members = Mapping[str, "Path | bytes"]
Moment = tuple[int, int, int, int, int, int]


class Stamp:
    """The date of all files in an archive, UTC."""

    def __init__(self, epoch_s: int, moment: Moment) -> None:
        self.epoch_s = epoch_s
        self.moment = moment

    @classmethod
    def now(cls) -> Stamp:
        """Now, or SOURCE_DATE_EPOCH (reproducible-builds.org/specs/source-date-epoch): seconds since 1970.

        Raises ModelArchiverError.
        """
        text = os.environ.get("SOURCE_DATE_EPOCH")
        try:
            epoch_s = int(time.time()) if text is None else int(text)
            return cls(epoch_s, time.gmtime(epoch_s)[:6])
        except (ValueError, OverflowError, OSError):
            raise ModelArchiverError(f"SOURCE_DATE_EPOCH is {text!r}, but must be seconds since 1970") from None

    def __str__(self) -> str:
        """As `createdOn` of a manifest."""
        year, month, day, hour, minute, second = self.moment
        return f"{day:02d}/{month:02d}/{year:04d} {hour:02d}:{minute:02d}:{second:02d}"


def write_directory(members: Members, directory: Path) -> None:
    for name in sorted(members):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with _opened(members[name]) as (source, _, mode), path.open("xb") as target:
            shutil.copyfileobj(source, target, _COPY_BYTES)
            path.chmod(mode)


@contextmanager
def _opened(member: Path | bytes) -> Iterator[tuple[IO[bytes], int, int]]:
    """(content, bytes, mode): of the permissions only the owner's execute bit counts."""
    if isinstance(member, bytes):
        yield io.BytesIO(member), len(member), 0o644
        return
    with member.open("rb") as source:
        status = os.fstat(source.fileno())
        yield source, status.st_size, 0o755 if status.st_mode & stat.S_IXUSR else 0o644


def _mar(compression: int) -> Callable[[Members, Path, Stamp, str], None]:
    def write(members: Members, path: Path, stamp: Stamp, _name: str) -> None:
        date = min(max(stamp.moment, _ZIP_EARLIEST), _ZIP_LATEST)
        with zipfile.ZipFile(path, "x", compression) as package:
            for name in sorted(members):
                with _opened(members[name]) as (source, size, mode):
                    info = zipfile.ZipInfo(name, date)
                    info.compress_type, info.file_size, info.create_system = compression, size, 3
                    info.external_attr = (stat.S_IFREG | mode) << 16
                    with package.open(info, "w") as target:
                        shutil.copyfileobj(source, target, _COPY_BYTES)

    return write


def _tgz(members: Members, path: Path, stamp: Stamp, name: str) -> None:
    """Everything lies below the directory `name`."""
    with (
        path.open("xb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=stamp.epoch_s) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as package,
    ):
        for inner in sorted(members):
            with _opened(members[inner]) as (source, size, mode):
                entry = tarfile.TarInfo(f"{name}/{inner}")
                entry.size, entry.mode, entry.mtime = size, mode, stamp.epoch_s
                package.addfile(entry, source)


def _directory(members: Members, path: Path, _stamp: Stamp, _name: str) -> None:
    path.mkdir()
    write_directory(members, path)


#: --archive-format: (suffix of the file name, function that writes it).
FORMATS: Mapping[str, tuple[str, Callable[[Members, Path, Stamp, str], None]]] = {
    "default": (".mar", _mar(zipfile.ZIP_DEFLATED)),
    "zip-store": (".mar", _mar(zipfile.ZIP_STORED)),
    "tgz": (".tar.gz", _tgz),
    "no-archive": ("", _directory),
}


def pack(members: Members, target: Path, archive_format: str, stamp: Stamp, name: str) -> None:
    """Writes a temporary file and renames it to `target`, so that a failure keeps an existing file. Raises OSError,
    with the target's name where the system gives none (a full disk)."""
    _, write = FORMATS[archive_format]
    with tempfile.TemporaryDirectory(prefix=".archiving-", dir=target.parent) as work:
        fresh = Path(work, "new")
        try:
            write(members, fresh, stamp, name)
        except OSError as error:
            if error.filename is None and error.errno is not None:
                raise OSError(error.errno, error.strerror, str(target)) from error
            raise
        if target.is_dir() and not target.is_symlink():
            os.rename(target, Path(work, "old"))
        os.replace(fresh, target)
