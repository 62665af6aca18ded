"""The end of a server that doesn't end: whatever holds it up, a stop has a limit."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Callable

#: As of a program that failed by itself (sysexits.h, EX_SOFTWARE).
STATUS = 70


def end_within(limit_s: float) -> threading.Timer:
    """Ends the process in `limit_s` seconds at the latest, with all stacks on standard error and status 70, whatever
    its threads do; `cancel()` once it has stopped by itself. Workers end with their server."""

    def end() -> None:
        print(f"The server did not stop in {limit_s:g} s, and is ended. What its threads did:", file=sys.stderr)
        faulthandler.dump_traceback(all_threads=True)
        sys.stderr.flush()
        os._exit(STATUS)

    return _started(limit_s, end)


def leave_within(limit_s: float, status: int) -> threading.Timer:
    """Ends the process in `limit_s` seconds at the latest with the status it has anyhow: all is done, and threads that
    don't end are no reason to stay."""
    return _started(limit_s, lambda: os._exit(status))


def _started(limit_s: float, end: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    return timer
