"""Work that goes on when its caller leaves; loads end with the server, the rest may take its time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, TypeVar

from ts_frontend.errors import Draining, ServeError

log = logging.getLogger(__name__)

ENDING = "The server is shutting down"
T = TypeVar("T")


async def side_by_side(work: Sequence[Coroutine[Any, Any, T]], at_once_max: int) -> list[T]:
    """Does all of it, at most so many at a time, begun in order; the results in order. What fails, or a caller who is
    cancelled, ends the rest; nothing of it runs on."""
    turns = asyncio.Semaphore(at_once_max)

    async def one(each: Coroutine[Any, Any, T]) -> T:
        try:
            async with turns:
                return await each
        finally:
            each.close()  # in case that its turn never came

    tasks = [asyncio.create_task(one(each)) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        raise
    finally:
        for each in work:
            each.close()  # a task that was cancelled before it began closes nothing


class Tasks:
    """Everything that has been begun and hasn't ended."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loads: set[asyncio.Task[Any]] = set()
        self._ending = False

    def background(self, work: Awaitable[Any]) -> None:
        """Runs on; what fails is logged."""
        self._begin(work).add_done_callback(_log_failure)

    async def detached(self, work: Awaitable[T]) -> T:
        """Waits for `work`, which goes on when the caller leaves."""
        return await self._waited(self._begin(work))

    async def load(self, work: Coroutine[Any, Any, T]) -> T:
        """The same for what isn't waited for when the server ends: Draining."""
        if self._ending:
            work.close()
            raise Draining(ENDING)
        task = self._begin(work)
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)
        return await self._waited(task)

    def end_loads(self) -> None:
        """No load that runs is finished, and no new one begins."""
        self._ending = True
        for task in self._loads:
            task.cancel()

    async def close(self, grace_s: float) -> None:
        """Ends all of it; loads may take `grace_s` to clean up."""
        self.end_loads()
        if self._loads:
            await asyncio.wait(self._loads, timeout=grace_s)
        for task in self._tasks:
            task.cancel()

    async def _waited(self, task: asyncio.Task[T]) -> T:
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise Draining(ENDING) from None
            task.add_done_callback(_log_failure)
            raise

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
