"""A worker process that has been started: what connects it with the frontend, what it wrote last, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import tempfile
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import IO, Protocol

from ts.protocol.marks import unmarked
from ts_frontend.workers.devices import Device
from ts_frontend.workers.exits import Exit
from ts_frontend.workers.output import LineReader
from ts_frontend.workers.ranks import Meeting

log = logging.getLogger(__name__)

TAIL_LINES_MAX = 100
TAIL_LINE_CHARS_MAX = 1000
PROGRESS_BYTES = 4096
NONE_STARTED = (1 << 64) - 1


class LineSink(Protocol):
    """Takes what a worker writes, line by line."""

    def __call__(self, stream: str, line: str) -> None:
        """`stream` is "stdout" or "stderr"."""


@dataclass(frozen=True, slots=True)
class Team:
    """A worker of several processes, started by torchrun with these `words`. `lockstep`: all of them get every request
    (tensor parallel), else only rank 0 (pipeline parallel)."""

    count: int
    words: tuple[str, ...]
    lockstep: bool


@dataclass(frozen=True, slots=True)
class Spec:
    """What to start: `env` is the whole environment; `python` another interpreter than the server's, or ""; `team` for
    a worker of several processes; `worker_id` names it there."""

    name: str
    env: Mapping[str, str]
    python: str = ""
    cwd: str | None = None
    team: Team | None = None
    worker_id: int = 0

    def placed(self, worker_id: int, device: Device) -> Spec:
        """For one worker: it sees only the devices of its group."""
        if not device.group and self.team is None:
            return self
        seen = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, device.group))} if device.group else {}
        return replace(self, env={**self.env, **seen}, worker_id=worker_id)


def _shared_file() -> IO[bytes]:
    """A file without a name, in memory where the system can: no directory has to be writable for it."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("torchrelay-progress", os.MFD_CLOEXEC), "w+b")
    return tempfile.TemporaryFile(prefix="torchrelay-progress-")


class Ends:
    """Both ends of everything that connects a worker with the frontend. Ours stay, the worker's are handed over."""

    def __init__(self) -> None:
        self.sock, self.worker_sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        for end in (self.sock, self.worker_sock):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self.progress = _shared_file()
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
    """A running worker process. `sock` is the frontend's end of its socket; `meeting`: where the processes of a worker
    of several connect instead."""

    pid: int
    name: str
    sock: socket.socket
    progress: IO[bytes]
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES_MAX))
    exited: asyncio.Future[Exit] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    readers: list[LineReader] = field(default_factory=list)
    pidfd: int | None = None
    meeting: Meeting | None = None

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
        for leader in (self.pid, *(self.meeting.pids if self.meeting is not None else ())):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(leader, signal.SIGKILL)  # it led a session of its own
        self.progress.close()
        for reader in self.readers:
            reader.finish()


def adopt(pid: int, spec: Spec, ends: Ends, sink: LineSink) -> Process:
    process = Process(pid, spec.name, ends.sock, ends.progress)

    def take(stream: str, line: str) -> None:
        process.tail.append(unmarked(line)[1][:TAIL_LINE_CHARS_MAX])
        sink(stream, line)

    process.readers = [LineReader(ends.stdout, "stdout", take), LineReader(ends.stderr, "stderr", take)]
    if hasattr(os, "pidfd_open"):
        try:
            process.pidfd = os.pidfd_open(pid)
        except OSError as error:  # already gone, or a kernel without pidfds
            log.debug("no pidfd for %s: %s", pid, error)
    return process
