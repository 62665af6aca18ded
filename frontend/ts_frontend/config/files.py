"""Files that settings name, and files of models: read at once, whatever lies at their path, and replaced at once.

Opening a named pipe waits until somebody writes to it, and a device may never end: both would hold the thread that
reads them for ever. Only regular files are read, also behind links, up to a size that no such file needs; /dev/null is
an empty one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

FILE_BYTES_MAX = 16 << 20
#: The mode of log files: they hold what clients sent, and a group may collect them.
LOG_MODE = 0o640
#: A path may become a pipe between the look at it and its opening.
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def read_file(path: Path, bytes_max: int = FILE_BYTES_MAX) -> bytes:
    """Returns the content of a regular file. Raises OSError, also for anything else, whose `strerror` says what it is,
    and for a file of more than `bytes_max` bytes."""
    data = read_beginning(path, bytes_max + 1)
    if len(data) > bytes_max:
        raise OSError(errno.EFBIG, f"larger than {bytes_max} bytes", str(path))
    return data


def read_beginning(path: Path, bytes_max: int) -> bytes:
    """Returns the first bytes of a regular file, or all of a shorter one. Raises OSError, also for anything else."""
    _check(path, path.stat())
    with open(os.open(path, _FLAGS), "rb") as file:
        _check(path, os.fstat(file.fileno()))
        return file.read(bytes_max)


def read_text(path: Path, bytes_max: int = FILE_BYTES_MAX) -> str:
    """The same as text in UTF-8. Raises UnicodeDecodeError."""
    return read_file(path, bytes_max).decode()


def _check(path: Path, found: os.stat_result) -> None:
    mode = found.st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode) and not os.path.samestat(found, os.stat(os.devnull)):
        raise OSError(errno.EINVAL, f"{_KINDS.get(stat.S_IFMT(mode), 'something')}, not a regular file", str(path))


def replace_file(path: Path, data: bytes, mode: int) -> None:
    """Writes a file so that readers find either its old content or the new one. Raises OSError."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
        with open(os.open(temporary, flags, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def sync_directory(directory: Path) -> None:
    """Has a directory's new names survive a crash."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
