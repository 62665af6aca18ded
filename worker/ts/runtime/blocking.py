"""Runs handlers that return or yield: calls one after another in this thread, generators step by step in turns."""

from __future__ import annotations

import inspect
from collections.abc import Generator
from time import perf_counter
from typing import Any, Final, TypeAlias, cast

from ts.protocol.shared import Progress
from ts.runtime.handlers import Loaded, waits_for_a_step
from ts.runtime.jobs import Batch
from ts.runtime.running import PREDICTION_FAILED, Opened, Running
from ts.runtime.worker import Link

QUICK_CALL_S = 0.0002
HOLD_BACK_REPLIES_MAX: Final = 16
HOLD_BACK_S_MAX = 0.001
UNREAD_S_MAX = 0.0005

_Generator: TypeAlias = "Generator[Any, Any, Any]"


class BlockingRunner:
    """The main loop of a worker whose handler isn't async.

    If the handler is a generator, each batch has its own context, and several run in turns.
    """

    def __init__(self, link: Link, loaded: Loaded, opened: Opened, progress: Progress, decode: bool) -> None:
        self._link, self._ledger = link, link.ledger
        self.entry, self._context = loaded.entry, loaded.context
        self._opened = opened
        self._forks = loaded.kind == "generator"
        self._begins_later = self._forks and waits_for_a_step(loaded.entry)
        self._progress, self._decode = progress, decode
        self._active: list[tuple[Running, _Generator]] = []
        self._unbegun: set[Running] = set()  # of those, the ones that have had no step yet
        self._mean_s = 1.0
        self._flushed_s = self._read_s = 0.0
        link.holds_back = True

    def run(self) -> None:
        """Runs until the frontend sends Stop and everything is answered. SystemExit of a handler passes through."""
        link, ledger = self._link, self._ledger
        while True:
            if ledger.queue and (self._forks or not self._active):
                self._start(ledger.queue.popleft())
            elif self._active:
                self._round()
            elif ledger.stopping and not ledger.jobs:
                return
            else:
                if ledger.outbox:
                    link.flush()
                link.receive(wait=True)
                self._flushed_s = self._read_s = perf_counter()

    def _start(self, batch: Batch) -> None:
        if not self._ledger.start(batch):
            return
        context = self._context.fork() if self._forks else self._context
        running = self._opened(batch, context)
        self._before_call()
        try:
            if self._link.on_turn is not None:
                self._link.on_turn(batch)
            rows = running.rows(self._decode)
            if rows:
                if self._begins_later:
                    self._unbegun.add(running)
                    result = self._call(self.entry, (rows, context))
                else:
                    result = self._call(self.entry, (rows, context), batch.batch_id)
                if type(result) is list:  # the usual result
                    running.finish(result)
                else:
                    self._take(running, result)
        except SystemExit:
            raise
        except BaseException as error:
            running.failed(error)

    def _take(self, running: Running, result: Any) -> None:
        """Takes the result of the handler: the answers, or a generator of them."""
        if inspect.isgenerator(result):
            self._active.append((running, cast(_Generator, result)))
        elif inspect.iscoroutine(result) or inspect.isasyncgen(result):
            if inspect.iscoroutine(result):
                result.close()  # else Python warns later that nobody awaited it
            raise TypeError("handle returned a coroutine: declare it (not only what it calls) with async def")
        else:
            running.finish(result)

    def _call(self, function: Any, arguments: tuple[Any, ...] = (), begins: int = 0) -> Any:
        """Runs a piece of the user's code, timed and watched by the other thread. `begins`: the batch that begins
        with it, which is recorded immediately before the call."""
        link = self._link
        begun_s = perf_counter()
        link.enter()
        try:
            if begins:
                self._progress.begin(begins)
            return function(*arguments)
        finally:
            link.leave()
            self._mean_s += (perf_counter() - begun_s - self._mean_s) * 0.1

    def _before_call(self) -> None:
        """Sends finished answers now, unless calls are so quick that a few can be sent together; reads cancels."""
        now_s = perf_counter()
        ledger = self._ledger
        if ledger.unsent and (
            self._mean_s > QUICK_CALL_S
            or ledger.unsent >= HOLD_BACK_REPLIES_MAX
            or ledger.first_waits
            or now_s - self._flushed_s > HOLD_BACK_S_MAX
        ):
            self._link.flush()
            self._flushed_s = now_s
        if now_s - self._read_s > UNREAD_S_MAX:
            self._link.receive(wait=False)
            self._read_s = now_s

    # --- generators

    def _round(self) -> None:
        """Runs one step of each generator that isn't waiting; new requests and cancels are read in between."""
        stepped = False
        for entry in list(self._active):
            running, generator = entry
            if running.batch.cancelled:
                self._active.remove(entry)
                self._unbegun.discard(running)
                self._close(running, generator)
                stepped = True
            elif not running.batch.stalled:
                self._before_call()
                if not self._step(running, generator):
                    self._active.remove(entry)
                stepped = True
        if not stepped or not self._active:
            self._link.flush()
        if not stepped:
            self._link.receive(wait=True)

    def _step(self, running: Running, generator: _Generator) -> bool:
        if self._link.on_turn is not None:
            self._link.on_turn(running.batch)
        begins = 0
        if running in self._unbegun:
            self._unbegun.discard(running)
            begins = running.batch.batch_id
        try:
            if running.step(self._call(next, (generator,), begins)):
                return True
        except StopIteration as end:
            return self._finish(running, end.value)
        except SystemExit:
            raise
        except BaseException as error:
            running.failed(error)
        self._close(running, generator)
        return False

    def _finish(self, running: Running, value: Any) -> bool:
        try:
            running.finish_stream(value)
        except SystemExit:
            raise
        except BaseException as error:  # of the value's own code
            running.failed(error)
        return False

    def _close(self, running: Running, generator: _Generator) -> None:
        """Lets the generator clean up (GeneratorExit at its yield), then fails the remaining requests."""
        try:
            self._call(generator.close)
        except SystemExit:
            raise
        except BaseException as error:
            running.failed(error)
        running.fail(PREDICTION_FAILED)
