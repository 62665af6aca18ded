"""Keys from outside: a JSON file in the form of key_file.json, or a directory with a file for each kind."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ts_frontend.authorization.keys import (
    BadKeys,
    Key,
    Keys,
    Kind,
    checked,
    kind_named,
    parse_key_file,
    parse_key_lines,
)

FILE_BYTES_MAX = 256 * 1024


def read_keys(path: Path) -> Keys:
    """The keys that are there now. Links are followed: a mounted secret changes by exchanging one.

    :raises BadKeys: they can't be read or used; the message names the file and no key.
    """
    if os.path.isdir(path):  # unlike Path.is_dir, it has no exceptions
        return _read_directory(path)
    try:
        return parse_key_file(_read(path))
    except BadKeys as error:
        raise BadKeys(f"{path}: {error}") from None


def _read_directory(path: Path) -> Keys:
    found = {}
    for name in sorted(_names(path)):
        kind = kind_named(name)
        if kind is not None and kind not in found:
            found[kind] = _read_lines(path / name, kind)
    try:
        return checked(found)
    except BadKeys as error:
        raise BadKeys(f"{path}: {error}; the files are named management, inference and API") from None


def _names(path: Path) -> list[str]:
    try:
        return os.listdir(path)
    except OSError as error:
        raise BadKeys(f"{path} can't be read: {error.strerror}") from None


def _read_lines(path: Path, kind: Kind) -> tuple[Key, ...]:
    try:
        return parse_key_lines(kind, _read(path))
    except BadKeys as error:
        raise BadKeys(f"{path}: {error}") from None


def _read(path: Path) -> str:
    """A small text file; a pipe of that name doesn't hold us up."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise BadKeys("it is no file")
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise BadKeys(f"it can't be read: {error.strerror}") from None
    if len(data) > FILE_BYTES_MAX:
        raise BadKeys(f"it is larger than {FILE_BYTES_MAX} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadKeys("it is not UTF-8 text") from None
