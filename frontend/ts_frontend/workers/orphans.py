"""What process 1 owes the others of its container: whoever loses its parent becomes its child, and stays a zombie until
it is waited for."""

from __future__ import annotations

import asyncio
import logging
import os

import psutil

log = logging.getLogger(__name__)

PERIOD_S = 5.0

#: Process ids with their start times: an id alone may be used again.
Zombies = frozenset[tuple[int, float]]


def zombies() -> Zombies:
    """Children of this process that have ended and that nobody has waited for."""
    found = set()
    for child in psutil.Process().children():
        try:
            if child.status() == psutil.STATUS_ZOMBIE:
                found.add((child.pid, child.create_time()))
        except psutil.Error:
            continue
    return frozenset(found)


def reap(before: Zombies) -> Zombies:
    """Waits for the zombies that were there `before` already: the server's own children are waited for at once, by who
    started them. Those that are left are the next call's `before`. Blocking."""
    now = zombies()
    for pid, _ in now & before:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            pass
    return now - before


async def reap_orphans(period_s: float = PERIOD_S) -> None:
    """For ever; for a server that is process 1. A look that fails is logged, and the next one follows."""
    before: Zombies = frozenset()
    while True:
        await asyncio.sleep(period_s)
        try:
            before = await asyncio.to_thread(reap, before)
        except Exception:
            log.exception("Processes that lost their parent could not be waited for")
