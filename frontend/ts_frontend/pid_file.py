"""`.model_server.pid` in the temporary directory: which process is the server, as TorchServe's tools look for it.

The server holds a lock on the file as long as it lives, so that the file's word never has to be trusted: a file without
a lock was left behind by a server that died, whoever has its process id now.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from ts_frontend.errors import ServeError

_FLAGS = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


class PidFileError(ServeError):
    """The file isn't ours to use, or another server holds it; the message says what to do."""


class AlreadyRunning(PidFileError):
    def __init__(self) -> None:
        super().__init__("TorchServe is already running, please use torchserve --stop to stop TorchServe.")


def pid_path(work_dir: Path | None = None) -> Path:
    """Where it is. Raises PidFileError when there is no directory that can be written."""
    try:
        return (work_dir or Path(tempfile.gettempdir())) / ".model_server.pid"
    except FileNotFoundError as error:
        raise PidFileError(f"{error.strerror}. Set TMPDIR to a directory that can be written.") from None


def running_server(path: Path) -> psutil.Process | None:
    """The server that holds the file; None when there is none. A process object keeps its identity when ids are reused.

    :raises PidFileError: the file is a link, or another user's.
    """
    handle = _opened(path)
    if handle is None:
        return None
    with contextlib.closing(os.fdopen(handle)) as file:
        text = file.read().strip()
        if not _held(handle) or not text.isascii() or not text.isdigit():
            return None
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(text))
            return process if _held(handle) else None
    return None


def remove_orphan(path: Path) -> bool:
    """Remove the file when no server holds it. True when there was one."""
    handle = _opened(path)
    if handle is None:
        return False
    try:
        if _locked(handle):
            path.unlink(missing_ok=True)
            return True
        return False
    finally:
        os.close(handle)


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[None]:
    """This process is the server as long as the block runs; the file has its id, mode 600.

    :raises AlreadyRunning: another server is.
    :raises PidFileError: the file is a link, or another user's.
    """
    handle = _claim(path)
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _claim(path: Path) -> int:
    """A locked descriptor of the file at `path`."""
    while True:
        handle = _opened(path, os.O_CREAT)
        assert handle is not None
        if not _locked(handle):
            os.close(handle)
            raise AlreadyRunning
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.lstat(path)):
                return handle
        os.close(handle)  # removed between open and lock


def _opened(path: Path, more: int = 0) -> int | None:
    """The open file, checked to be ours; None when it isn't there."""
    try:
        handle = os.open(path, _FLAGS | more, 0o600)
    except FileNotFoundError:
        return None
    except OSError as error:
        what = "is a link" if error.errno == errno.ELOOP else f"can't be opened: {error.strerror}"
        raise PidFileError(f"{path} {what}. Remove it, or set TMPDIR to a directory of your own.") from None
    if os.fstat(handle).st_uid != os.getuid():
        os.close(handle)
        raise PidFileError(f"{path} belongs to another user. Set TMPDIR to a directory of your own.")
    return handle


def _locked(handle: int) -> bool:
    """Take the lock; False when a server has it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _held(handle: int) -> bool:
    """Does another process hold the lock? Asks without keeping it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(handle, fcntl.LOCK_UN)
    return False
