"""key_file.json: the file with the keys that a server has made, in its start directory.

The server holds a lock on the file as long as it runs, so that a second server in the same directory doesn't remove the
first one's keys, and a stale file can be recognised.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ts_frontend.config.keys import BadKeys, Key, KeyKind, Keys, checked, kind_named, parse_key_file, parse_key_lines
from ts_frontend.errors import ServeError

NAME = "key_file.json"
_NEW = ".key_file.json.new"
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW


class KeyFileError(ServeError):
    """The file can't be written; the message names the remedy."""

    remedy = "Make the directory writable, or give keys with `token_path`."


class KeyFile:
    """The file of one server in one directory."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME
        self._handle: int | None = None

    def write(self, text: str) -> None:
        """Replaces the file by `text` atomically; only its owner can read it.

        :raises KeyFileError: another server's keys are there, or it can't be written.
        """
        try:
            with _alone(self.path.parent):
                if not self._ours() and held(self.path):
                    raise KeyFileError(
                        f"{self.path} has the keys of another server that runs. Start this one in another directory, "
                        "or give it keys of its own (token_path)"
                    )
                self._replace(text)
        except OSError as error:
            raise KeyFileError(
                f"{self.path} can't be written: {error.strerror}. Start in a directory that can be written to, give "
                "keys with token_path, or do without: --disable-token-auth"
            ) from None

    def _replace(self, text: str) -> None:
        new = self.path.with_name(_NEW)
        new.unlink(missing_ok=True)
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fchmod(handle, 0o600)
            os.write(handle, text.encode("ascii"))
            os.fsync(handle)
            os.replace(new, self.path)
        except BaseException:
            os.close(handle)
            new.unlink(missing_ok=True)
            raise
        self._close()
        self._handle = handle

    def _ours(self) -> bool:
        """Whether the file at the path is the one that this process wrote."""
        try:
            return self._handle is not None and os.path.samestat(os.fstat(self._handle), os.lstat(self.path))
        except OSError:
            return False

    def remove(self) -> None:
        """Deletes the file, since its keys are no longer valid; another server's file stays."""
        with contextlib.suppress(OSError):
            if self._ours():
                self.path.unlink()
        self._close()

    def _close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def held(path: Path) -> bool:
    """Whether a running server has locked this file."""
    try:
        handle = os.open(path, _READ)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def is_left_behind(path: Path) -> bool:
    """Whether there is such a file whose server has ended."""
    return os.path.lexists(path) and not held(path)


def remove_left_behind(directory: Path) -> None:
    """Deletes a key_file.json whose server has ended."""
    with contextlib.suppress(OSError), _alone(directory):
        if is_left_behind(directory / NAME):
            (directory / NAME).unlink()


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Lets one process at a time check and replace the file of a directory."""
    handle = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


FILE_BYTES_MAX = 256 * 1024


def read_keys(path: Path) -> Keys:
    """The keys in the file or directory. Links are followed: a mounted secret is updated by replacing a link.

    :raises BadKeys: they can't be read or used; the message names the file and no key.
    """
    if os.path.isdir(path):  # unlike Path.is_dir, it never raises
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


def _read_lines(path: Path, kind: KeyKind) -> tuple[Key, ...]:
    try:
        return parse_key_lines(kind, _read(path))
    except BadKeys as error:
        raise BadKeys(f"{path}: {error}") from None


def _read(path: Path) -> str:
    """Reads a small text file; doesn't block on a pipe of that name."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise BadKeys("it is not a file")
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise BadKeys(f"it can't be read: {error.strerror}") from None
    if len(data) > FILE_BYTES_MAX:
        raise BadKeys(f"it is larger than {FILE_BYTES_MAX} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadKeys("it is not UTF-8 text") from None
