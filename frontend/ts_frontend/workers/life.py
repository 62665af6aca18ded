"""Where a worker is in its life, and how a life that doesn't begin is reported."""

from __future__ import annotations

import asyncio
from enum import Enum


class Life(Enum):
    """Where a worker is in its life. BUSY is READY with something running, told apart by `Worker.status`."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


NEXT_LIFE: dict[Life, frozenset[Life]] = {
    Life.STARTING: frozenset({Life.LOADING, Life.FAILED, Life.STOPPED}),
    Life.LOADING: frozenset({Life.READY, Life.FAILED, Life.STOPPED}),
    Life.READY: frozenset({Life.DRAINING, Life.FAILED, Life.STOPPED}),
    Life.DRAINING: frozenset({Life.STOPPED, Life.FAILED}),
    Life.STOPPED: frozenset(),
    Life.FAILED: frozenset(),
}


class StartFailed(Exception):
    """The process didn't start or didn't load its model. `code`: HTTP status; `tail`: its last lines."""

    def __init__(self, message: str, code: int = 500, tail: list[str] | None = None) -> None:
        super().__init__(message)
        self.message, self.code, self.tail = message, code, tail or []


def _look_at(done: asyncio.Future[None]) -> None:
    if not done.cancelled():
        done.exception()


def unattended_future() -> asyncio.Future[None]:
    """A future whose exception needn't be looked at: whoever waited for it may have left."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.add_done_callback(_look_at)
    return future
