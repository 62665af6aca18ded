"""One worker of a model from start to end: its process, its batches, and the batches' end when it dies."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from enum import Enum
from mmap import mmap
from typing import Any, Final

from ts.protocol.frames import (
    CALL_ID_MIN,
    Call,
    Cancel,
    Chunk,
    Credit,
    Failed,
    Feed,
    Load,
    LoadFailed,
    Measure,
    Message,
    Pieces,
    Predict,
    Ready,
    Stop,
    Times,
)
from ts_frontend.errors import DeadlineExceeded, Draining, InvalidArgument, Quarantined, WorkerDied
from ts_frontend.job import Job, Whereabouts
from ts_frontend.scheduling.batcher import halves, one_by_one
from ts_frontend.scheduling.queues import AHEAD_S, FULL, WorkQueue
from ts_frontend.tasks import watched
from ts_frontend.workers.calls import HandlerCalls
from ts_frontend.workers.in_flight import Batch, Connection, InFlight, ResponseCounter, Serial, Spent
from ts_frontend.workers.launchers import Launcher
from ts_frontend.workers.process import (
    TAIL_LINE_CHARS_MAX,
    TAIL_LINES_MAX,
    ExitStatus,
    LineSink,
    StartFailed,
    WorkerPlan,
    WorkerProcess,
    unattended_future,
)
from ts_frontend.workers.ranks import RankConnections
from ts_frontend.workers.resources import Device, Place

log: Final = logging.getLogger(__name__)


class WorkerState(Enum):
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


NEXT_STATE: Final[dict[WorkerState, frozenset[WorkerState]]] = {
    WorkerState.STARTING: frozenset({WorkerState.LOADING, WorkerState.FAILED, WorkerState.STOPPED}),
    WorkerState.LOADING: frozenset({WorkerState.READY, WorkerState.FAILED, WorkerState.STOPPED}),
    WorkerState.READY: frozenset({WorkerState.DRAINING, WorkerState.FAILED, WorkerState.STOPPED}),
    WorkerState.DRAINING: frozenset({WorkerState.STOPPED, WorkerState.FAILED}),
    WorkerState.STOPPED: frozenset(),
    WorkerState.FAILED: frozenset(),
}


STOP_S_MAX = 5.0
#: Seconds for the answers of a loading worker that have come when its time is over.
LAST_LOOK_S: Final = 0.1
EXIT_STATUS_S_MAX = 3.0
#: The share of responseTimeout that a model's own call may take, so that it gets an error before it counts as hanging
#: itself.
CALL_LIMIT_PART: Final = 0.9
#: The workers that may die before they begin a request; then it isn't tried again.
DEATHS_MAX: Final = 3
#: The most requests that the log names as lost with their worker.
LOGGED_IDS_MAX: Final = 20


class Worker:
    """A process and the batches on it. `ended` gets the reason of its end; the queue dispatches batches to it.
    `sharers`: the workers that share the machine's cores, including this one."""

    def __init__(self, worker_id: int, plan: WorkerPlan, device: Device, work: WorkQueue, sharers: int = 1) -> None:
        self.id = worker_id
        self.device = device
        self.state = WorkerState.STARTING
        self.started_at = time.time()
        self.info: dict[str, Any] = {}
        self.answered = 0  # requests
        self.ready_at_s = math.inf
        self._recorder = plan.recorder
        self._created_s = time.monotonic()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.process: WorkerProcess | None = None
        self._plan = plan
        self._sharers = sharers
        self._work = work
        self._connection: Connection | RankConnections | None = None
        self._calls: HandlerCalls | None = None
        self._loaded: asyncio.Future[None] = unattended_future()
        #: Processes that compute together get one batch at a time.
        self._lockstep = plan.spec.torchrun is not None and plan.spec.torchrun.lockstep
        self._running = InFlight(Serial()) if self._lockstep else InFlight()
        self._idle: asyncio.Future[None] | None = None
        self._hung_at_s: float | None = None
        #: Failures of whole batches by the batch's id, until all received messages are handled.
        self._raised: dict[int, list[tuple[Job, Failed]]] = {}
        #: It was killed because it didn't answer or didn't load its model in time.
        self.hung = False
        self._death_note = ""
        self._out_of_memory = False
        self._settling: asyncio.Task[None] | None = None
        #: While it is ready, if its batches take resources.
        self._place: Place | None = None

    # --- life

    def _enter(self, state: WorkerState) -> None:
        if state not in NEXT_STATE[self.state]:
            raise AssertionError(f"worker {self.id}: {self.state.value} -> {state.value}")
        self.state = state

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else 0

    @property
    def pids(self) -> list[int]:
        """Returns the ids of the worker's known processes on this machine."""
        if self.process is None or self.process.remote:
            return []
        return [self.process.pid, *(self.process.rendezvous.pids if self.process.rendezvous is not None else ())]

    @property
    def node(self) -> dict[str, Any]:
        """Returns the machine of a remote worker; {} for a local one."""
        return self.process.where if self.process is not None else {}

    @property
    def memory_bytes(self) -> int:
        """Returns the present resident memory of its processes; 0 without any."""
        return self.process.resident_bytes() if self.process is not None else 0

    @property
    def spent(self) -> Spent:
        """Returns the seconds spent reading and writing tensors; empty after its end."""
        return self.process.spent() if self.process is not None else {}

    @property
    def concurrency(self) -> int:
        """The requests that its handler runs side by side, no more than its engine has places for. 0: it runs one batch
        after the other."""
        if self.info.get("handler_kind", "blocking") == "blocking":
            return 0
        most = self._plan.max_concurrency
        return min(most, (self.info.get("openai") or {}).get("slots") or most)

    @property
    def waiting(self) -> int:
        """The running requests that only wait in its handler's engine."""
        return min(self.process.waiting(), len(self._running.jobs)) if self.process is not None else 0

    @property
    def busy(self) -> bool:
        return bool(self._running.batches)

    @property
    def status(self) -> str:
        """READY if it can serve, otherwise UNLOADING: TorchServe's two states."""
        return "READY" if self.state is WorkerState.READY else "UNLOADING"

    async def start(self, launcher: Launcher, sink: LineSink) -> None:
        """Starts the process and loads the model. Raises StartFailed with the reason if either fails or takes too
        long. Any other exception, also a cancellation, ends the process."""
        plan = self._plan
        try:
            if plan.files is not None:
                await plan.files()
            self.process = await launcher.launch(plan.spec.placed(self.id, self.device), sink)
        except Exception as error:
            self._enter(WorkerState.FAILED)
            raise StartFailed(f"Worker process couldn't be started: {error}") from error
        if self._death_note:  # killed before it had a process; asyncio.wait_for may have lost the cancellation
            self.kill(self._death_note)
            raise StartFailed(self._death_note)
        self._enter(WorkerState.LOADING)
        try:
            await self._load(self.process)
        except StartFailed:
            raise
        except BaseException as error:
            stopped = isinstance(error, asyncio.CancelledError)
            self.kill("stopped while loading" if stopped else f"the server failed: {type(error).__name__}: {error}")
            raise

    async def _load(self, process: WorkerProcess) -> None:
        plan = self._plan
        shared = process.shared_memory()
        connection = self._connection = self._connect(process, shared)
        process.exited.add_done_callback(lambda _: connection.finish("process ended"))
        own = {"gpu_id": self.device.seen_id, "device_type": self.device.kind, "worker_id": self.id}
        connection.push(Load({**plan.load, **own, "workers": self._sharers, "arenas": shared is not None}))
        try:
            await asyncio.wait_for(asyncio.shield(self._loaded), plan.startup_timeout_s)
        except TimeoutError:
            # If the server stood still (suspended, paused), the worker's word that it is ready may wait to be read.
            await asyncio.wait({self._loaded}, timeout=LAST_LOOK_S)
            if self._loaded.done():
                return await self._loaded
            await self._abandon(f"Worker didn't load its model within {plan.startup_timeout_s:g} s (startupTimeout)")

    def _connect(self, process: WorkerProcess, shared: mmap | None) -> Connection | RankConnections:
        size_max = self._plan.message_bytes_max
        if process.rendezvous is None:
            return Connection(process.sock, self._received, self._closed, size_max, shared)
        process.sock.close()
        return RankConnections(process.rendezvous, process.progress.fileno(), self._received, self._closed, size_max)

    async def _abandon(self, reason: str) -> None:
        self.hung = True
        self.kill(reason)
        await asyncio.wait({self.ended})
        raise StartFailed(reason, 500, self.tail())

    def jobs(self) -> list[Job]:
        return list(self._running.open_jobs())

    def tail(self) -> list[str]:
        return list(self.process.tail) if self.process is not None else []

    def kill(self, reason: str, *, out_of_memory: bool = False) -> None:
        """Ends the process at once; its started requests fail with `reason`."""
        self._death_note = self._death_note or reason
        self._out_of_memory |= out_of_memory
        if self.process is None:
            return
        if self.hung:
            self.process.kill_with_stacks()
        else:
            self.process.kill()
        if self._connection is not None:
            self._connection.close()
        else:
            self.process.sock.close()
        self._closed(reason)

    def retire(self) -> None:
        """Stops taking new requests."""
        if self.state is WorkerState.READY:
            self._enter(WorkerState.DRAINING)

    async def drain(self, timeout_s: float | None) -> bool:
        """Waits until all its requests are answered (None: without a limit); returns False after the timeout."""
        self.retire()
        if not self._running.batches:
            return True
        if self._idle is None:
            self._idle = asyncio.get_running_loop().create_future()
        ends: set[asyncio.Future[Any]] = {self._idle, self.ended}
        done, _ = await asyncio.wait(ends, timeout=timeout_s, return_when="FIRST_COMPLETED")
        return bool(done)

    async def stop(self, timeout_s: float | None = None) -> None:
        """Retires, waits at most `timeout_s` for running requests, and ends the process. Unfinished requests return
        to the queue and run again elsewhere, unless the caller has got a part of the answer."""
        idle = await self.drain(timeout_s)
        if not idle:
            self._give_back()
        if self.ended.done():
            return
        if idle and self._connection is not None and self.state is WorkerState.DRAINING:
            self._connection.push(Stop())
            self._connection.flush()
            await asyncio.wait({self.ended}, timeout=STOP_S_MAX)
        if not self.ended.done():
            self.kill("stopped")
            await asyncio.wait({self.ended}, timeout=STOP_S_MAX)

    def _give_back(self) -> None:
        running, back = self._running, []
        for job in running.open_jobs():
            if not job.repeatable:
                job.fail(Draining("Worker was stopped while it streamed this answer"))
        for batch in running.batches.values():
            back += self._reclaimed(batch)
        self._forget_all()
        self._work.put_back(back)

    def _reclaimed(self, batch: Batch) -> list[Job]:
        """Returns the jobs of a batch to put back into the queue as if they had not been sent. A job that ran alone
        is put back at once, to run alone again."""
        jobs = batch.open_jobs()
        if not jobs or batch.id != self._running.isolated:
            return jobs
        self._work.run_again(one_by_one(jobs))
        return []

    def _forget_all(self) -> None:
        self._running.clear()
        if self._place is not None:
            self._place.end(self._place.running)
        self._became_idle()

    # --- as a worker of its queue

    def room(self, ahead_s: float = AHEAD_S) -> float:
        """As of `QueueWorker`."""
        if self.state is not WorkerState.READY or self._hung_at_s is not None:
            return FULL
        room = self._running.room(ahead_s)
        if self._place is not None and room != FULL and not self._place.may_run():
            return FULL
        return room

    def holds(self, job: Job) -> bool:
        """Returns True while the process computes the job, even if no caller waits for it."""
        return job.id in self._running.jobs

    def dispatch(self, jobs: list[Job], now_s: float) -> None:
        """Sends these jobs to the process as one batch, with the next `flush`."""
        running, connection = self._running, self._connection
        batch = running.begin(jobs, self, now_s)
        assert connection is not None
        try:
            if len(jobs) == 1 and isinstance(connection, Connection):
                connection.push_request(batch.id, jobs[0])
            else:
                connection.push(Predict(batch.id, [job.item() for job in jobs]))
        except ValueError as error:
            running.withdraw(batch)
            self._refuse(jobs, error)
        else:
            if self._place is not None:
                self._place.begin()

    def dispatch_alone(self, job: Job, now_s: float) -> None:
        self.dispatch([job], now_s)
        self._running.isolate(job)

    def reserve(self) -> None:
        self._running.close_until_idle()

    def _refuse(self, jobs: list[Job], error: ValueError) -> None:
        """Runs the jobs of a batch that is too large for a message one by one; a single job that is too large fails."""
        if len(jobs) == 1:
            jobs[0].fail(InvalidArgument(f"The request can't be passed to a worker: {error}"))
            self._work.wake()
        else:
            for job in jobs:
                job.enqueue(self)
            for job in jobs:
                self.dispatch([job], time.monotonic())

    def flush(self) -> None:
        if self._connection is not None:
            self._connection.flush()

    def look(self) -> None:
        if isinstance(self._connection, Connection):
            self._connection.look()

    # --- as a job's owner

    def release(self, job: Job) -> None:
        entry = self._running.jobs.get(job.id)
        if self._connection is not None and entry is not None:
            self._connection.push(Cancel(job.id))
            if self._calls is not None:
                self._calls.release(entry[1])

    def grant(self, job: Job, size_bytes: int) -> None:
        entry = self._running.jobs.get(job.id)
        if entry is not None and self._connection is not None:
            self._running.active(entry[1], time.monotonic())
            self._connection.push(Credit(job.id, size_bytes))

    def feed(self, job: Job, feed: Feed) -> None:
        entry = self._running.jobs.get(job.id)
        if entry is not None and self._connection is not None:
            self._running.active(entry[1], time.monotonic())
            self._connection.push(feed)

    def measure(self, job: Job) -> Whereabouts:
        running = self._running
        if self._connection is not None:
            self._connection.push(Measure(job.id))
        batch = next(reversed(running.batches.values()))
        free_s = running.free_since_s()
        return Whereabouts(
            self.id, len(batch.jobs), self.ready_at_s, None if free_s is None else max(free_s, self.ready_at_s)
        )

    # --- messages of the process

    def _received(self, messages: list[Message]) -> None:
        finished = False
        running = self._running
        jobs = running.jobs
        now_s = time.monotonic()
        for message in messages:
            if type(message) is Chunk:
                job_id, last = message[0], message[2]
                entry = jobs.get(job_id)
                if entry is not None:
                    job, batch = entry
                    job.deliver(message, now_s)
                    if last:
                        finished |= self._finish(job_id, batch, now_s)
                    else:
                        running.active(batch, now_s)
            elif isinstance(message, Pieces):
                entry = jobs.get(message.job_id)
                if entry is not None:
                    entry[0].deliver_pieces(message, now_s)
                    if message.last:
                        finished |= self._finish(message.job_id, entry[1], now_s)
                    else:
                        running.active(entry[1], now_s)
            elif isinstance(message, Failed):
                entry = jobs.get(message.job_id)
                if entry is not None:
                    if message.whole and self._plan.repeats is not None and entry[0].repeatable:
                        self._raised.setdefault(entry[1].id, []).append((entry[0], message))
                    else:
                        entry[0].failed_by_worker(message)
                        if not message.begun:
                            entry[1].jobs.remove(entry[0])
                    finished |= self._finish(message.job_id, entry[1], now_s)
            else:
                self._control(message)
        if self._raised:
            self._halve()
        if finished:
            self._work.wake()

    def _finish(self, job_id: int, batch: Batch, now_s: float) -> bool:
        """Completes one answer; returns True when that ends its batch."""
        running = self._running
        if not running.finish(job_id, batch):
            return False
        if self._place is not None:
            self._place.end()
        waited_s, worked_s = running.measure(batch, now_s)
        jobs, recorder = batch.jobs, self._recorder
        self.answered += len(jobs)
        if recorder is not None and jobs:
            recorder.answered(jobs, waited_s, worked_s, now_s)
        if not running.batches:
            self._became_idle()
        return True

    def _halve(self) -> None:
        repeats = self._plan.repeats
        assert repeats is not None
        raised, self._raised = self._raised, {}
        for failures in raised.values():
            jobs = [job for job, _ in failures if not job.done]
            repeats.after_failures += len(jobs)
            log.warning(
                "Worker %s of %s: %d requests that failed together (%s) run again in halves",
                *(self.id, self._plan.spec.name, len(jobs), failures[0][1].message),
            )
            self._work.run_again(halves(jobs))

    def _became_idle(self) -> None:
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _control(self, message: Message) -> None:
        if isinstance(message, Ready):
            self.info = message.info
            if not self._lockstep:
                self._running.set_concurrency(str(message.info.get("handler_kind")), self.concurrency)
            if self._plan.place is not None:
                self._place = self._plan.place(self.device.gpu_id, self._work.wake)
                self._running.hold_nothing_ahead()
            self._enter(WorkerState.READY)
            self.ready_at_s = time.monotonic()
            self._count_responses(message.info)
            if self._recorder is not None:
                self._recorder.loaded(self.id, time.monotonic() - self._created_s)
            if not self._loaded.done():
                self._loaded.set_result(None)
        elif isinstance(message, Call) or (isinstance(message, (Credit, Cancel)) and message.job_id >= CALL_ID_MIN):
            self._called(message)
        elif isinstance(message, Credit):
            entry = self._running.jobs.get(message.job_id)
            if entry is not None:
                entry[0].allow(message.size_bytes)
        elif isinstance(message, Times):
            entry = self._running.jobs.get(message.job_id)
            if entry is not None and entry[0].timing is not None:
                entry[0].timing.measured(message, time.monotonic())
        elif isinstance(message, LoadFailed):
            info = message.info
            self._death_note = f"Model couldn't be loaded: {info.get('message')}"
            if not self._loaded.done():
                traceback = str(info.get("traceback") or "")
                tail = [line[:TAIL_LINE_CHARS_MAX] for line in traceback.splitlines()[-TAIL_LINES_MAX:]]
                cause, code = str(info.get("message")), int(info.get("code", 500))
                self._loaded.set_exception(StartFailed(self._death_note, code, tail, cause=cause, traceback=traceback))
            self.kill(self._death_note)

    def _count_responses(self, info: Mapping[str, Any]) -> None:
        connection, on_response = self._connection, self._plan.on_response
        decoupled = self._plan.decoupled or (info.get("signature") or {}).get("decoupled")
        if not decoupled or on_response is None or not isinstance(connection, Connection):
            return
        counter, jobs = ResponseCounter(on_response), self._running.jobs

        def received(messages: list[Message]) -> None:
            counter.note(messages, jobs)
            self._received(messages)

        connection.on_messages = received

    def _called(self, message: Call | Credit | Cancel) -> None:
        calls, answer = self._calls, self._plan.answer
        if calls is None:
            if answer is None or self._connection is None:
                return
            limit_s = self._plan.response_timeout_s * CALL_LIMIT_PART
            name = str(self._plan.load.get("model_name") or self._plan.spec.name)
            calls = HandlerCalls(answer, name, self._connection.push, self._running.alive, limit_s)
            self._calls = calls
            self._running.hold_nothing_ahead()
        if isinstance(message, Call):
            batch_id = message.what.get("batch")
            calls.begin(message, self._running.batches.get(batch_id) if isinstance(batch_id, int) else None)
        elif isinstance(message, Credit):
            calls.grant(message)
        else:
            calls.cancel(message.job_id)

    # --- its end

    def _closed(self, reason: str) -> None:
        """Handles the end of the socket: the worker counts as dead, even if its process still runs."""
        if self.state in (WorkerState.STOPPED, WorkerState.FAILED):
            return
        if self._calls is not None:
            self._calls.close()
        expected = self.state is WorkerState.DRAINING and not self._running.batches
        self._enter(WorkerState.STOPPED if expected else WorkerState.FAILED)
        self._settling = watched(self._settle(reason), f"The end of worker {self.id}")

    def _put_back_unstarted(self) -> None:
        """Puts jobs whose handler call had not begun back into the queue. If no other batch had begun, reading the
        first one may have ended the worker: its jobs then go alone, and after `DEATHS_MAX` workers they count as
        begun."""
        assert self.process is not None
        batches = self._running.batches
        unbegun = sorted(self.process.unbegun(batches))
        if unbegun and len(unbegun) == len(batches):
            suspects = batches[unbegun[0]].open_jobs()
            for job in suspects:
                job.deaths += 1
                job.alone = True
            if any(job.deaths >= DEATHS_MAX for job in suspects):
                del unbegun[0]
        back: list[Job] = []
        for batch_id in unbegun:
            back += self._reclaimed(batches.pop(batch_id))
        if back:
            self._work.put_back(back)

    async def _settle(self, reason: str) -> None:
        """Finds the cause of the process's end and fails its started requests. Sets `ended` in any case."""
        process = self.process
        assert process is not None
        how = ExitStatus(None)
        try:
            if process.remote:  # its end may be told late
                await process.last_notes()
                self._put_back_unstarted()
            how = await self._exit_of(process)
            try:
                self._put_back_unstarted()
            finally:
                if self._plan.on_spent is not None:
                    self._plan.on_spent(process.spent())
                process.release()
        except Exception:
            log.exception("Worker %s of %s: its end could not be settled", self.id, self._plan.spec.name)
        note = self._death_note or process.lost or how.sentence()
        try:
            out_of_memory = self._out_of_memory or (how.by_sigkill and not self._death_note)
            begun = list(self._running.batches.values())
            self._forget_all()
            failed: list[Job] = []
            for batch in begun:
                again = self._run_again(batch, note) if self._plan.repeats is not None else ()
                failed += [job for job in batch.open_jobs() if job not in again]
            if failed:
                ids = " ".join(job.request_id for job in failed[:LOGGED_IDS_MAX])
                more = f" and {len(failed) - LOGGED_IDS_MAX} more" if len(failed) > LOGGED_IDS_MAX else ""
                log.warning(
                    "Worker %s of %s died: %s; request ids: %s%s", self.id, self._plan.spec.name, note, ids, more
                )
            for job in failed:
                job.fail(WorkerDied(f"Worker died. {note}.", 507 if out_of_memory else 500, hung=self.hung))
        finally:
            if self._place is not None:
                self._place.leave()
            if not self._loaded.done():
                killed = how.code is None or how.code < 0 or process.rendezvous is not None
                message = f"Worker process ended while loading: {note}"
                self._loaded.set_exception(StartFailed(message, 500, self.tail(), died=killed and not self._death_note))
            self.ended.set_result(note if self._death_note or how.code else f"{note} ({reason})")

    def _run_again(self, batch: Batch, note: str) -> Sequence[Job]:
        """The jobs of a begun batch to repeat: none whose second worker died, which are refused, or that hung."""
        running, repeats = self._running, self._plan.repeats
        assert repeats is not None
        silent_s = time.monotonic() - batch.active_s
        if self.hung and (not running.concurrent or silent_s > self._plan.response_timeout_s):
            return ()
        jobs = [job for job in batch.open_jobs() if job.repeatable]
        where = f"worker {self.id} of {self._plan.spec.name}"
        if batch.id == running.isolated:
            for job in jobs:
                repeats.quarantined += 1
                log.error("Request %s is not run again: %s is the second that died with it", job.request_id, where)
                job.fail(Quarantined(f"Two workers died while they ran this request; it is not run again. {note}."))
            return ()
        repeats.after_deaths += len(jobs)
        for job in jobs:
            log.warning("Request %s runs once more: %s died with it", job.request_id, where)
        self._work.run_again(one_by_one(jobs))
        return jobs

    async def _exit_of(self, process: WorkerProcess) -> ExitStatus:
        """Waits for the process's end, after which no batch begins. One that lives on without its socket is killed."""
        for _ in range(2):
            try:
                return await asyncio.wait_for(asyncio.shield(process.exited), EXIT_STATUS_S_MAX)
            except TimeoutError:
                process.kill()
        return ExitStatus(None)

    # --- time

    def end_late(self, now_s: float) -> float:
        """Ends the running requests whose deadline has passed, and returns the earliest deadline of the rest
        (`time.monotonic()` seconds)."""
        return self._running.end_late(now_s, self)

    def tick(self, now_s: float) -> None:
        """Ends hanging requests and unread streams. Called a few times per second."""
        if self.state not in (WorkerState.READY, WorkerState.DRAINING):
            return
        running, limit_s = self._running, self._plan.response_timeout_s
        if running.shared and running.count_stalled(now_s):
            self._work.wake()
        self.end_late(now_s)
        running.end_unread(now_s, limit_s, self)
        if self._plan.ends_alone:
            self._end_silent(now_s, limit_s)
        if not running.overdue(now_s, limit_s):
            self._not_hung()
        elif self._ready_to_kill(now_s):
            self.hung = True
            self.kill(f"It gave no answer for {limit_s:g} s (responseTimeout)")

    def _end_silent(self, now_s: float, limit_s: float) -> None:
        """Ends the requests that have had no answer for too long. One that its handler holds on to for as long again is
        a hung worker's."""
        for job, batch in list(self._running.jobs.values()):
            if not job.done and now_s - batch.active_s > limit_s and not batch.unread(now_s):
                job.expire(DeadlineExceeded(f"The model gave no answer for {limit_s:g} s (responseTimeout)"))
                self.release(job)
                batch.active_s = now_s

    def _not_hung(self) -> None:
        """Makes a hung worker accept requests again after an answer."""
        if self._hung_at_s is not None:
            self._hung_at_s = None
            self._work.wake()

    def _ready_to_kill(self, now_s: float) -> bool:
        """Whether a hanging worker may be killed now: concurrent requests get a moment to end first."""
        if self._hung_at_s is None:
            self._hung_at_s = now_s
        alone = not self._running.concurrent or len(self._running.batches) == 1
        return alone or now_s - self._hung_at_s > self._plan.neighbour_grace_s
