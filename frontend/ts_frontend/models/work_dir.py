"""The directory to which a server unpacks models; the next server removes that of a killed one."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "torchrelay-server-"
#: The prefix of a directory's name until its server has locked it.
NEW = "torchrelay-new-"
#: Seconds after which a directory that still has this name belongs to a killed server.
NEW_S_MAX = 60.0
#: The names of one line of the log.
NAMES_SHOWN_MAX = 10

log = logging.getLogger(__name__)

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@contextlib.contextmanager
def work_dir(parent: Path) -> Iterator[Path]:
    """A new directory in `parent`, deleted at the end.

    A server holds a lock on its directory for its whole life, and gives the directory its name after taking the lock: a
    directory of that name without a lock is abandoned (`remove_abandoned`). Raises OSError.
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
    """Deletes this user's directories that no server has locked, those of killed servers, and logs their names.
    Directories that can't be deleted stay. Blocking."""
    removed = []
    for prefix, age_s_min in ((PREFIX, 0.0), (NEW, NEW_S_MAX)):
        for path in sorted(parent.glob(f"{prefix}*")):
            with contextlib.suppress(OSError):
                if _remove_if_abandoned(path, age_s_min):
                    removed.append(path.name)
    if removed:
        more = f" and {len(removed) - NAMES_SHOWN_MAX} more" if len(removed) > NAMES_SHOWN_MAX else ""
        log.info("Removed from %s what killed servers left: %s%s", parent, ", ".join(removed[:NAMES_SHOWN_MAX]), more)


def _remove_if_abandoned(path: Path, age_s_min: float) -> bool:
    """Whether it was abandoned, and is gone."""
    handle = os.open(path, _DIRECTORY_FLAGS)
    try:
        status = os.fstat(handle)
        if status.st_uid != os.geteuid() or time.time() - status.st_mtime < age_s_min:
            return False
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
        return not path.exists()
    finally:
        os.close(handle)
