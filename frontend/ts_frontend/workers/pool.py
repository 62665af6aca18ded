"""The workers of one model version: as many as asked for, each started again when it ends."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ts_frontend.batching.job_queue import WorkQueue
from ts_frontend.errors import NoWorker
from ts_frontend.tasks import watched
from ts_frontend.workers.backoff import Backoff
from ts_frontend.workers.devices import Device
from ts_frontend.workers.life import Life, StartFailed, unattended_future
from ts_frontend.workers.plan import Plan
from ts_frontend.workers.process import Launcher
from ts_frontend.workers.started import LineSink
from ts_frontend.workers.worker import Worker

log = logging.getLogger(__name__)


class Staff(Protocol):
    """What a pool needs from the whole server."""

    launcher: Launcher

    def next_worker_id(self) -> int: ...

    def line_sink(self, worker_id: int, plan: Plan) -> LineSink: ...


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a worker ended or didn't start: what describe shows."""

    at: float
    worker_id: int
    reason: str
    failures: int
    tail: list[str]


class Slot:
    """One worker's place: keeps it filled until it is retired, or gives up."""

    def __init__(self, pool: Pool, worker_id: int, device: Device, backoff: Backoff) -> None:
        self.id = worker_id
        self.device = device
        self.worker: Worker | None = None
        self.gave_up = False
        self.first_try = unattended_future()
        self._pool = pool
        self._backoff = backoff
        self._retired = False
        self._task = asyncio.create_task(self._keep())

    @property
    def ready(self) -> bool:
        return self.worker is not None and self.worker.life is Life.READY

    @property
    def failures(self) -> int:
        return self._backoff.failures

    async def _keep(self) -> None:
        pool, backoff = self._pool, self._backoff
        while not self._retired:
            worker = self.worker = pool.new_worker(self)
            reason, tail = await self._one_life(worker)
            pool.queue.detach(worker)
            if self._retired or worker.life is Life.STOPPED:
                break
            now_s = time.monotonic()
            if worker.answered_batches or now_s - worker.ready_at_s > backoff.delay_s_max:
                backoff.worked()
            backoff.failed(now_s)
            pool.failed(Failure(time.time(), self.id, reason, backoff.failures, tail))
            if backoff.exhausted(now_s):
                self._give_up(reason)
                break
            delay_s = backoff.delay_s(random.random())
            log.info("Retry worker: %s in %.1f seconds.", self.id, delay_s)
            await asyncio.sleep(delay_s)

    async def _one_life(self, worker: Worker) -> tuple[str, list[str]]:
        """Runs a worker from start to end; the reason of its end and its last lines."""
        pool = self._pool
        try:
            await worker.start(pool.staff.launcher, pool.staff.line_sink(self.id, pool.plan))
        except StartFailed as error:
            if not self.first_try.done():
                self.first_try.set_exception(error)
            return error.message, error.tail
        if not self.first_try.done():
            self.first_try.set_result(None)
        pool.started(worker)
        return await asyncio.shield(worker.ended), worker.tail()

    def _give_up(self, reason: str) -> None:
        self.gave_up = True
        log.error("Worker %s of %s is not started again: %s", self.id, self._pool.name, reason)
        self._pool.gave_up(reason)

    async def retire(self, timeout_s: float | None) -> None:
        """Ends the worker for good after at most `timeout_s` (None: however long its requests take)."""
        self._retired = True
        worker = self.worker
        if worker is not None and worker.life in (Life.READY, Life.DRAINING):
            self._pool.queue.detach(worker)
            await worker.stop(timeout_s)
        elif worker is not None and worker.life in (Life.STARTING, Life.LOADING):
            worker.kill("stopped while loading")
        self._task.cancel()
        await asyncio.wait({self._task})
        if worker is not None:
            self._pool.queue.detach(worker)
        if not self.first_try.done():
            self.first_try.set_exception(StartFailed("Worker was stopped before its model was loaded"))


class Pool:
    """A model version's workers. `on_change` is called whenever readiness may have changed."""

    def __init__(
        self,
        name: str,
        plan: Plan,
        queue: WorkQueue,
        staff: Staff,
        next_device: Callable[[], Device],
        new_backoff: Callable[[], Backoff],
        on_change: Callable[[], None],
    ) -> None:
        self.name = name
        self.plan = plan
        self.queue = queue
        self.staff = staff
        self.slots: list[Slot] = []
        self.last_failure: Failure | None = None
        #: No worker is there or will come. Kept up to date by `_changed`: every request asks.
        self.hopeless = True
        self._next_device = next_device
        self._new_backoff = new_backoff
        self._on_change = on_change
        self._leaving: set[Slot] = set()
        self._retiring: set[asyncio.Task[None]] = set()
        #: Gets what each worker says of its model when it is ready, before that takes requests.
        self.on_ready: Callable[[Mapping[str, Any]], None] = lambda info: None
        self._ready_s = time.monotonic()  # when a worker was seen ready last

    # --- what it is asked

    @property
    def ready_count(self) -> int:
        return sum(slot.ready for slot in self.slots)

    def refusal(self) -> str:
        """Why there is no worker, for the caller's error; "" when that isn't known."""
        failure = self.last_failure
        return f" Last worker's end: {failure.reason}." if failure is not None else ""

    async def scale(self, count: int, drain_s: float | None = None) -> None:
        """Makes it `count` workers; returns when all that still start are loaded and the surplus is gone.

        Raises StartFailed with the first failure; workers that failed go on trying. `drain_s`: how long a surplus
        worker may take to finish (None: as long as it needs, 0: not at all; its requests then run elsewhere).
        """
        if self.plan.workers_max is not None and count > self.plan.workers_max:
            why = "bypass_serve" if self.plan.inside else "debug"
            log.warning("%s gets %s worker, not %s: %s is on", self.name, self.plan.workers_max, count, why)
            count = self.plan.workers_max
        self._clear_given_up()
        surplus = self.slots[count:]
        del self.slots[count:]
        self.slots += [self._new_slot() for _ in range(count - len(self.slots))]
        starting = [slot for slot in self.slots if not slot.first_try.done()]
        retiring = [watched(self._retire(slot, drain_s), f"Worker {slot.id}'s retirement") for slot in surplus]
        self._retiring.update(retiring)
        for task in retiring:
            task.add_done_callback(self._retiring.discard)
        self._changed()
        self._fail_what_waits()
        if retiring:
            await asyncio.wait(retiring)
            self._fail_what_waits()  # what they gave back
        if starting:
            await asyncio.wait([slot.first_try for slot in starting])
            for slot in starting:
                slot.first_try.result()

    async def _retire(self, slot: Slot, drain_s: float | None) -> None:
        self._leaving.add(slot)
        try:
            await slot.retire(drain_s)
        finally:
            self._leaving.discard(slot)

    def _clear_given_up(self) -> None:
        self.slots = [slot for slot in self.slots if not slot.gave_up]

    def _new_slot(self) -> Slot:
        return Slot(self, self.staff.next_worker_id(), self._next_device(), self._new_backoff())

    async def close(self, drain_s: float | None) -> None:
        """Ends all workers; those that are retiring already get no more than `drain_s` from now."""
        leaving = [slot for slot in self._leaving if slot.worker is not None]
        await self.scale(0, drain_s)
        if self._retiring:
            await asyncio.wait(self._retiring, timeout=drain_s)
        for slot in leaving:
            if slot in self._leaving and slot.worker is not None:
                slot.worker.kill("stopped")
        if self._retiring:
            await asyncio.wait(self._retiring)

    def _changed(self) -> None:
        self.hopeless = all(slot.gave_up for slot in self.slots)
        self._on_change()

    def _fail_what_waits(self) -> None:
        """Nobody will take it: it is told so now."""
        if self.hopeless and not self.slots and len(self.queue):
            self.queue.fail_all(NoWorker(f"Model {self.name} was scaled to zero workers while the request waited"))

    # --- what its slots tell it

    def new_worker(self, slot: Slot) -> Worker:
        log.debug("Worker %s of %s starts on %s", slot.id, self.name, slot.device)
        return Worker(slot.id, self.plan, slot.device, self.queue)

    def started(self, worker: Worker) -> None:
        self.on_ready(worker.info)
        self.queue.attach(worker)
        log.info("Worker %s of %s is ready (pid %s).", worker.id, self.name, worker.pid)
        self._changed()

    def failed(self, failure: Failure) -> None:
        self.last_failure = failure
        log.warning("Worker %s of %s ended: %s", failure.worker_id, self.name, failure.reason)
        self._changed()

    def gave_up(self, reason: str) -> None:
        self._changed()
        if self.hopeless:
            self.queue.fail_all(NoWorker(f"No worker of model {self.name} could be kept running: {reason}"))

    def tick(self, now_s: float) -> None:
        if len(self.queue):
            self.queue.expire(now_s)
        for slot in (*self.slots, *self._leaving):
            if slot.worker is not None:
                slot.worker.tick(now_s)
        if self.ready_count:
            self._ready_s = now_s
            return
        limit_s = self.plan.response_timeout_s
        if len(self.queue) and now_s - self._ready_s > limit_s:
            error = NoWorker(f"No worker of model {self.name} became ready within {limit_s:g} s.{self.refusal()}")
            self.queue.fail_older(error, limit_s)
