"""Open files: how many connections a listener may have, so that clients leave the server the descriptors it needs.

Without a limit, with as many idle connections as the process may have open files, no worker can be started, no log be
opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ts_frontend.listeners.sockets import Listener

logger = logging.getLogger(__name__)

#: The soft limit that the server sets for itself, where the hard limit allows it, as the Java VM of TorchServe does.
OPEN_FILES_WANTED = 65_536
#: The open files of a server with the five usual listeners, without connections, and the limit below which it warns.
OPEN_FILES_OWN, OPEN_FILES_FEW = 64, 256
#: The part of the open files that connections may be.
CONNECTIONS_SHARE = 0.75
#: The part of the connections for each listener without inference; those with inference share the rest.
OTHERS_SHARE = 1 / 8
#: Seconds between two looks at the clients that wait for a connection.
LOOK_EVERY_S = 5.0


def raise_open_files() -> None:
    """Raises the soft limit of open files to OPEN_FILES_WANTED or to the hard limit. Workers inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files_max(soft, hard), hard))


def open_files_max(soft: int, hard: int) -> int:
    """Returns the number of files that a server may open when it starts with these limits."""
    soft, hard = (sys.maxsize if one == resource.RLIM_INFINITY else one for one in (soft, hard))
    return max(soft, min(hard, OPEN_FILES_WANTED))


def few_open_files(open_files: int | None = None) -> str:
    """A sentence for a limit (None: the present one) that leaves few or no connections; "" for others."""
    has = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if open_files is None else open_files
    if has == resource.RLIM_INFINITY or has >= OPEN_FILES_FEW:
        return ""
    return (
        f"{has} open files are allowed: the server itself needs {OPEN_FILES_OWN}, and more for each connection and "
        f"worker. ulimit -n {OPEN_FILES_WANTED} (LimitNOFILE= of systemd) allows them"
    )


def shared_out(listeners: Sequence[Listener], open_files: int | None = None) -> list[Listener]:
    """The listeners, each with a limit: its own, or its share of what `open_files` allow (None: the present limit)."""
    if open_files is None:
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        open_files = open_files_max(soft, soft)
    total = int(open_files * CONNECTIONS_SHARE)
    inference = [one.name for one in listeners if "inference" in one.name] or [one.name for one in listeners]
    others = int(total * OTHERS_SHARE)
    each = (total - others * (len(listeners) - len(inference))) // max(1, len(inference))
    return [
        one
        if one.limits.connections_max
        else replace(one, limits=replace(one.limits, connections_max=max(1, each if one.name in inference else others)))
        for one in listeners
    ]


async def report_full(
    name: str, connections_max: int, waiting: Callable[[], int], every_s: float = LOOK_EVERY_S
) -> None:
    """Logs once that clients of a full listener wait (`waiting`: their number), and again after a time without any."""
    before = told = 0
    while True:
        await asyncio.sleep(every_s)
        now = waiting()
        if now and before and not told:
            told = now
            logger.warning(
                "%s has %d connections, its share of the open files (ulimit -n); %d clients wait for one",
                name,
                connections_max,
                now,
            )
        before, told = now, told if now else 0
