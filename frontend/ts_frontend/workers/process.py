"""Worker processes: how one is started (forked from the forkserver, or exec'd), watched and ended.

The only module of the frontend that starts processes. A `Process` has no opinion: it tells when it ended and how,
and keeps the last lines it wrote.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from ts_frontend.workers.exits import Exit
from ts_frontend.workers.output import LineReader

log = logging.getLogger(__name__)

TAIL_LINES_MAX = 100
TAIL_LINE_CHARS_MAX = 1000
PROGRESS_BYTES = 4096
TOOL_READ_BYTES = 64 * 1024
NONE_STARTED = (1 << 64) - 1


class LineSink(Protocol):
    """Takes what a worker writes, line by line."""

    def __call__(self, stream: str, line: str) -> None:
        """`stream` is "stdout" or "stderr"."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What to start: `env` is the whole environment; `python` another interpreter than the server's, or ""."""

    name: str
    env: Mapping[str, str]
    python: str = ""
    cwd: str | None = None


class Ends:
    """Both ends of everything that connects a worker with the frontend. Ours stay, the worker's are handed over."""

    def __init__(self) -> None:
        self.sock, self.worker_sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        for end in (self.sock, self.worker_sock):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self.progress: IO[bytes] = tempfile.TemporaryFile(prefix="torchrelay-progress-")  # noqa: SIM115 - outlives this
        self.progress.write(NONE_STARTED.to_bytes(8, "little").ljust(PROGRESS_BYTES, b"\0"))
        self.progress.flush()
        self.stdout, self.worker_stdout = os.pipe()
        self.stderr, self.worker_stderr = os.pipe()

    def worker_fds(self) -> list[int]:
        """In the order of the forkserver's protocol."""
        return [self.worker_sock.fileno(), self.progress.fileno(), self.worker_stdout, self.worker_stderr]

    def close_worker_side(self) -> None:
        self.worker_sock.close()
        os.close(self.worker_stdout)
        os.close(self.worker_stderr)

    def close(self) -> None:
        """Both sides, when nothing was started."""
        self.close_worker_side()
        self.sock.close()
        self.progress.close()
        os.close(self.stdout)
        os.close(self.stderr)


@dataclass(slots=True, eq=False)
class Process:
    """A running worker process. `sock` is the frontend's end of its socket."""

    pid: int
    name: str
    sock: socket.socket
    progress: IO[bytes]
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES_MAX))
    exited: asyncio.Future[Exit] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    readers: list[LineReader] = field(default_factory=list)
    pidfd: int | None = None

    def kill(self) -> None:
        """SIGKILL, unless it has ended already."""
        if self.exited.done():
            return
        try:
            if self.pidfd is not None:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            else:
                os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def last_started_batch(self) -> int:
        """Id of the batch whose handler call the worker entered last; NONE_STARTED before the first."""
        return int.from_bytes(os.pread(self.progress.fileno(), 8, 0), "little")

    def ended(self, how: Exit) -> None:
        if not self.exited.done():
            self.exited.set_result(how)
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None

    def release(self) -> None:
        """It has ended: ends the processes it started, which nobody else would, and closes what was only needed while
        it lived (its last lines are read to their end first)."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # it led a session of its own
        self.progress.close()
        for reader in self.readers:
            reader.finish()


def adopt(pid: int, spec: Spec, ends: Ends, sink: LineSink) -> Process:
    process = Process(pid, spec.name, ends.sock, ends.progress)

    def take(stream: str, line: str) -> None:
        process.tail.append(line[:TAIL_LINE_CHARS_MAX])
        sink(stream, line)

    process.readers = [LineReader(ends.stdout, "stdout", take), LineReader(ends.stderr, "stderr", take)]
    if hasattr(os, "pidfd_open"):
        try:
            process.pidfd = os.pidfd_open(pid)
        except OSError as error:  # already gone, or a kernel without pidfds
            log.debug("no pidfd for %s: %s", pid, error)
    return process


class Launcher(Protocol):
    """Starts worker processes."""

    async def launch(self, spec: Spec, sink: LineSink) -> Process:
        """Raises OSError or LaunchFailed when the process can't be started."""

    async def close(self) -> None:
        """Ends what the launcher itself runs."""


class LaunchFailed(Exception):
    """A worker process couldn't be started; the message says why."""


class ExecLauncher:
    """A new interpreter for each worker: for models with an environment of their own, and without fork."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Task[None]] = set()

    async def launch(self, spec: Spec, sink: LineSink) -> Process:
        ends = Ends()
        sock_fd, progress_fd, stdout, stderr = ends.worker_fds()
        argv = [spec.python or sys.executable, "-m", "ts.runtime.main"]
        argv += ["--fd", str(sock_fd), "--progress-fd", str(progress_fd)]
        starting = asyncio.create_task(
            asyncio.to_thread(
                subprocess.Popen,
                argv,
                env=dict(spec.env),
                cwd=spec.cwd,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(sock_fd, progress_fd),
                start_new_session=True,
            )
        )
        try:
            child = await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._keep(self._discard(starting, ends))
            raise
        except OSError:
            ends.close()
            raise
        ends.close_worker_side()
        process = adopt(child.pid, spec, ends, sink)
        self._keep(self._wait(child, process))
        return process

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        waiter = asyncio.create_task(work)
        self._waiters.add(waiter)
        waiter.add_done_callback(self._waiters.discard)

    async def _discard(self, starting: asyncio.Task[subprocess.Popen[bytes]], ends: Ends) -> None:
        """Nobody waits for this start any more: its descriptors are in use until the process is there, then it ends."""
        try:
            child = await starting
        except OSError:
            return
        finally:
            ends.close()
        child.kill()
        await asyncio.to_thread(child.wait)

    async def _wait(self, child: subprocess.Popen[bytes], process: Process) -> None:
        if process.pidfd is None:
            code = await asyncio.to_thread(child.wait)
        else:
            await _readable(process.pidfd)
            code = child.wait()
        process.ended(Exit(code))

    async def close(self) -> None:
        if self._waiters:
            await asyncio.wait(self._waiters)


def resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, resolve, ready)
    try:
        await ready
    finally:
        loop.remove_reader(fd)


def start_forkserver(control_fd: int, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts the process that workers are forked from; its end of the control socket is `control_fd`."""
    argv = [sys.executable, "-m", "ts.runtime.forkserver", "--fd", str(control_fd)]
    return subprocess.Popen(argv, env=dict(env), stdin=subprocess.DEVNULL, pass_fds=(control_fd,))


async def run_tool(
    argv: Sequence[str], cwd: Path, timeout_s: float, on_line: Callable[[str], None], pass_fds: Sequence[int] = ()
) -> int | None:
    """Runs a program to its end and gives what it prints, line by line, to `on_line`. Its exit status.

    It is killed, with what it started, when it takes longer (None), or when the caller is cancelled. `pass_fds` are
    open in it too.
    """
    process = await asyncio.create_subprocess_exec(
        *argv,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        pass_fds=tuple(pass_fds),
    )
    try:
        return await asyncio.wait_for(_follow(process, on_line), timeout_s)
    except asyncio.TimeoutError:
        return None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _follow(process: asyncio.subprocess.Process, on_line: Callable[[str], None]) -> int:
    assert process.stdout is not None
    rest = b""
    while data := await process.stdout.read(TOOL_READ_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            on_line(line.decode(errors="replace").rstrip())
        rest = rest[-TOOL_READ_BYTES:]
    if rest:
        on_line(rest.decode(errors="replace").rstrip())
    return await process.wait()


async def tool_output(
    argv: Sequence[str],
    timeout_s: float,
    *,
    given: str = "",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> str | None:
    """What a small program prints, `given` on its standard input; None when it isn't there, fails or takes too long."""

    def call() -> str | None:
        try:
            done = subprocess.run(
                argv, input=given, capture_output=True, text=True, timeout=timeout_s, check=False, env=env, cwd=cwd
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None

    return await asyncio.to_thread(call)
