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
#: A directory so young may be one that its server hasn't locked yet.
AGE_S_MIN = 60.0

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@contextlib.contextmanager
def work_dir(parent: Path) -> Iterator[Path]:
    """A new directory in `parent`, deleted at the end; those that killed servers left there are deleted first.

    A server holds a lock on its directory as long as it lives. Blocking; raises OSError.
    """
    remove_abandoned(parent)
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    handle = os.open(path, _FLAGS)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(handle)


def remove_abandoned(parent: Path) -> None:
    """Deletes this user's directories that no server holds any more. What can't be deleted stays."""
    for path in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    handle = os.open(path, _FLAGS)
    try:
        status = os.fstat(handle)
        if status.st_uid != os.geteuid() or time.time() - status.st_mtime < AGE_S_MIN:
            return
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(handle)
