"""The directory a server unpacks models to: its own, and gone with it, also when the server was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "torchrelay-server-"
#: The prefix of a directory's name until its server has locked it.
NEW = "torchrelay-new-"
#: A directory that keeps that name for longer was left by a server that was killed in that moment.
NEW_S_MAX = 60.0

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@contextlib.contextmanager
def work_dir(parent: Path) -> Iterator[Path]:
    """A new directory in `parent`, deleted at the end.

    A server holds a lock on its directory as long as it lives, and the directory gets its name with the lock held: one
    of that name without a lock is nobody's, however young (`remove_abandoned`). Raises OSError.
    """
    new = Path(tempfile.mkdtemp(prefix=NEW, dir=parent))
    path = new.with_name(PREFIX + new.name.removeprefix(NEW))
    handle = os.open(new, _DIRECTORY_FLAGS)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        os.rename(new, path)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(handle)


def remove_abandoned(parent: Path) -> None:
    """Deletes this user's directories that no server holds any more: those of servers that were killed. Those that
    can't be deleted stay. Blocking."""
    for path in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            _remove_if_abandoned(path, 0.0)
    for path in parent.glob(f"{NEW}*"):
        with contextlib.suppress(OSError):
            _remove_if_abandoned(path, NEW_S_MAX)


def _remove_if_abandoned(path: Path, age_s_min: float) -> None:
    handle = os.open(path, _DIRECTORY_FLAGS)
    try:
        status = os.fstat(handle)
        if status.st_uid != os.geteuid() or time.time() - status.st_mtime < age_s_min:
            return
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(handle)
