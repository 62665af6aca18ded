"""A worker's life in a thread of the server's process, for development: what `ts.runtime.main` is in a process."""

from __future__ import annotations

import mmap
import os
import sys
from typing import Any

from ts.runtime.jobs import Ledger
from ts.runtime.main import PROGRESS_BYTES, answer
from ts.runtime.worker import Link


def live_inside(socket_fd: int, progress_fd: int) -> int:
    """Loads and answers until Stop or the socket's end, then closes both descriptors. The status that a process would
    end with."""
    progress = mmap.mmap(progress_fd, PROGRESS_BYTES)
    os.close(progress_fd)
    link = Link(socket_fd, leave=sys.exit)
    try:
        return answer(link, progress, Ledger, before_load=_forget_modules)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    finally:
        link.close()


def _forget_modules(settings: dict[str, Any]) -> None:
    """What was imported from the model's folder is imported again: it may have been edited since."""
    folder = os.path.join(os.path.realpath(settings["model_dir"]), "")
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and os.path.realpath(file).startswith(folder):
            del sys.modules[name]
