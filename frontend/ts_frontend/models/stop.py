"""Ending a download, or an unpacking, from another thread: because its caller left, or because it takes too long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

from ts_frontend.tasks import owned

_T = TypeVar("_T")


class Stopped(Exception):
    """The work was ended; the text says why."""


class Stop:
    """Ends a download early: what waits for the network wakes up at once. The first `reason` counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reason = ""
        self._wake: Callable[[], None] | None = None

    def set(self, reason: str = "it was cancelled") -> None:
        with self._lock:
            self._reason = self._reason or reason
            wake = self._wake
        if wake is not None:
            wake()

    @property
    def reason(self) -> str:
        """Why it was ended, "" as long as it wasn't."""
        return self._reason

    def check(self) -> None:
        """Raises Stopped once it was ended."""
        if self._reason:
            raise Stopped(self._reason)

    def watch(self, wake: Callable[[], None]) -> None:
        """`wake()` lets the download go on from what it waits for from now on, also when it was ended before."""
        with self._lock:
            self._wake = wake
            ended = bool(self._reason)
        if ended:
            wake()

    @contextmanager
    def after(self, seconds: float, reason: str) -> Iterator[None]:
        """Ends what is done within the block when it takes longer."""
        timer = threading.Timer(seconds, self.set, (reason,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def waited(self, work: Callable[[], _T]) -> _T:
        """What `work` returns or raises. It runs in a thread of its own, which is left to itself when this ends first:
        Stopped, also at the process's end. For libraries whose waiting can't be ended."""
        outcome: Future[_T] = Future()

        def run() -> None:
            try:
                result = work()
            except BaseException as error:
                _settle(partial(outcome.set_exception, error))
            else:
                _settle(partial(outcome.set_result, result))

        threading.Thread(target=run, daemon=True).start()
        self.watch(lambda: _settle(partial(outcome.set_exception, Stopped(self._reason))))
        return outcome.result()


async def in_thread(work: Callable[[Stop], _T], unwanted: Callable[[_T], None]) -> _T:
    """What `work` gives, in a thread. A caller who is cancelled stops it and leaves when it has ended; what it gave all
    the same goes to `unwanted`. `work` looks at its Stop as often as it can."""
    stop = Stop()
    running = owned(asyncio.to_thread(work, stop))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait({running})
        if not running.cancelled() and running.exception() is None:
            await asyncio.to_thread(unwanted, running.result())
        raise


def _settle(settle: Callable[[], None]) -> None:
    """The first to say what came of it counts."""
    with suppress(InvalidStateError):
        settle()
