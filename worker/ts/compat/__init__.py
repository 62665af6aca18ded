"""Handlers written for other servers: an adapter each (`load(settings)`), and in `shims` the modules they import.

`shims` is last on a worker's path, so that an installed package of the same name wins.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

SHIMS = str(Path(__file__).with_name("shims"))


def add_shims() -> None:
    if SHIMS not in sys.path:
        sys.path.append(SHIMS)


def new_loop() -> asyncio.AbstractEventLoop:
    """An event loop of uvloop, as the servers of KServe and MLServer have it; asyncio's where uvloop is missing (a
    model's environment, Windows)."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
