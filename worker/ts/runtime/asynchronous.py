"""Runs async handlers: every batch is a task of one event loop, which also reads the socket."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from ts.protocol.frames import Feed
from ts.protocol.shared import Progress
from ts.runtime.handlers import Loaded, waits_for_a_step
from ts.runtime.jobs import Batch
from ts.runtime.running import PREDICTION_FAILED, Opened, Running, Together
from ts.runtime.worker import Link


class AsyncRunner:
    """The main loop of a worker whose handler is async."""

    def __init__(self, link: Link, loaded: Loaded, opened: Opened, progress: Progress, decode: bool) -> None:
        assert loaded.loop is not None
        self._link, self._ledger, self._loop = link, link.ledger, loaded.loop
        self.entry, self._context = loaded.entry, loaded.context
        self._opened = opened
        self._begins_later = waits_for_a_step(loaded.entry)
        self._progress, self._decode = progress, decode
        self._tasks: set[asyncio.Task[None]] = set()
        self._flush_due = False
        self._writing = False
        self._end: asyncio.Future[None] = self._loop.create_future()

    def run(self) -> None:
        """Runs until the frontend sends Stop and everything is answered. SystemExit of a handler passes through."""
        self._link.waits_for_credit = False
        self._link.on_backlog = lambda: self._loop.call_soon_threadsafe(self._write_later)
        self._link.on_taken = lambda: self._loop.call_soon(self._take)
        self._loop.add_reader(self._link.fileno(), self._readable)
        self._loop.call_soon(self._take)
        self._loop.run_until_complete(self._end)

    def _readable(self) -> None:
        self._link.receive(wait=False)
        self._take()

    def _take(self) -> None:
        """Starts the queued batches, and checks whether all work is done."""
        ledger = self._ledger
        while ledger.queue:
            batch = ledger.queue.popleft()
            if ledger.start(batch):
                task = self._loop.create_task(self._run(batch))
                self._tasks.add(task)
                task.add_done_callback(self._done)
        self._flush_soon()
        if ledger.stopping and not ledger.jobs and not self._tasks and not self._end.done():
            self._end.set_result(None)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        # Faults of handlers are answers; one of the runtime ends the worker, so that the callers are told. SystemExit,
        # which a handler may raise, has ended the loop
        if error is not None and not issubclass(type(error), SystemExit) and not self._end.done():
            self._end.set_exception(error)
        else:
            self._take()

    # --- writing

    def _flush_soon(self) -> None:
        if self._ledger.outbox and not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        self._link.flush()

    def _write_later(self) -> None:
        if not self._writing:
            self._writing = True
            self._loop.add_writer(self._link.fileno(), self._writable)

    def _writable(self) -> None:
        self._writing = False
        self._loop.remove_writer(self._link.fileno())
        self._link.flush()

    # --- one batch

    async def _run(self, batch: Batch) -> None:
        context = self._context.fork()
        running = self._opened(batch, context)
        changed: asyncio.Event | None = None
        task = asyncio.current_task()

        def on_change() -> None:
            if changed is not None:
                changed.set()
            if batch.cancelled and task is not None:
                task.cancel()

        async def waiter() -> None:
            nonlocal changed
            changed = changed or asyncio.Event()  # few handlers wait
            changed.clear()
            self._flush_soon()
            if batch.stalled and not batch.cancelled:
                await changed.wait()

        batch.on_change, running.waiter = on_change, waiter
        try:
            if not batch.cancelled:
                await self._handle(running)
        except SystemExit:
            raise
        except BaseException as error:
            running.failed(error)
        finally:
            batch.on_change = None
            _end(batch, running)
            self._flush_soon()

    async def _handle(self, running: Running) -> None:
        if self._link.on_turn is not None:
            self._link.on_turn(running.batch)
        rows = running.rows(self._decode)
        if not rows:
            return
        begins_later, batch_id = self._begins_later, running.batch.batch_id
        if not begins_later:
            self._progress.begin(batch_id)
        result = self.entry(rows, running.context)
        if inspect.isawaitable(result):
            if begins_later:
                begins_later = False
                self._progress.begin(batch_id)
            result = await result
        if inspect.isasyncgen(result):
            await self._iterate(running, result, begins_later)
        elif inspect.isgenerator(result):
            await self._iterate(running, _stepwise(result), begins_later)
        else:
            running.finish(result)

    async def _iterate(self, running: Running, generator: Any, begins: bool) -> None:
        """Takes the pieces of the generator. `begins`: its first step is the first piece of the handler that runs."""
        try:
            if begins:
                self._progress.begin(running.batch.batch_id)
            async for value in generator:
                if not (await self._together(running, value) if type(value) is Together else running.step(value)):
                    return
                self._flush_soon()
                await asyncio.sleep(0)  # a generator that never waits lets the others have their turn too
                await running.drain()
            running.finish_stream(None)
        finally:
            await generator.aclose()

    async def _together(self, running: Running, value: Together) -> bool:
        """`step` with each of the pieces, which share a write unless their reader is slow."""
        for index, piece in value.pieces:
            if not running.step_of(index, piece):
                return False
            if running.batch.stalled:
                await running.drain()
        return True


def _end(batch: Batch, running: Running) -> None:
    unanswered = False
    for job in batch.jobs:
        unanswered |= not job.over
        if job.on_feed is not None:
            job.on_feed(Feed(job.job_id, (), last=True))
    if unanswered:
        running.fail(PREDICTION_FAILED)


async def _stepwise(generator: Any) -> Any:
    for value in generator:
        yield value
