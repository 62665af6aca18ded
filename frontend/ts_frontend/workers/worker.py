"""One worker process of a model, from its start to its end: what it runs, and what becomes of that when it dies."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from ts.protocol.frames import Cancel, Chunk, Credit, Failed, Load, LoadFailed, Message, Predict, Ready, Stop
from ts_frontend.errors import DeadlineExceeded, Draining, HandlerFailed
from ts_frontend.job import Job, State
from ts_frontend.workers.connection import Connection
from ts_frontend.workers.devices import Device
from ts_frontend.workers.exits import Exit
from ts_frontend.workers.process import Launcher
from ts_frontend.workers.ranks import Ranks
from ts_frontend.workers.started import NONE_STARTED, LineSink, Process, Spec

#: Read-ahead: batches that take longer are never waited behind; quicker ones are sent until they fill this time.
READ_AHEAD_S = 0.004
READ_AHEAD_BATCHES_MAX = 16
#: A stream whose reader has taken nothing for so long computes nothing, and doesn't count as running...
STALLED_S = 0.1
#: ... until there are so many times `max_concurrency` on one worker.
STALLED_FACTOR_MAX = 8
STOP_S_MAX = 5.0
EXIT_STATUS_S_MAX = 3.0

_batch_ids = itertools.count(1).__next__


def _look_at(done: asyncio.Future[None]) -> None:
    if not done.cancelled():
        done.exception()


def unattended_future() -> asyncio.Future[None]:
    """A future whose exception needn't be looked at: whoever waited for it may have left."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.add_done_callback(_look_at)
    return future


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


class Work(Protocol):
    """Where a worker's batches come from and where unfinished ones go back to."""

    def put_back(self, jobs: list[Job]) -> None: ...

    def wake(self) -> None: ...


class Recorder(Protocol):
    """Who measures batches."""

    def answered(self, jobs: Sequence[Job], waited_s: float, worked_s: float, now_s: float) -> None:
        """A batch is complete: it was on its way or behind another for `waited_s`, then on the worker."""

    def loaded(self, worker_id: int, seconds: float) -> None:
        """A worker has loaded its model, so long after it was created."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What to start and how to treat it; the same for every worker of a model version."""

    spec: Spec
    load: Mapping[str, Any]
    startup_timeout_s: float
    response_timeout_s: float
    message_bytes_max: int
    workers_max: int | None = None
    max_concurrency: int = 64
    neighbour_grace_s: float = 5.0
    recorder: Recorder | None = None


@dataclass(slots=True, eq=False)
class _Batch:
    id: int
    jobs: list[Job]
    left: int
    active_s: float
    taken_s: float
    open: set[int] = field(default_factory=set)


class Worker:
    """A process and the batches on it. `ended` gets the words for its end; the queue sees it as a taker."""

    def __init__(self, worker_id: int, plan: Plan, device: Device, work: Work) -> None:
        self.id = worker_id
        self.device = device
        self.life = Life.STARTING
        self.started_at = time.time()
        self.info: dict[str, Any] = {}
        self.answered_batches = 0
        self.ready_at_s = math.inf
        self._recorder = plan.recorder
        self._created_s = time.monotonic()
        self._finished_s = 0.0
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.process: Process | None = None
        self._plan = plan
        self._work = work
        self._connection: Connection | Ranks | None = None
        self._loaded: asyncio.Future[None] = unattended_future()
        self._jobs: dict[int, tuple[Job, _Batch]] = {}
        self._batches: dict[int, _Batch] = {}
        self._shared = False  # its requests go on by turns, or side by side
        self._concurrent = False  # side by side: one that hangs doesn't hold up the others
        self._stalled = 0
        #: Processes that compute together get one batch at a time.
        self._lockstep = plan.spec.team is not None and plan.spec.team.lockstep
        self._ahead_max = 0 if self._lockstep else READ_AHEAD_BATCHES_MAX
        self._mean_s = 1.0
        self._turn_s = 0.0
        self._idle: asyncio.Future[None] | None = None
        self._hung_at_s: float | None = None
        self._death_note = ""

    # --- life

    def _live(self, life: Life) -> None:
        if life not in NEXT_LIFE[self.life]:
            raise AssertionError(f"worker {self.id}: {self.life.value} -> {life.value}")
        self.life = life

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else 0

    @property
    def busy(self) -> bool:
        return bool(self._batches)

    @property
    def status(self) -> str:
        """READY when it can serve, else UNLOADING: TorchServe's two words."""
        return "READY" if self.life is Life.READY else "UNLOADING"

    async def start(self, launcher: Launcher, sink: LineSink) -> None:
        """Starts the process and loads the model; StartFailed with the reason when either doesn't happen in time."""
        plan = self._plan
        try:
            self.process = await launcher.launch(plan.spec.placed(self.id, self.device), sink)
        except Exception as error:
            self._live(Life.FAILED)
            raise StartFailed(f"Worker process couldn't be started: {error}") from error
        self._live(Life.LOADING)
        connection = self._connection = self._connect(self.process)
        self.process.exited.add_done_callback(lambda _: connection.finish("process ended"))
        gpu = {"gpu_id": self.device.seen_id, "device_type": self.device.kind, "worker_id": self.id}
        connection.push(Load({**plan.load, **gpu}))
        try:
            await asyncio.wait_for(asyncio.shield(self._loaded), plan.startup_timeout_s)
        except asyncio.TimeoutError:
            await self._abandon(f"Worker didn't load its model within {plan.startup_timeout_s:g} s (startupTimeout)")
        except asyncio.CancelledError:
            self.kill("stopped while loading")
            raise

    def _connect(self, process: Process) -> Connection | Ranks:
        size_max = self._plan.message_bytes_max
        if process.meeting is None:
            return Connection(process.sock, self._received, self._closed, size_max)
        process.sock.close()
        return Ranks(process.meeting, process.progress.fileno(), self._received, self._closed, size_max)

    async def _abandon(self, reason: str) -> None:
        self.kill(reason)
        await asyncio.wait({self.ended})
        raise StartFailed(reason, 500, self.tail())

    def tail(self) -> list[str]:
        return list(self.process.tail) if self.process is not None else []

    def kill(self, reason: str) -> None:
        """Ends the process at once; what it had started fails with `reason`."""
        self._death_note = self._death_note or reason
        if self.process is not None:
            self.process.kill()
        if self._connection is not None:
            self._connection.close()
            self._closed(reason)

    def retire(self) -> None:
        """Takes nothing new from now on."""
        if self.life is Life.READY:
            self._live(Life.DRAINING)

    async def drain(self, timeout_s: float | None) -> bool:
        """Waits until everything on it is answered (None: for ever); False when time was up."""
        self.retire()
        if not self._batches:
            return True
        if self._idle is None:
            self._idle = asyncio.get_running_loop().create_future()
        ends: set[asyncio.Future[Any]] = {self._idle, self.ended}
        done, _ = await asyncio.wait(ends, timeout=timeout_s, return_when="FIRST_COMPLETED")
        return bool(done)

    async def stop(self, timeout_s: float | None = None) -> None:
        """Retires, waits at most `timeout_s` for what runs, and ends the process. What is left goes back to the
        queue and runs again elsewhere, unless its caller has seen a part of the answer."""
        idle = await self.drain(timeout_s)
        if not idle:
            self._give_back()
        if self.ended.done():
            return
        if idle and self._connection is not None and self.life is Life.DRAINING:
            self._connection.push(Stop())
            self._connection.flush()
            await asyncio.wait({self.ended}, timeout=STOP_S_MAX)
        if not self.ended.done():
            self.kill("stopped")
            await asyncio.wait({self.ended}, timeout=STOP_S_MAX)

    def _give_back(self) -> None:
        back: list[Job] = []
        for batch in self._batches.values():
            for job in self._open_jobs(batch):
                if job.received_bytes:
                    job.fail(Draining("Worker was stopped while it streamed this answer"))
                else:
                    back.append(job)
        self._forget_all()
        self._work.put_back(back)

    def _forget_all(self) -> None:
        self._jobs.clear()
        self._batches.clear()
        self._became_idle()

    def _open_jobs(self, batch: _Batch) -> list[Job]:
        return [job for job in batch.jobs if job.id in batch.open and not job.done]

    # --- as the queue's taker

    def room(self) -> int:
        if self.life is not Life.READY or self._hung_at_s is not None:
            return 0
        count = len(self._batches)
        if not count:
            return 2
        if self._shared:
            limit = self._plan.max_concurrency
            return 1 if count - self._stalled < limit and count < limit * STALLED_FACTOR_MAX else 0
        if count > self._ahead_max or count * self._mean_s >= READ_AHEAD_S:
            return 0
        return 1 if time.monotonic() - self._turn_s < READ_AHEAD_S else 0

    def take(self, jobs: list[Job]) -> None:
        now_s = time.monotonic()
        batch_id = _batch_ids()
        batch = _Batch(batch_id, jobs, len(jobs), now_s, now_s, {job.id for job in jobs})
        if not self._batches:
            self._turn_s = now_s
        self._batches[batch_id] = batch
        for job in jobs:
            job.owner = self
            job.sent_at_s = now_s
            job.move(State.SENT)
            self._jobs[job.id] = job, batch
        assert self._connection is not None
        self._connection.push(Predict(batch_id, [job.item() for job in jobs]))

    def flush(self) -> None:
        if self._connection is not None:
            self._connection.flush()

    # --- as a job's owner

    def release(self, job: Job) -> None:
        if self._connection is not None and job.id in self._jobs:
            self._connection.push(Cancel(job.id))

    def grant(self, job: Job, size_bytes: int) -> None:
        entry = self._jobs.get(job.id)
        if entry is not None and self._connection is not None:
            entry[1].active_s = self._turn_s = time.monotonic()
            self._connection.push(Credit(job.id, size_bytes))

    # --- what the process says

    def _received(self, messages: list[Message]) -> None:
        finished = False
        jobs = self._jobs
        for message in messages:
            if isinstance(message, Chunk):
                entry = jobs.get(message.job_id)
                if entry is not None:
                    entry[0].deliver(message)
                    if message.last:
                        finished |= self._finish(message.job_id, entry[1])
                    else:
                        self._turn_s = entry[1].active_s = time.monotonic()
            elif isinstance(message, Failed):
                entry = jobs.get(message.job_id)
                if entry is not None:
                    entry[0].failed_by_worker(message)
                    finished |= self._finish(message.job_id, entry[1])
            else:
                self._control(message)
        if finished:
            self._work.wake()

    def _finish(self, job_id: int, batch: _Batch) -> bool:
        """One answer is complete; True when that ends its batch."""
        del self._jobs[job_id]
        batch.open.discard(job_id)
        batch.left -= 1
        if batch.left:
            return False
        del self._batches[batch.id]
        now_s = time.monotonic()
        self._mean_s += 0.2 * (min(now_s - self._turn_s, 1.0) - self._mean_s)
        self._turn_s = now_s
        self.answered_batches += 1
        if self._recorder is not None:
            # What was sent ahead waits on the socket until the batch before it is finished.
            waited_s = 0.0 if self._shared else max(self._finished_s - batch.taken_s, 0.0)
            self._recorder.answered(batch.jobs, waited_s, now_s - batch.taken_s - waited_s, now_s)
            self._finished_s = now_s
        if not self._batches:
            self._became_idle()
        return True

    def _became_idle(self) -> None:
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _control(self, message: Message) -> None:
        if isinstance(message, Ready):
            self.info = message.info
            kind = message.info.get("handler_kind")
            self._shared = kind in ("generator", "async") and not self._lockstep
            self._concurrent = kind == "async" and not self._lockstep
            self._live(Life.READY)
            self.ready_at_s = time.monotonic()
            if self._recorder is not None:
                self._recorder.loaded(self.id, time.monotonic() - self._created_s)
            if not self._loaded.done():
                self._loaded.set_result(None)
        elif isinstance(message, LoadFailed):
            info = message.info
            self._death_note = f"Model couldn't be loaded: {info.get('message')}"
            if not self._loaded.done():
                tail = str(info.get("traceback") or "").splitlines()
                self._loaded.set_exception(StartFailed(self._death_note, int(info.get("code", 500)), tail))
            self.kill(self._death_note)

    # --- its end

    def _closed(self, reason: str) -> None:
        """The socket has ended: the worker is dead for us, whatever its process does."""
        if self.life in (Life.STOPPED, Life.FAILED):
            return
        expected = self.life is Life.DRAINING and not self._batches
        self._live(Life.STOPPED if expected else Life.FAILED)
        asyncio.get_running_loop().create_task(self._settle(reason))

    def _put_back_unstarted(self) -> None:
        """Jobs whose handler call had not begun go back to the queue."""
        assert self.process is not None
        started = self.process.last_started_batch()
        unstarted = [batch for batch in self._batches.values() if started == NONE_STARTED or batch.id > started]
        back: list[Job] = []
        for batch in unstarted:
            back += self._open_jobs(batch)
            del self._batches[batch.id]
        if back:
            self._work.put_back(back)

    async def _settle(self, reason: str) -> None:
        """Learns how the process ended and fails what it had started."""
        process = self.process
        assert process is not None
        try:
            how = await asyncio.wait_for(asyncio.shield(process.exited), EXIT_STATUS_S_MAX)
        except asyncio.TimeoutError:
            process.kill()
            how = Exit(None)
        self._put_back_unstarted()
        process.release()
        note = self._death_note or how.sentence()
        out_of_memory = how.by_sigkill and not self._death_note
        for batch in self._batches.values():
            for job in self._open_jobs(batch):
                job.fail(HandlerFailed(507 if out_of_memory else 500, f"Worker died. {note}."))
        self._forget_all()
        if not self._loaded.done():
            self._loaded.set_exception(StartFailed(f"Worker process ended while loading: {note}", 500, self.tail()))
        self.ended.set_result(note if self._death_note or how.code else f"{note} ({reason})")

    # --- time

    def tick(self, now_s: float) -> None:
        """Called a few times per second: ends what has hung, lets go of streams nobody reads."""
        if self.life not in (Life.READY, Life.DRAINING):
            return
        if self._shared:
            self._count_stalled(now_s)
        limit_s = self._plan.response_timeout_s
        for job, batch in list(self._jobs.values()):
            if not job.done and job.unread_since(now_s) > limit_s:
                job.fail(DeadlineExceeded(f"The stream's reader has taken nothing for {limit_s:g} s"))
                self.release(job)
                batch.active_s = self._turn_s = now_s
        if not self._overdue(now_s, limit_s):
            self._not_hung()
        elif self._ready_to_kill(now_s):
            self.kill(f"It gave no answer for {limit_s:g} s (responseTimeout)")

    def _not_hung(self) -> None:
        """What had hung has answered after all: the worker takes requests again."""
        if self._hung_at_s is not None:
            self._hung_at_s = None
            self._work.wake()

    def _count_stalled(self, now_s: float) -> None:
        before = self._stalled
        self._stalled = sum(
            all(job.unread_since(now_s) > STALLED_S for job in self._open_jobs(batch))
            for batch in self._batches.values()
        )
        if self._stalled > before:
            self._work.wake()

    def _overdue(self, now_s: float, limit_s: float) -> bool:
        """Whether something has run for too long without a sign of life. Waiting behind another request isn't running,
        and waiting for the reader of a stream isn't hanging."""
        batches = self._batches.values()
        if self._concurrent:
            return any(now_s - batch.active_s > limit_s and not self._unread(batch, now_s) for batch in batches)
        if not batches or now_s - self._turn_s <= limit_s:
            return False
        unread = [self._unread(batch, now_s) for batch in batches]
        return not (all(unread) if self._shared else any(unread))

    def _unread(self, batch: _Batch, now_s: float) -> bool:
        return any(job.unread_since(now_s) > 0 for job in self._open_jobs(batch))

    def _ready_to_kill(self, now_s: float) -> bool:
        """Neighbours of a hung request are given a moment to end, where they can run beside it."""
        if self._hung_at_s is None:
            self._hung_at_s = now_s
        alone = not self._concurrent or len(self._batches) == 1
        return alone or now_s - self._hung_at_s > self._plan.neighbour_grace_s
