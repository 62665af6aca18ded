"""Tasks: every background task of the server starts here, so that none fails unseen.

`owned`: work that its starter awaits; `watched`: work that nobody awaits; `kept`: loops that run as long as the server.
`Tasks` holds work that goes on when its caller is cancelled: the shutdown cancels loads, and waits for the rest.
`in_thread`: work that blocks, with a `Stop` that ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from ts_frontend.errors import Draining, ServeError, WorkerStartFailed

log = logging.getLogger(__name__)

ENDING = "The server is shutting down"
T = TypeVar("T")

#: The pause before a loop that failed runs again; it doubles with each failure in a row.
RESTART_S, RESTART_S_MAX = 1.0, 60.0


def owned(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task whose starter awaits it and handles its failure."""
    return asyncio.create_task(work)


async def each(items: AsyncIterator[T], take: Callable[[T], Awaitable[None]]) -> None:
    """Awaits `take` for each item, and closes an asynchronous generator at the end, however it comes. Compiled modules
    use this: in a compiled coroutine, an `await` in `finally` raises the exception that the caller is handling."""
    try:
        async for item in items:
            await take(item)
            del item  # the next one may be long in coming
    finally:
        close = getattr(items, "aclose", None)
        if close is not None:
            await close()


def watched(work: Coroutine[Any, Any, T], what: str) -> asyncio.Task[T]:
    """A task that nobody awaits: its failure is logged with the traceback. `what`: the subject of that log line."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: _log_end(done, what))
    return task


def kept(loop: Callable[[], Awaitable[None]], what: str, restart_s: float = RESTART_S) -> asyncio.Task[None]:
    """A task that runs `loop` until it returns or is cancelled. One that fails is logged with the traceback, and runs
    again after `restart_s` seconds, twice as long after each further failure up to RESTART_S_MAX."""
    return watched(_keep(loop, what, restart_s), what)


async def _keep(loop: Callable[[], Awaitable[None]], what: str, restart_s: float) -> None:
    pause_s = restart_s
    while True:
        begun_s = time.monotonic()
        try:
            return await loop()
        except Exception:
            if time.monotonic() - begun_s > RESTART_S_MAX:
                pause_s = restart_s
            log.exception("%s failed and goes on in %g s", what, pause_s)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, RESTART_S_MAX)


def _log_end(task: asyncio.Task[Any], what: str) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s failed", what, exc_info=error)


def current_task() -> asyncio.Task[None]:
    """The task of this request: each has one. Looking up the running loop costs a system call."""
    task: asyncio.Task[None] | None = asyncio.current_task()
    assert task is not None
    return task


def uncancel() -> None:
    """Undoes a cancellation by the deadline, so that the task can still send its last messages."""
    current_task().uncancel()


class Expiry:
    """Cancels a task when its time is over. The caller clears `task`: a cancelled task keeps its exception with the
    traceback's frames, which must not refer back to the task. For work that may fail with a request's body in its
    frames, instead of `asyncio.wait_for`, whose frame refers to the task with the exception on Python 3.11."""

    __slots__ = ("passed", "task")

    def __init__(self, task: asyncio.Task[None]) -> None:
        self.task: asyncio.Task[None] | None = task
        self.passed = False

    def expire(self) -> None:
        if self.task is not None and not self.passed:
            self.passed = True
            self.task.cancel()


async def side_by_side(work: Sequence[Coroutine[Any, Any, T]], at_once_max: int) -> list[T]:
    """Runs all of `work`, at most `at_once_max` at a time and begun in order; the results in order. A failure, or the
    cancellation of the caller, cancels the rest."""
    turns = asyncio.Semaphore(at_once_max)

    async def one(each: Coroutine[Any, Any, T]) -> T:
        try:
            async with turns:
                return await each
        finally:
            each.close()  # if it never began

    tasks = [owned(one(each)) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        raise
    finally:
        for each in work:
            each.close()  # a task cancelled before it began doesn't close its coroutine


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Awaits work that must not be cancelled half-way, such as a removal; a cancelled caller ends after it."""
    task = owned(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


@contextlib.asynccontextmanager
async def undone_on_failure() -> AsyncIterator[contextlib.AsyncExitStack]:
    """A stack of clean-ups, run in reverse and each to its end if the block fails; dropped if it succeeds."""
    stack = contextlib.AsyncExitStack()
    try:
        yield stack
    except BaseException:
        await to_its_end(stack.aclose())
        raise


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yields the sources' values as they come, until all have ended; a failure, or leaving early, closes all."""
    waiting: dict[asyncio.Task[T], AsyncGenerator[T, None]] = {}
    try:
        if len(sources) == 1:
            async for value in sources[0]:
                yield value
            return
        for source in sources:
            waiting[owned(_next(source))] = source
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                source = waiting.pop(task)
                try:
                    value = task.result()
                except StopAsyncIteration:
                    continue
                yield value
                waiting[owned(_next(source))] = source
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for source in sources:
            await source.aclose()


async def _next(source: AsyncGenerator[T, None]) -> T:
    return await anext(source)


class Tasks:
    """The running tasks of the server that outlive their callers."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loads: set[asyncio.Task[Any]] = set()
        self._ending = False

    def background(self, work: Awaitable[Any]) -> None:
        """Begins work that nobody waits for; its failure is logged."""
        self._begin(work).add_done_callback(_log_failure)

    async def detached(self, work: Awaitable[T]) -> T:
        """Awaits `work`, which goes on if the caller is cancelled."""
        return await self._waited(self._begin(work))

    async def load(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits a load, which goes on if the caller is cancelled. Raises Draining at the shutdown."""
        if self._ending:
            work.close()
            raise Draining(ENDING)
        task = self._begin(work)
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)
        return await self._waited(task)

    def end_loads(self) -> None:
        """Cancels the loads that run, and refuses new ones."""
        self._ending = True
        for task in self._loads:
            task.cancel()

    async def close(self, grace_s: float) -> None:
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
        finally:
            del task  # its exception goes through this frame

    def _begin(self, work: Awaitable[T]) -> asyncio.Task[T]:
        async def run() -> T:
            return await work

        task = owned(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _log_failure(task: asyncio.Task[Any]) -> None:
    if task.cancelled():
        return
    error = task.exception()
    if isinstance(error, ServeError):
        asked_for = isinstance(error, WorkerStartFailed) and error.asked_for
        log.log(logging.INFO if asked_for else logging.ERROR, "%s", error.message)
    elif error is not None:
        log.error("background work failed", exc_info=error)


class Notifier:
    """`notify()` wakes all present waiters of `wait()`; later waiters wait for the next one."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def notify(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)


class Stopped(Exception):
    """The work was ended; the text says why."""


class Stop:
    """Cancels a download: a thread that waits for the network wakes up at once. The first `reason` counts."""

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
        """The reason why it was ended, "" as long as it wasn't."""
        return self._reason

    def check(self) -> None:
        """Raises Stopped if it was set."""
        if self._reason:
            raise Stopped(self._reason)

    def watch(self, wake: Callable[[], None]) -> None:
        """Sets the function that interrupts the download's wait; calls it at once if that was already cancelled."""
        with self._lock:
            self._wake = wake
            ended = bool(self._reason)
        if ended:
            wake()

    @contextmanager
    def after(self, seconds: float, reason: str) -> Iterator[None]:
        """Ends the block's work when it takes longer than `seconds`."""
        timer = threading.Timer(seconds, self.set, (reason,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def waited(self, work: Callable[[], T]) -> T:
        """Returns the result of `work` or raises its error, for libraries whose waits can't be interrupted. It runs in
        a daemon thread of its own: when this is set first, the caller gets Stopped and the thread goes on alone."""
        outcome: Future[T] = Future()

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


async def in_thread(work: Callable[[Stop], T], unwanted: Callable[[T], None]) -> T:
    """Returns the result of `work`, run in a thread. If the caller is cancelled, `work` is stopped and awaited, and a
    result that it still returns goes to `unwanted`. `work` should check its Stop often."""
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
    """Settles a future, of which only the first outcome counts."""
    with suppress(InvalidStateError):
        settle()
