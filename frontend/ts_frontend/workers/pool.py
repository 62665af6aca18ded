"""The workers of one model version, in the configured number; each is restarted when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any, Protocol

from ts_frontend.errors import PROCESS_DIED, ModelNotLoaded, NoWorker
from ts_frontend.scheduling.queues import WorkQueue
from ts_frontend.tasks import owned, watched
from ts_frontend.workers.cluster.resources import ClusterState
from ts_frontend.workers.forkserver import HolderLauncher
from ts_frontend.workers.launchers import Launcher
from ts_frontend.workers.process import (
    DIED,
    HUNG,
    NOT_LOADED,
    Backoff,
    Failure,
    LineSink,
    Recovery,
    Replacement,
    StartFailed,
    WorkerPlan,
    unattended_future,
)
from ts_frontend.workers.resources import MEMORY_MAX, Device, Excess, WorkerLimits, available_bytes
from ts_frontend.workers.worker import Worker, WorkerState

log = logging.getLogger(__name__)

#: Deadlines closer together than these seconds are checked together.
LATE_EVERY_S = 0.002
#: The longest time in seconds for which the timer is set.
LATE_LOOK_S_MAX = 3600.0
NO_LIMITS = WorkerLimits()
#: Seconds between two readings of the workers' memory.
MEMORY_LOOK_S = 1.0
#: Seconds until the next try after a replacement failed to start.
REPLACE_AGAIN_S = 30.0
#: The most seconds until a killed worker's process has ended.
ENDS_S_MAX = 5.0
#: The seconds that a worker must stay ready, after several failures in a row, before a scale call counts it as ready.
STAYS_S = 1.0
#: The length to which a reason is cut that was logged before.
REASON_CHARS_AGAIN = 100
#: The largest length of the cause in the error of requests: it has room for a handler to write.
CAUSE_CHARS_MAX = 1000
#: The number of remembered tracebacks of a model, which are counted instead of logged again.
TRACEBACKS_MAX = 16


@dataclass(frozen=True, slots=True)
class PoolResources:
    """The server's resources for a pool's workers: their launcher, their ids and devices, and the sinks of their
    lines. `holder`: the launcher, if it holds the model's weights for them; `waiting`: the reason why a starting
    worker waits for a place in a cluster, by its id; `cluster`: the state of that cluster."""

    launcher: Launcher
    next_worker_id: Callable[[], int]
    next_device: Callable[[], Device]
    line_sink: Callable[[int], LineSink]
    holder: HolderLauncher | None = None
    waiting: Callable[[int], str] | None = None
    cluster: ClusterState | None = None


class Lender(Protocol):
    """The workers that another frontend lends to a pool. `open`: requests may wait for them; `ready`: one is ready;
    `jobs`: the requests there."""

    @property
    def open(self) -> bool: ...

    @property
    def ready(self) -> bool: ...

    @property
    def jobs(self) -> int: ...

    @property
    def info(self) -> Mapping[str, Any]: ...

    def tick(self, now_s: float) -> None: ...

    def end_late(self, now_s: float) -> float: ...


class Clock:
    """The clock of slots."""

    def now_s(self) -> float:
        return time.monotonic()

    async def pause(self, seconds: float, hurry: asyncio.Event) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(hurry.wait(), seconds)


class Slot:
    """A worker's place in the pool, restarted until retired or given up. `after`: done when a start may begin."""

    def __init__(
        self, pool: Pool, worker_id: int, device: Device, backoff: Backoff, after: asyncio.Future[None] | None = None
    ) -> None:
        self.id = worker_id
        self.device = device
        self.worker: Worker | None = None
        self.gave_up = False
        #: The end of the present or next start: done when the worker is ready, or with the StartFailed, and replaced
        #: then. A process that was killed while it loaded is followed by another one first: only the second one's
        #: failure fails the start.
        self.attempt = unattended_future()
        #: The failure of the last start, until one succeeds.
        self.load_failure: StartFailed | None = None
        #: The time of the next start (`time.monotonic()` seconds), during the pause before it.
        self.next_start_s = 0.0
        #: The reason why its worker waits for a place; "" if it doesn't.
        self.waits_for = ""
        self._waits_since_s, self._told_off = math.inf, False
        self._pool = pool
        self._backoff = backoff
        self._retired = False
        self._second_try = False
        self._recovery = Recovery(worker_id, pool.plan)
        self._hurry = asyncio.Event()
        self._after_what = after
        self._task = owned(self._keep())
        self._task.add_done_callback(self._left)

    @property
    def ready(self) -> bool:
        return self.worker is not None and self.worker.state is WorkerState.READY

    @property
    def failures(self) -> int:
        return self._backoff.failures

    @property
    def memory_bytes(self) -> int:
        return self.worker.memory_bytes if self.worker is not None else 0

    def look(self, now_s: float) -> None:
        """Notes the reason why a worker has no place yet. Callers that wait for its start get an error after
        `startup_timeout_s`; the worker still starts as soon as there is a place."""
        waiting = self._pool.resources.waiting
        if waiting is None or self._retired:
            return
        self.waits_for = waiting(self.id)
        if not self.waits_for:
            self._waits_since_s, self._told_off = math.inf, False
        elif self._waits_since_s == math.inf:
            self._waits_since_s = now_s
            log.warning("Worker %s of %s %s", self.id, self._pool.name, self.waits_for)
        elif not self._told_off and now_s - self._waits_since_s > self._pool.plan.startup_timeout_s:
            self._told_off = True
            self._settle(StartFailed(f"Worker {self.id} {self.waits_for}. It starts as soon as there is room", 503))

    def try_now(self) -> None:
        """Ends the pause before the next start; a later lack of a place is reported again."""
        if not self.ready:
            self._hurry.set()
            self._told_off = False

    async def stays(self, limit_s: float) -> None:
        """Watches a worker that is ready after failures in a row for `limit_s`. Raises StartFailed when it ends."""
        worker = self.worker
        if self.failures < 2 or worker is None:
            return
        await asyncio.wait({worker.ended}, timeout=limit_s)
        if worker.ended.done() and not self._retired:
            raise StartFailed(f"Worker ended soon after it was ready: {worker.ended.result()}", 500, worker.tail())

    # --- its task

    async def _keep(self) -> None:
        delay_s: float | None = 0.0
        if self._after_what is not None:
            await asyncio.wait({self._after_what})
        while delay_s is not None and not self._retired:
            if delay_s:
                self.next_start_s = self._pool.clock.now_s() + delay_s
                await self._pool.clock.pause(delay_s, self._hurry)
            try:
                delay_s = self._after(await self._one_life())
            except Exception as error:  # a mistake of the server's own: the worker is started again like a failed one
                delay_s = self._after_mistake(error)

    async def _one_life(self) -> StartFailed | str:
        pool = self._pool
        self._hurry.clear()
        worker = self.worker = pool.new_worker(self)
        try:
            await worker.start(pool.resources.launcher, pool.resources.line_sink(self.id))
            self.load_failure = None
            pool.started(worker)
            self._recovery.ready()
        except StartFailed as error:
            if worker.process is not None:
                await asyncio.shield(worker.ended)  # its lines are logged by then
            return error
        except Exception as error:
            worker.kill(f"the server failed: {type(error).__name__}: {error}")
            raise
        self._settle(None)
        return await asyncio.shield(worker.ended)

    def _settle(self, error: StartFailed | None) -> None:
        """Ends the attempt to start, with success or `error`, and makes the next one."""
        self._second_try = False
        attempt, self.attempt = self.attempt, unattended_future()
        if error is None:
            attempt.set_result(None)
        else:
            attempt.set_exception(error)

    def _after(self, end: StartFailed | str) -> float | None:
        """Handles a worker's end; returns the seconds until the next start, None when there is no other."""
        pool, backoff, worker = self._pool, self._backoff, self.worker
        assert worker is not None
        pool.queue.detach(worker)
        if self._retired or worker.state is WorkerState.STOPPED:
            return None
        now_s = pool.clock.now_s()
        if worker.answered or now_s - worker.ready_at_s > backoff.delay_s_max:
            backoff.worked()
        backoff.failed(now_s)
        if isinstance(end, StartFailed):
            failure = Failure(time.time(), self.id, end.message, backoff.failures, end.tail)
            reason, times = NOT_LOADED, pool.log_traceback(self.id, end.traceback)
            retold = self._start_failed(end)
        else:
            failure = Failure(time.time(), self.id, end, backoff.failures, worker.tail())
            reason, times, retold = HUNG if worker.hung else DIED, 1, False
        pool.failed(failure, reason)
        if times > 1:
            reason = shorten(failure.reason, REASON_CHARS_AGAIN, placeholder=" …")
            return self._delay_s(now_s, f"{reason} (with the same traceback as before, {times} times now)")
        self._recovery.ended(
            failures=backoff.failures,
            begun=worker.process is not None,
            was_ready=worker.ready_at_s < math.inf,
            hung=worker.hung,
        )
        log.warning("Worker %s of %s ended: %s", self.id, pool.name, failure.reason, extra={"retold": retold})
        return self._delay_s(now_s)

    def _start_failed(self, error: StartFailed) -> bool:
        """Whether somebody waits for this load, and tells its failure to the author of the model."""
        if error.died and not self._second_try:
            self._second_try = True
            return False
        first = self.load_failure is None
        self.load_failure = error
        self._settle(error)
        return first

    def _after_mistake(self, error: Exception) -> float | None:
        pool = self._pool
        log.error("Worker %s of %s: the server failed to look after it", self.id, pool.name, exc_info=error)
        if self.worker is not None:
            pool.queue.detach(self.worker)
        now_s = pool.clock.now_s()
        self._backoff.failed(now_s)
        failed = StartFailed(f"The server failed to look after the worker: {type(error).__name__}: {error}")
        self._start_failed(failed)
        pool.failed(Failure(time.time(), self.id, failed.message, self.failures, []), NOT_LOADED)
        return self._delay_s(now_s)

    def _delay_s(self, now_s: float, known: str = "") -> float | None:
        """Seconds until the next start, None without one; logs it. `known`: the failure, if logged before."""
        pool, backoff = self._pool, self._backoff
        if not backoff.exhausted(now_s):
            delay_s = backoff.delay_s(random.random())
            self._recovery.retries(delay_s, known)
            return delay_s
        self._give_up(pool.last_failure.reason if pool.last_failure is not None else "")
        return None

    def _give_up(self, reason: str) -> None:
        self.gave_up = True
        log.error("Worker %s of %s is not started again: %s", self.id, self._pool.name, reason)
        self._settle(StartFailed(f"The worker is not started again: {reason}"))
        self._pool.gave_up(reason)

    def _left(self, task: asyncio.Task[None]) -> None:
        """Handles the end of the slot's task, and gives up the worker unless it was retired or given up before."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("Worker %s of %s is no longer supervised", self.id, self._pool.name, exc_info=error)
        if not self._retired and not self.gave_up and (error is not None or task.cancelled()):
            if self.worker is not None:
                self._pool.queue.detach(self.worker)
                self.worker.kill("no longer supervised")
            self._give_up(f"{type(error).__name__}: {error}" if error is not None else "its task was cancelled")
        self._settle(StartFailed("Worker was stopped before its model was loaded", asked_for=True))

    async def retire(self, timeout_s: float | None) -> None:
        """Ends the worker for good after at most `timeout_s` seconds (None: when its requests are answered)."""
        self._retired = True
        worker = self.worker
        if worker is not None and worker.state in (WorkerState.READY, WorkerState.DRAINING):
            self._pool.queue.detach(worker)
            await worker.stop(timeout_s)
        elif worker is not None and worker.state in (WorkerState.STARTING, WorkerState.LOADING):
            worker.kill("stopped while loading")
        self._task.cancel()
        await asyncio.wait({self._task})
        worker = self.worker
        if worker is not None:
            self._pool.queue.detach(worker)
            if worker.process is not None:
                worker.kill("stopped")
                await asyncio.wait({worker.ended}, timeout=ENDS_S_MAX)


class Pool:
    """A model version's workers. `on_change` is called whenever readiness may have changed."""

    def __init__(
        self,
        name: str,
        plan: WorkerPlan,
        queue: WorkQueue,
        resources: PoolResources,
        new_backoff: Callable[[], Backoff],
        on_change: Callable[[], None],
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self.plan = plan
        self.queue = queue
        self.resources = resources
        self.slots: list[Slot] = []
        self.last_failure: Failure | None = None
        self.failures = dict.fromkeys((NOT_LOADED, DIED, HUNG), 0)  # of workers, by when
        #: No worker exists or will be started. Updated by `_changed`, because every request reads it.
        self.unavailable = True
        #: The failure of the latest start, if the last start of each worker has failed. Updated like `unavailable`.
        self.load_failure: StartFailed | None = None
        self.clock = clock or Clock()
        self.on_demand = False  # requests wait also while there are no workers
        self._tracebacks: dict[str, int] = {}
        self._new_backoff = new_backoff
        self._on_change = on_change
        self._leaving: set[Slot] = set()
        #: Numbers of replaced workers by the kind of excess, and the latest replacement without a failure.
        self.replaced: dict[str, int] = {}
        self.last_replacement: Replacement | None = None
        self._replacing: asyncio.Task[None] | None = None
        self._replaced: Slot | None = None  # the one that is being replaced
        self._next_replacement_s = self._next_look_s = 0.0
        self._memory_limit_works = True
        self._retiring: set[asyncio.Task[None]] = set()
        #: Gets each ready worker's description of its model, before the worker takes requests.
        self.on_ready: Callable[[Mapping[str, Any]], None] = lambda info: None
        #: Whether its workers are placed on GPUs.
        self.on_gpus = False
        #: Called when the pool may have become busy: it needs ticks until it isn't busy any more.
        self.on_busy: Callable[[], None] = lambda: None
        self._ready_s = time.monotonic()  # when a worker was seen ready last
        self._due_s = math.inf
        self._due: asyncio.TimerHandle | None = None
        #: Whether other models, which do the work in place of workers, are ready; None with workers.
        self._others_ready: Callable[[], bool] | None = None
        #: What other frontends lend to it, and the number of frontends that divide its workers.
        self.lenders: Sequence[Lender] = ()
        self.frontends = 1

    # --- scaling and refusals

    @property
    def ready_count(self) -> int:
        return sum(slot.ready for slot in self.slots)

    @property
    def ready(self) -> bool:
        """Whether a worker, or the models that do the work in place of workers, can take a request."""
        if self._others_ready is not None:
            return self._others_ready()
        return self.ready_count > 0 or any(one.ready for one in self.lenders)

    def leave_to_others(self, ready: Callable[[], bool]) -> None:
        """Has no workers from now on: other models do the work, which is ready when they are."""
        self._others_ready = ready
        self.unavailable = False

    @property
    def busy(self) -> bool:
        """Returns whether there are workers, retiring ones included, or requests."""
        return bool(self.slots or self._leaving or len(self.queue) or any(one.jobs for one in self.lenders))

    def lent(self) -> None:
        """To be called when the lenders or their states have changed."""
        self._changed()
        self._fail_what_waits()

    def refusal(self) -> str:
        """Returns the reason why there is no worker, for the caller's error; "" when it isn't known."""
        failure = self.last_failure
        if failure is None:
            return ""
        return f" Last worker's end: {failure.reason}." if self._explains else " The model's log says why."

    @property
    def _explains(self) -> bool:
        """Whether callers see the handler's exceptions (debug_errors)."""
        return bool(self.plan.load.get("debug_errors", True))

    def not_loaded(self) -> ModelNotLoaded:
        """The error of requests while there is a `load_failure`: the cause, and the seconds until the next try."""
        cause = self.load_failure.cause if self.load_failure is not None else ""
        cause = cause if len(cause) <= CAUSE_CHARS_MAX else f"{cause[:CAUSE_CHARS_MAX]} ..."
        due_s = min((slot.next_start_s for slot in self.slots if not slot.gave_up), default=0.0)
        wait_s = max(1, math.ceil(due_s - self.clock.now_s()))
        if not self._explains:
            cause = "the model's log says why"
        if "\n" in cause:  # code to write, which can be copied as it is
            return ModelNotLoaded(f"Model {self.name} could not be loaded: {cause}\n\nIt is tried again.", wait_s)
        return ModelNotLoaded(
            f"Model {self.name} could not be loaded: {cause.rstrip('.?')}. It is tried again.", wait_s
        )

    async def scale(self, count: int, drain_s: float | None = None) -> None:
        """Starts or retires workers until there are `count`; returns when all of them are ready and the surplus is
        gone. Workers that wait for a restart are started now.

        Raises StartFailed with the first failure; failed workers keep retrying. `drain_s`: the seconds that a surplus
        worker has to finish its requests (None: no limit, 0: none); unfinished ones then run elsewhere.
        """
        if self._others_ready is not None:
            return
        if self.plan.workers_max is not None and count > self.plan.workers_max:
            why = "bypass_serve" if self.plan.in_process else "debug"
            log.warning("%s gets %s worker, not %s: %s is on", self.name, self.plan.workers_max, count, why)
            count = self.plan.workers_max
        self.slots = [slot for slot in self.slots if not slot.gave_up]
        surplus = self.slots[count:]
        del self.slots[count:]
        if self._replacing is not None and self._replaced in surplus:
            self._replacing.cancel()
        self.slots += [self._new_slot() for _ in range(count - len(self.slots))]
        kept = list(self.slots)
        starting = [slot.attempt for slot in kept if not slot.ready]
        for slot in kept:
            slot.try_now()
        retiring = [self._retired(slot, drain_s) for slot in surplus]
        self._changed()
        self._fail_what_waits()
        if retiring:
            await asyncio.wait(retiring)
            self._fail_what_waits()  # those that they gave back
        if not self.slots and self.resources.holder is not None:
            self.resources.holder.rest()
        if starting:
            await asyncio.wait(starting)
            for attempt in starting:
                attempt.result()
        await asyncio.gather(*(slot.stays(STAYS_S) for slot in kept))

    async def reload(self, anew: str = "") -> str:
        """Replaces all workers at once by new ones with the model's present files; requests that haven't begun wait
        for them. `anew`: a known reason to load the model again. Returns the reason why it was loaded again, "" if
        the weights were kept. Raises StartFailed, as `scale`."""
        holder = self.resources.holder
        anew = await holder.renewed(anew) if holder is not None else anew or "each worker loads it"
        old, self.slots = self.slots, [self._new_slot(slot.device) for slot in self.slots]
        for slot in old:
            self._retired(slot, None)
        attempts = [slot.attempt for slot in self.slots]
        self._changed()
        if attempts:
            await asyncio.wait(attempts)
            for attempt in attempts:
                attempt.result()
        return anew

    def _retired(self, slot: Slot, drain_s: float | None) -> asyncio.Task[None]:
        """Begins to retire a slot; `close` waits for its end."""
        retiring = watched(self._retire(slot, drain_s), f"Retiring worker {slot.id}")
        self._retiring.add(retiring)
        retiring.add_done_callback(self._retiring.discard)
        return retiring

    async def _retire(self, slot: Slot, drain_s: float | None) -> None:
        self._leaving.add(slot)
        try:
            await slot.retire(drain_s)
        finally:
            self._leaving.discard(slot)

    def _new_slot(self, device: Device | None = None, after: asyncio.Future[None] | None = None) -> Slot:
        resources = self.resources
        place = device or resources.next_device()
        return Slot(self, resources.next_worker_id(), place, self._new_backoff(), after)

    async def close(self, drain_s: float | None) -> None:
        """Ends all workers; retiring ones get at most `drain_s` seconds from now."""
        leaving = [slot for slot in self._leaving if slot.worker is not None]
        if self._replacing is not None:
            self._replacing.cancel()
            await asyncio.wait({self._replacing})
        await self.scale(0, drain_s)
        if self._retiring:
            await asyncio.wait(self._retiring, timeout=drain_s)
        for slot in leaving:
            if slot in self._leaving and slot.worker is not None:
                slot.worker.kill("stopped")
        if self._retiring:
            await asyncio.wait(self._retiring)
        if self.resources.holder is not None:
            await self.resources.holder.close()
        self._forget_due()

    def _changed(self) -> None:
        """Reports a possible change of readiness. Fails the waiting requests when no start succeeds."""
        slots = self.slots
        self.on_busy()
        open_elsewhere = any(one.open for one in self.lenders)
        self.unavailable = all(slot.gave_up for slot in slots) and not open_elsewhere
        failures = [slot.load_failure for slot in slots]
        self.load_failure = failures[-1] if failures and None not in failures and not open_elsewhere else None
        if self.load_failure is not None and not self.unavailable and len(self.queue):
            self.queue.fail_all(self.not_loaded())
        try:
            self._on_change()
        except Exception:  # a listener's error: the workers are supervised all the same
            log.exception("A change of the workers of %s could not be reported", self.name)

    def _fail_what_waits(self) -> None:
        if self.unavailable and not self.slots and not self.on_demand and len(self.queue):
            self.queue.fail_all(NoWorker(f"Model {self.name} was scaled to zero workers while the request waited"))

    # --- events of its slots

    def new_worker(self, slot: Slot) -> Worker:
        log.debug("Worker %s of %s starts on %s", slot.id, self.name, slot.device)
        return Worker(slot.id, self.plan, slot.device, self.queue, self._sharers(slot))

    def _sharers(self, slot: Slot) -> int:
        """The model's workers that share this machine's cores: those on the CPU."""
        if slot.device.is_gpu or self.resources.cluster is not None or self.plan.in_process:
            return 1
        return max(1, sum(not one.device.is_gpu for one in self.slots) * self.frontends)

    def started(self, worker: Worker) -> None:
        self.on_ready(worker.info)
        self._check_memory_limit(worker)
        self.queue.attach(worker)
        threads = worker.info.get("threads", 0)  # known of processes with torch
        more = f", {threads} thread{'s' if threads > 1 else ''}" if threads and not worker.device.is_gpu else ""
        log.info("Worker %s of %s is ready (pid %s%s).", worker.id, self.name, worker.pid, more)
        self._changed()
        if not any(slot.load_failure for slot in self.slots):
            self._tracebacks.clear()

    def failed(self, failure: Failure, reason: str) -> None:
        self.last_failure = failure
        self.failures[reason] += 1
        self._changed()

    def log_traceback(self, worker_id: int, traceback: str) -> int:
        """Logs a failed load's traceback as a line of its worker, unless it has been logged before. Returns the
        number of times it was raised, 1 without a traceback."""
        if not traceback:
            return 1
        sink = self.resources.line_sink(worker_id)
        sink("stdout", PROCESS_DIED)
        times = self._tracebacks[traceback] = self._tracebacks.pop(traceback, 0) + 1
        if times > 1:
            return times
        if len(self._tracebacks) > TRACEBACKS_MAX:
            del self._tracebacks[next(iter(self._tracebacks))]
        for line in traceback.splitlines():
            sink("stdout", line)
        return 1

    def gave_up(self, reason: str) -> None:
        self._changed()
        if self.unavailable:
            self.queue.fail_all(NoWorker(f"No worker of model {self.name} could be kept running: {reason}"))

    def end_by(self, deadline_s: float) -> None:
        """Makes a request end at its deadline (`time.monotonic()` seconds), even before the next tick."""
        if deadline_s < self._due_s:
            self._forget_due()
            self._due_s = deadline_s
            delay_s = min(max(0.0, deadline_s - time.monotonic()), LATE_LOOK_S_MAX)
            self._due = asyncio.get_running_loop().call_later(delay_s, self._end_late)

    def _forget_due(self) -> None:
        if self._due is not None:
            self._due.cancel()
        self._due, self._due_s = None, math.inf

    def _end_late(self) -> None:
        self._forget_due()
        now_s = time.monotonic()
        if len(self.queue):
            self.queue.expire(now_s)
        workers = [slot.worker for slot in (*self.slots, *self._leaving) if slot.worker is not None]
        running_s = min((worker.end_late(now_s) for worker in workers), default=math.inf)
        for lender in self.lenders:
            running_s = min(running_s, lender.end_late(now_s))
        waiting_s = min((job.deadline_s for job in self.queue.waiting()), default=math.inf)
        next_s = min(running_s, waiting_s)
        if next_s != math.inf:
            self.end_by(max(next_s, now_s + LATE_EVERY_S))

    # --- workers that have reached their limits

    def _look_at_limits(self, now_s: float) -> None:
        """Ends workers over `memory_bytes_max`, and replaces workers over another limit, one at a time."""
        limits = self.plan.limits
        look = limits.of_memory and now_s >= self._next_look_s
        if look:
            self._next_look_s = now_s + MEMORY_LOOK_S
        for slot in list(self.slots):
            worker = slot.worker
            if worker is None or worker.state not in (WorkerState.LOADING, WorkerState.READY):
                continue
            excess = limits.over(worker.answered)
            memory_bytes = worker.memory_bytes if look else 0
            if look and (found := limits.over_memory(memory_bytes)) is not None:
                if found.kind == MEMORY_MAX:
                    self._count_replaced(found)
                    worker.kill(found.text, out_of_memory=True)
                    continue
                excess = excess or (found if self._memory_limit_works else None)
            is_due = self._replacing is None and now_s >= self._next_replacement_s
            if excess is not None and slot.ready and is_due:
                self._replacing = watched(self._replace_one(slot, excess), f"Replacing worker {slot.id}")
                self._replaced = slot
                self._replacing.add_done_callback(self._replacement_over)

    def _check_memory_limit(self, worker: Worker) -> None:
        """Ignores the memory limit if loading alone reaches it: the worker would be replaced forever."""
        limit = self.plan.limits.memory_bytes
        used = worker.memory_bytes if limit and self._memory_limit_works else 0
        if limit and used >= limit:
            self._memory_limit_works = False
            log.warning(
                "Workers of %s need %.0f MiB once they have loaded: recycleAboveMemory of %.0f MiB is ignored",
                *(self.name, used / (1 << 20), limit / (1 << 20)),
            )

    def _count_replaced(self, excess: Excess) -> None:
        self.replaced[excess.kind] = self.replaced.get(excess.kind, 0) + 1

    def _replacement_over(self, _: asyncio.Task[None]) -> None:
        self._replacing = self._replaced = None

    async def _replace_one(self, slot: Slot, excess: Excess) -> None:
        """Replaces a worker by a new one. The old one finishes its requests: none is lost."""
        log.info("Worker %s of %s is replaced: %s.", slot.id, self.name, excess.text)
        roomy = not slot.device.is_gpu and available_bytes() > slot.memory_bytes
        heir = await self._started_heir(slot) if roomy else None
        if slot in self.slots and (heir is not None or not roomy):
            self._count_replaced(excess)
            self.last_replacement = Replacement(time.time(), slot.id, excess.text)
            await self._hand_over(slot, heir)

    async def _started_heir(self, slot: Slot) -> Slot | None:
        """Starts a worker on the same device; returns it ready, or None if it didn't start or isn't needed."""
        heir = self._new_slot(slot.device)
        try:
            await asyncio.shield(heir.attempt)
            if slot in self.slots:
                return heir
        except StartFailed as error:
            self._next_replacement_s = self.clock.now_s() + REPLACE_AGAIN_S
            log.warning("Worker %s of %s stays: the one after it did not start: %s", slot.id, self.name, error.message)
        except BaseException:
            await self._retire(heir, 0.0)
            raise
        await self._retire(heir, 0.0)
        return None

    async def _hand_over(self, slot: Slot, heir: Slot | None) -> None:
        """Gives the slot to the heir, or to a worker that starts after this one's end."""
        ended = asyncio.get_running_loop().create_future()
        self.slots[self.slots.index(slot)] = heir or self._new_slot(slot.device, ended)
        retiring = self._retired(slot, None)
        retiring.add_done_callback(lambda _: ended.set_result(None))
        self._changed()
        await asyncio.wait({retiring})

    def tick(self, now_s: float) -> None:
        if len(self.queue):
            self.queue.expire(now_s)
        if self.plan.limits != NO_LIMITS:
            self._look_at_limits(now_s)
        for slot in (*self.slots, *self._leaving):
            slot.look(now_s)
            if slot.worker is not None:
                slot.worker.tick(now_s)
        for lender in self.lenders:
            lender.tick(now_s)
        if self.ready_count or any(one.ready for one in self.lenders):
            self._ready_s = now_s
            return
        limit_s = self.plan.response_timeout_s
        if len(self.queue) and now_s - self._ready_s > limit_s:
            error = NoWorker(f"No worker of model {self.name} became ready within {limit_s:g} s.{self.refusal()}")
            self.queue.fail_older(error, limit_s)
