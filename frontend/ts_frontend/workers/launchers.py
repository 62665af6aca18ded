"""Launchers of worker processes (exec, torchrun, a thread of the server), and running of programs to their end.

With `spawning`, the only module of the frontend that starts processes.
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
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ts_frontend.tasks import owned, watched
from ts_frontend.workers.process import Channels, ExitStatus, LineSink, ProcessSpec, WorkerProcess, attach
from ts_frontend.workers.ranks import Rendezvous
from ts_frontend.workers.spawning import spawn

log = logging.getLogger(__name__)

TOOL_READ_BYTES = 64 * 1024


class Launcher(Protocol):
    async def launch(self, spec: ProcessSpec, sink: LineSink) -> WorkerProcess:
        """Raises OSError or LaunchFailed when the process can't be started."""

    async def close(self) -> None:
        """Ends the launcher's own processes."""


class LaunchFailed(Exception):
    """A worker process couldn't be started; the message says why."""


class ExecLauncher:
    """A new interpreter for each worker: for models with an environment of their own, and without fork."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Task[None]] = set()

    async def launch(self, spec: ProcessSpec, sink: LineSink) -> WorkerProcess:
        channels = Channels()
        sock_fd, progress_fd, _, _ = channels.worker_fds()
        module = "ts.runtime.holder" if spec.holds else "ts.runtime.main"
        words = [module, "--fd", str(sock_fd), "--progress-fd", str(progress_fd)]
        return await self.start(words, spec, channels, sink, (sock_fd, progress_fd))

    async def start(
        self,
        words: Sequence[str],
        spec: ProcessSpec,
        channels: Channels,
        sink: LineSink,
        pass_fds: tuple[int, ...] = (),
    ) -> WorkerProcess:
        """Runs a module, `words[0]`, in a new interpreter; `pass_fds` are open in it under the same numbers."""
        _, _, stdout, stderr = channels.worker_fds()
        starting = owned(
            asyncio.to_thread(
                spawn,
                [spec.python or sys.executable, "-m", *words],
                env=dict(spec.env),
                cwd=spec.cwd,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=pass_fds,
            )
        )
        try:
            child = await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._keep(self._discard(starting, channels))
            raise
        except Exception:
            channels.close()
            raise
        channels.close_worker_side()
        process = attach(child.pid, spec, channels, sink)
        self._keep(self._wait(child, process))
        return process

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        waiter = watched(work, "A wait for a worker process")
        self._waiters.add(waiter)
        waiter.add_done_callback(self._waiters.discard)

    async def _discard(self, starting: asyncio.Task[subprocess.Popen[bytes]], channels: Channels) -> None:
        """Ends a process whose start was cancelled, once it has started: until then its descriptors are in use."""
        try:
            child = await starting
        except OSError:
            return
        finally:
            channels.close()
        child.kill()
        await asyncio.to_thread(child.wait)

    async def _wait(self, child: subprocess.Popen[bytes], process: WorkerProcess) -> None:
        """Tells `process` how it ended; a process that can't be waited for ends at once, with an unknown status."""
        code: int | None = None
        try:
            if process.pidfd is None:
                code = await asyncio.to_thread(child.wait)
            else:
                await readable(process.pidfd)
                code = child.wait()
        except Exception:
            log.exception("The process %s of %s can't be waited for", child.pid, process.name)
            child.kill()
        process.ended(ExitStatus(code))

    async def close(self) -> None:
        if self._waiters:
            await asyncio.wait(self._waiters)


def resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def readable(fd: int) -> None:
    """Returns when the file descriptor is readable."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, resolve, ready)
    try:
        await ready
    finally:
        loop.remove_reader(fd)


async def run_tool(
    argv: Sequence[str],
    cwd: Path,
    timeout_s: float,
    on_line: Callable[[str], None],
    pass_fds: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
) -> int | None:
    """Runs a program to its end, gives its output, line by line, to `on_line`, and returns its exit status.

    The program is killed, with the processes it started, when it takes longer (result None) or the caller is
    cancelled. `pass_fds` are open in it too; `env` is its whole environment, this process's without one."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        pass_fds=tuple(pass_fds),
        env=None if env is None else dict(env),
    )
    try:
        return await asyncio.wait_for(_follow(process, on_line), timeout_s)
    except TimeoutError:
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
    """Returns the output of a small program, with `given` on its standard input; None if it isn't installed, fails or
    takes longer than `timeout_s`.

    It is killed, with the processes it started, when it takes longer, or when the caller is cancelled."""
    running: list[subprocess.Popen[str]] = []
    left = threading.Event()

    def call() -> str | None:
        try:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=env,
                cwd=cwd,
                start_new_session=True,
            )
        except OSError:
            return None
        running.append(child)
        with child:
            if left.is_set():
                _kill_session(child)
            try:
                output, _ = child.communicate(given, timeout=timeout_s)
            except (OSError, subprocess.TimeoutExpired):
                _kill_session(child)
                return None
        return output if child.returncode == 0 else None

    try:
        return await asyncio.to_thread(call)
    except asyncio.CancelledError:
        left.set()
        for child in running:
            _kill_session(child)
        raise


def _kill_session(child: subprocess.Popen[str]) -> None:
    """Kills a process that leads a session, and the processes it started there."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)


class TorchrunLauncher:
    """Starts workers by torchrun. `work_dir`: the directory of the processes' sockets."""

    def __init__(self, work_dir: Path, launcher: ExecLauncher) -> None:
        self._work_dir = work_dir
        self._exec = launcher

    async def launch(self, spec: ProcessSpec, sink: LineSink) -> WorkerProcess:
        """Starts torchrun; its processes connect when they have started. Raises OSError."""
        assert spec.torchrun is not None
        rendezvous = Rendezvous.open(self._work_dir, spec.torchrun.count, spec.torchrun.lockstep)
        ours = ["--rdzv-id", f"{spec.name}_{spec.worker_id}", "-m", "ts.runtime.torchrun", "rank"]
        words = ["ts.runtime.torchrun", "start", str(os.getpid()), *spec.torchrun.words, *ours]
        try:
            process = await self._exec.start(words, replace(spec, env={**spec.env, **rendezvous.env}), Channels(), sink)
        except BaseException:
            rendezvous.close()
            raise
        process.rendezvous = rendezvous
        return process

    async def close(self) -> None:
        """Does nothing: its processes belong to the exec launcher."""


@dataclass(slots=True, eq=False)
class InProcessWorker(WorkerProcess):
    """A worker that is a thread. It can't be killed; it ends as soon as its handler returns."""

    def kill(self) -> None:
        """Closes the worker's socket, which ends the thread."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # closed already
            pass
        self.ended(ExitStatus(None))

    def kill_with_stacks(self) -> None:
        self.kill()

    def release(self) -> None:
        self.progress.close()


class InProcessLauncher:
    """Starts workers as threads."""

    async def launch(self, spec: ProcessSpec, sink: LineSink) -> WorkerProcess:
        channels = Channels()
        sock_fd, progress_fd = (os.dup(fd) for fd in channels.worker_fds()[:2])
        channels.close_worker_side()
        for fd in (channels.stdout, channels.stderr):
            os.close(fd)
        process = InProcessWorker(os.getpid(), spec.name, channels.sock, channels.progress)
        loop = asyncio.get_running_loop()

        def live() -> None:
            from ts.runtime.main import live_in_process

            status = live_in_process(sock_fd, progress_fd)
            try:
                loop.call_soon_threadsafe(process.ended, ExitStatus(status))
            except RuntimeError:  # the loop has ended before its handler has
                pass

        threading.Thread(target=live, name=f"handler-{spec.name}", daemon=True).start()
        return process

    async def close(self) -> None:
        """Does nothing: threads end with their sockets."""
