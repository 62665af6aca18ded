"""Where a worker is in its life, and how a life that doesn't begin is reported."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
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
    """The process didn't start or didn't load its model. `code`: HTTP status; `tail`: its last lines; `cause`: the
    message without what every such failure has in common; `traceback`: of the handler's exception, which nobody has
    logged yet; `died`: the process was killed, so that another may load what this one didn't."""

    def __init__(
        self,
        message: str,
        code: int = 500,
        tail: Sequence[str] = (),
        *,
        cause: str = "",
        traceback: str = "",
        died: bool = False,
    ) -> None:
        super().__init__(message)
        self.message, self.code, self.tail = message, code, list(tail)
        self.cause, self.traceback, self.died = cause or message, traceback, died


def _look_at(done: asyncio.Future[None]) -> None:
    if not done.cancelled():
        done.exception()


def unattended_future() -> asyncio.Future[None]:
    """A future whose exception needn't be looked at: whoever waited for it may have left."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.add_done_callback(_look_at)
    return future
