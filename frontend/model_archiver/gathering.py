"""Which file goes where in an archive: the options' paths resolved to {name in the archive: file on disk}."""

from __future__ import annotations

import difflib
import filecmp
import glob
import logging
import os
import platform
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from model_archiver.model_archiver_config import ModelArchiverConfig
from model_archiver.model_archiver_error import MissingFile, ModelArchiverError
from ts_frontend.models.archive import parse_config

_log = logging.getLogger(__name__)
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
    """The files of an archive by their names in it ('/' between directories). `reserved`: the directory of its
    manifest."""

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
