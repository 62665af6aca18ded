"""Worker processes: their plan, channels, output, end and exit status; the reasons of their failures, the delays of
restarts, and their lines in the log."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import mmap
import os
import signal
import socket
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any, TypeAlias

import psutil

from ts.protocol.codes import REASON_OF_EXIT, SHOWS_STACKS
from ts.protocol.shared import PROGRESS_BYTES, SHARED_BYTES, has_begun, spent, waiting
from ts.protocol.text import unmarked
from ts_frontend.scheduling.batcher import Repeats
from ts_frontend.workers.calls import Answer
from ts_frontend.workers.cluster.resources import ClusterRequest
from ts_frontend.workers.in_flight import BatchRecorder, OnResponse, Spent
from ts_frontend.workers.ranks import Rendezvous
from ts_frontend.workers.resources import Device, Place, WorkerLimits

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """The end of a process. `code`: as in subprocess (negative: the signal), None if it is unknown."""

    code: int | None

    @staticmethod
    def of_wait_status(status: int) -> ExitStatus:
        return ExitStatus(os.waitstatus_to_exitcode(status))

    @property
    def by_sigkill(self) -> bool:
        return self.code == -signal.SIGKILL

    def describe(self) -> str:
        """For people: `killed by SIGKILL (out of memory?)`, `exit code 1`."""
        if self.code is None:
            return "ended for an unknown reason"
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        if -self.code in _FAULTS:
            return f"killed by {name} (a fault in native code; its log has the stack)"
        return f"killed by {name}" + (" (out of memory?)" if self.by_sigkill else "")

    def sentence(self) -> str:
        if self.code is None:
            return "It ended for an unknown reason"
        if self.code in REASON_OF_EXIT:
            return f"{REASON_OF_EXIT[self.code]} ({self.describe()})"
        return f"It ended with {self.describe()}" if self.code >= 0 else f"It was {self.describe()}"


_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
LINE_BYTES_MAX = 64 * 1024
#: The time for a worker to write its threads' stacks, enough also on a busy machine.
STACKS_S = 0.5
#: The most bytes read at a time, so that a worker that prints endlessly doesn't block the event loop.
READ_BYTES = 8 * 1024
#: The most reads at the end of a pipe: together more than it holds (64 KiB).
PIPE_READS_MAX = 16


def resident_bytes(pid: int) -> int:
    """Physical memory of a process, shared pages included; 0 when it has ended."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


class LineReader:
    """Reads a pipe and passes on whole lines; a line longer than LINE_BYTES_MAX is split."""

    def __init__(self, fd: int, stream: str, on_line: Callable[[str, str], None]) -> None:
        os.set_blocking(fd, False)
        self._fd: int | None = fd
        self._stream = stream
        self._on_line = on_line
        self._rest = b""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self._readable)

    def _readable(self) -> bool:
        """Returns True when there may be more to read."""
        if self._fd is None:
            return False
        try:
            data = os.read(self._fd, READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        if not data:
            self._close()
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._emit(line)
        if len(self._rest) > LINE_BYTES_MAX:
            self._emit(self._rest)
            self._rest = b""
        return True

    def _emit(self, line: bytes) -> None:
        self._on_line(self._stream, line.rstrip(b"\r").decode("utf-8", "backslashreplace"))

    def finish(self) -> None:
        """Reads the rest of the pipe after its writer's end, and closes it, even if a child still writes."""
        for _ in range(PIPE_READS_MAX):
            if not self._readable():
                break
        self._close()

    def _close(self) -> None:
        if self._fd is None:
            return
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._fd = None
        if self._rest:
            self._emit(self._rest)
            self._rest = b""


TAIL_LINES_MAX = 100
TAIL_LINE_CHARS_MAX = 1000


#: Takes a worker's output, line by line: (stream, line), where the stream is "stdout" or "stderr".
LineSink: TypeAlias = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class TorchrunGroup:
    """A worker of several processes, started by torchrun with these `words`. `lockstep`: all ranks get every request
    (tensor parallel), otherwise only rank 0 (pipeline parallel)."""

    count: int
    words: tuple[str, ...]
    lockstep: bool


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A worker process to start: `env` is the whole environment; `python` another interpreter than the server's, or
    ""; `torchrun` for a worker of several processes; `worker_id` names it there; `with_torch`: it is forked from a
    process that has imported torch, if there is one; otherwise its handler's import takes a second or more. `holds`:
    the process is a holder, which loads the model and forks its workers. `cluster`: its requirements of the cluster
    that places it, None for a process of this machine."""

    name: str
    env: Mapping[str, str]
    python: str = ""
    cwd: str | None = None
    torchrun: TorchrunGroup | None = None
    worker_id: int = 0
    with_torch: bool = True
    holds: bool = False
    cluster: ClusterRequest | None = None

    def placed(self, worker_id: int, device: Device) -> ProcessSpec:
        """Returns the specification for one worker, restricted to the devices of its group."""
        if self.cluster is not None:
            return replace(self, worker_id=worker_id)
        if not device.group and self.torchrun is None:
            return self
        seen = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, device.group))} if device.group else {}
        return replace(self, env={**self.env, **seen}, worker_id=worker_id)


@dataclass(frozen=True, slots=True)
class Sharing:
    """Whether a model's workers are forked from a process that has loaded it once. `refusal`: the reason why this is
    impossible, although `wanted`."""

    wanted: bool = False
    refusal: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class WorkerPlan:
    """The settings by which all workers of a model version are started and supervised.

    `max_concurrency`: concurrent requests on a worker whose handler is async or a generator, or in one continuous
    batch; `answer`: answers the calls of its handler; `on_response`: counts the responses of a `decoupled` model
    (declared by its files or its handler); `on_spent`: gets the seconds that an ended worker spent reading and writing
    tensors; `repeats`: its handler may be called again for a request; `in_process`: its worker is a thread of the
    server, and isn't counted as a worker; `sharing`: how the workers get the model's weights; `files`: provides the
    model's files before a worker starts; `ends_alone`: of a request that takes too long, only the request ends, if the
    handler then lets go of it; `place`: gives a worker its place in the rate limiter, by its device's number and what
    makes it look for work.
    """

    spec: ProcessSpec
    load: dict[str, Any]
    startup_timeout_s: float
    response_timeout_s: float
    message_bytes_max: int
    workers_max: int | None = None
    max_concurrency: int = 64
    neighbour_grace_s: float = 5.0
    recorder: BatchRecorder | None = None
    answer: Answer | None = None
    on_response: OnResponse | None = None
    on_spent: Callable[[Spent], object] | None = None
    repeats: Repeats | None = None
    limits: WorkerLimits = WorkerLimits()
    decoupled: bool = False
    in_process: bool = False
    sharing: Sharing = Sharing()
    files: Callable[[], Awaitable[None]] | None = None
    ends_alone: bool = False
    place: Callable[[int | None, Callable[[], None]], Place] | None = None


def _shared_file() -> IO[bytes]:
    """An unnamed file, in memory if the system supports it, so that no directory has to be writable."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("torchrelay-progress", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b")
    return tempfile.TemporaryFile(prefix="torchrelay-progress-")


class Channels:
    """The socket, the file of shared memory, which begins with the progress, and the pipes between worker and frontend;
    the worker's ends are passed to it."""

    def __init__(self) -> None:
        self.sock, self.worker_sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        for end in (self.sock, self.worker_sock):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self.progress = _shared_file()
        self.progress.truncate(SHARED_BYTES)
        if hasattr(os, "memfd_create"):  # a worker that shrinks it would end this process at its next look (SIGBUS)
            fcntl.fcntl(self.progress, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.stdout, self.worker_stdout = os.pipe()
        self.stderr, self.worker_stderr = os.pipe()

    def worker_fds(self) -> list[int]:
        """Returns the worker's descriptors, in the order of the forkserver's protocol."""
        return [self.worker_sock.fileno(), self.progress.fileno(), self.worker_stdout, self.worker_stderr]

    def close_worker_side(self) -> None:
        self.worker_sock.close()
        os.close(self.worker_stdout)
        os.close(self.worker_stderr)

    def close(self) -> None:
        self.close_worker_side()
        self.sock.close()
        self.progress.close()
        os.close(self.stdout)
        os.close(self.stderr)


@dataclass(slots=True, eq=False)
class ForkedProcess:
    """A process that another process started for us; its end is reported by that process or by the pidfd."""

    pid: int
    name: str
    exited: asyncio.Future[ExitStatus] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future(), kw_only=True
    )
    pidfd: int | None = field(default=None, kw_only=True)

    def open_pidfd(self) -> None:
        if hasattr(os, "pidfd_open"):
            try:
                self.pidfd = os.pidfd_open(self.pid)
            except OSError as error:  # already gone, or a kernel without pidfds
                log.debug("no pidfd for %s: %s", self.pid, error)

    def kill(self) -> None:
        """Sends SIGKILL, unless the process has ended already."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.exited.done():
            return
        try:
            if self.pidfd is not None:
                signal.pidfd_send_signal(self.pidfd, number)
            else:
                os.kill(self.pid, number)
        except ProcessLookupError:
            pass

    def ended(self, how: ExitStatus) -> None:
        if not self.exited.done():
            self.exited.set_result(how)
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


@dataclass(slots=True, eq=False)
class WorkerProcess(ForkedProcess):
    """A running worker process. `sock` is the frontend's end of its socket; `rendezvous`: where the processes of a
    torchrun worker connect instead."""

    sock: socket.socket
    progress: IO[bytes]
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES_MAX))
    readers: list[LineReader] = field(default_factory=list)
    rendezvous: Rendezvous | None = None

    @property
    def lost(self) -> str:
        """The reason of its end, if it isn't the exit status; "" otherwise."""
        return self.rendezvous.lost if self.rendezvous is not None else ""

    @property
    def remote(self) -> bool:
        """Returns True for a process of another machine, whose id is not valid here."""
        return False

    @property
    def where(self) -> dict[str, Any]:
        """The machine of a remote process; {} for one of this machine."""
        return {}

    def kill_with_stacks(self) -> None:
        """Kills a process that hangs, after it has had a moment to write where its threads are to stderr. Processes of
        other machines and those of torchrun are killed at once."""
        if self.remote or self.rendezvous is not None:
            self.kill()
            return
        self._send(SHOWS_STACKS)
        asyncio.get_running_loop().call_later(STACKS_S, self.kill)

    async def last_notes(self) -> None:
        """Returns when `unbegun` knows all batches that a dead process had begun: at once for one of this machine."""

    def resident_bytes(self) -> int:
        """Returns the resident memory of all known processes of the worker."""
        pids = (self.pid, *(self.rendezvous.pids if self.rendezvous is not None else ()))
        return sum(map(resident_bytes, pids))

    def unbegun(self, batch_ids: Iterable[int]) -> set[int]:
        """Returns the batches for which the handler hasn't been called."""
        table = os.pread(self.progress.fileno(), PROGRESS_BYTES, 0)
        return {batch_id for batch_id in batch_ids if not has_begun(table, batch_id)}

    def spent(self) -> dict[int, tuple[float, float]]:
        """Seconds spent reading and writing tensors, by the size of the batch; empty for a released process."""
        return {} if self.progress.closed else spent(os.pread(self.progress.fileno(), PROGRESS_BYTES, 0))

    def waiting(self) -> int:
        """The requests that wait in the handler's engine; 0 for a released process."""
        return 0 if self.progress.closed else waiting(os.pread(self.progress.fileno(), PROGRESS_BYTES, 0))

    def shared_memory(self) -> mmap.mmap | None:
        """The memory with the arenas for large bodies; None where there is none: on other machines, between the
        processes of torchrun, and in a file on a disk."""
        if self.remote or self.rendezvous is not None or not hasattr(os, "memfd_create"):
            return None
        return mmap.mmap(self.progress.fileno(), SHARED_BYTES)

    def release(self) -> None:
        """Cleans up after the process: ends those it started, reads its last lines, and closes its files."""
        for leader in (self.pid, *(self.rendezvous.pids if self.rendezvous is not None else ())):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(leader, signal.SIGKILL)  # it led a session of its own
        self.progress.close()
        for reader in self.readers:
            reader.finish()


def attach(pid: int, spec: ProcessSpec, channels: Channels, sink: LineSink) -> WorkerProcess:
    """The worker process that was started as `pid`; its lines go to `sink`."""
    process = WorkerProcess(pid, spec.name, channels.sock, channels.progress)

    def take(stream: str, line: str) -> None:
        process.tail.append(unmarked(line)[1][:TAIL_LINE_CHARS_MAX])
        sink(stream, line)

    process.readers = [LineReader(channels.stdout, "stdout", take), LineReader(channels.stderr, "stderr", take)]
    process.open_pidfd()
    return process


PERIOD_S = 5.0

#: Process ids with their start times: an id alone may be used again.
Zombies = frozenset[tuple[int, float]]


def zombies() -> Zombies:
    """Returns the children of this process that have ended and that nobody has waited for."""
    found = set()
    for child in psutil.Process().children():
        try:
            if child.status() == psutil.STATUS_ZOMBIE:
                found.add((child.pid, child.create_time()))
        except psutil.Error:
            continue
    return frozenset(found)


def reap(before: Zombies) -> Zombies:
    """Waits for the zombies that already existed `before`: the server's own children are waited for at once by their
    starters. Returns the remaining ones, the next call's `before`. Blocking."""
    now = zombies()
    for pid, _ in now & before:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            pass
    return now - before


async def reap_orphans(period_s: float = PERIOD_S) -> None:
    """Reaps orphans forever, for a server that is process 1. A failure is logged and doesn't end it."""
    before: Zombies = frozenset()
    while True:
        await asyncio.sleep(period_s)
        try:
            before = await asyncio.to_thread(reap, before)
        except Exception:
            log.exception("Processes that lost their parent could not be waited for")


#: `RECOVERY` of `telemetry.logging.logs`.
recovery_log = logging.getLogger("ts_frontend.recovery")
#: A worker's states, in TorchServe's log.
WORKER_STARTED, MODEL_LOADED = "WORKER_STARTED", "WORKER_MODEL_LOADED"
DELAY_S_FIRST = 0.5
#: The most last lines that are shown of a worker that ended.
SHOWN_LINES_MAX = 20
#: The kinds of failures in the metrics: the worker did not load its model, died later, or did not answer in time.
NOT_LOADED, DIED, HUNG = "not_loaded", "died", "hung"


class StartFailed(Exception):
    """The process didn't start or didn't load its model. `code`: HTTP status; `tail`: its last lines; `cause`: the
    message without the common first words; `traceback`: of the handler's exception, which isn't logged yet; `died`:
    the process was killed, so another one may load the model successfully; `asked_for`: a call stopped it, which is no
    fault."""

    def __init__(
        self,
        message: str,
        code: int = 500,
        tail: Sequence[str] = (),
        *,
        cause: str = "",
        traceback: str = "",
        died: bool = False,
        asked_for: bool = False,
    ) -> None:
        super().__init__(message)
        self.message, self.code, self.tail = message, code, list(tail)
        self.cause, self.traceback, self.died = cause or message, traceback, died
        self.asked_for = asked_for


def _look_at(done: asyncio.Future[None]) -> None:
    if not done.cancelled():
        done.exception()


def unattended_future() -> asyncio.Future[None]:
    """Returns a future whose exception may stay unretrieved, if all waiters are cancelled."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.add_done_callback(_look_at)
    return future


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a worker ended or didn't start, as describe shows it. `failures`: its number of failures in a row."""

    at: float
    worker_id: int
    reason: str
    failures: int
    tail: list[str]

    def shown(self, **when: object) -> dict[str, object]:
        """For describe and the console; `when`: its time, as they tell it."""
        told = {"reason": self.reason, "failuresInARow": self.failures, "lastLines": self.tail[-SHOWN_LINES_MAX:]}
        return {"workerId": str(self.worker_id), **when, **told}


@dataclass(slots=True)
class Backoff:
    """Counts failures in a row. The first restart is at once, then the delay doubles up to `delay_s_max`, each time
    shortened by up to a half by chance, so that many workers don't come back in step."""

    give_up_s: float
    delay_s_max: float = 30.0
    failures: int = 0
    first_failure_s: float = 0.0

    def worked(self) -> None:
        """Resets the failures after an answer or a long time ready: the next failure counts as the first."""
        self.failures = 0

    def failed(self, now_s: float) -> None:
        if not self.failures:
            self.first_failure_s = now_s
        self.failures += 1

    def delay_s(self, chance: float) -> float:
        """Seconds until the next start; `chance` is in [0, 1)."""
        if self.failures <= 1:
            return 0.0
        whole = min(self.delay_s_max, DELAY_S_FIRST * 2.0 ** min(self.failures - 2, 10))
        return whole * (1 - chance / 2)

    def exhausted(self, now_s: float) -> bool:
        """True when it has been failing for longer than `give_up_s` (maxRetryTimeoutInSec)."""
        return self.failures > 0 and now_s - self.first_failure_s > self.give_up_s


@dataclass(frozen=True, slots=True)
class Replacement:
    """The reason why a worker was replaced without a failure."""

    at: float
    worker_id: int
    reason: str

    def shown(self, **when: object) -> dict[str, object]:
        return {"workerId": str(self.worker_id), **when, "reason": self.reason}


class Recovery:
    """Logs a worker's ends and returns in TorchServe's words, which alerts look for, with the worker's thread."""

    def __init__(self, worker_id: int, plan: WorkerPlan) -> None:
        self._id, self._plan = worker_id, plan
        self._log = logging.LoggerAdapter(recovery_log, {"source": f"W-{worker_id}-{plan.spec.name}"})
        self._recovering = False

    def ended(self, *, failures: int, begun: bool, was_ready: bool, hung: bool) -> None:
        """Logs that a worker has ended by itself, for the `failures`th time in a row. `begun`: it had a process;
        `hung`: it did not answer in time."""
        if begun:
            self._log.info("%s Worker disconnected. %s", self._id, MODEL_LOADED if was_ready else WORKER_STARTED)
        if hung:
            self._log.error("Number or consecutive unsuccessful inference %s", failures)
        if hung or not begun:
            what = "Backend worker did not respond in given time" if hung else "Failed start worker process"
            self._log.error("Backend worker error\norg.pytorch.serve.wlm.WorkerInitializationException: %s", what)
        else:
            plan = self._plan
            name, limit_s = ("response", plan.response_timeout_s) if was_ready else ("startup", plan.startup_timeout_s)
            what = "Backend worker monitoring thread interrupted or backend worker process died."
            self._log.info("%s, %sTimeout:%gsec", what, name, limit_s)
        if self._recovering:
            self._log.warning("Auto recovery failed again")
        else:
            self._recovering = True
            self._log.info("Auto recovery start timestamp: %s", round(time.time() * 1000))

    def retries(self, delay_s: float, known: str = "") -> None:
        """Logs that the next worker starts after so many seconds; `known`: a failure that was logged before."""
        if not known:
            self._log.info("Retry worker: %s in %g seconds.", self._id, round(delay_s, 1))
            return
        what = "Auto recovery failed again" if self._recovering else "Worker disconnected"
        self._recovering = True
        self._log.warning("%s: %s. Retry worker: %s in %g seconds.", what, known, self._id, round(delay_s, 1))

    def ready(self) -> None:
        """Logs that a worker has loaded its model after failures."""
        if self._recovering:
            self._recovering = False
            self._log.info("Auto recovery succeeded, reset recoveryStartTS")
