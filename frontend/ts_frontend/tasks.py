"""Work that goes on when its caller leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any, TypeVar

from ts_frontend.errors import ServeError

log = logging.getLogger(__name__)

T = TypeVar("T")


class Tasks:
    """Everything that has been begun and hasn't ended."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def background(self, work: Awaitable[Any]) -> None:
        """Runs on; what fails is logged."""
        self._begin(work).add_done_callback(_log_failure)

    async def detached(self, work: Awaitable[T]) -> T:
        """Waits for `work`, which goes on when the caller leaves."""
        task = self._begin(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_log_failure)
            raise

    def cancel(self) -> None:
        """Ends all of it."""
        for task in list(self._tasks):
            task.cancel()

    def _begin(self, work: Awaitable[T]) -> asyncio.Task[T]:
        async def run() -> T:
            return await work

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _log_failure(task: asyncio.Task[Any]) -> None:
    if task.cancelled():
        return
    error = task.exception()
    if isinstance(error, ServeError):
        log.error("%s", error.message)
    elif error is not None:
        log.error("background work failed", exc_info=error)
