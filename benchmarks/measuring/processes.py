"""Starts processes, and ends every one of them with all descendants, however the benchmark ends."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil


def tree(root: psutil.Process) -> list[psutil.Process]:
    """The process and all its living descendants."""
    try:
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_s(root: psutil.Process) -> float:
    """User and system seconds of the tree. Children that have ended count with the parent that waited for them."""
    return sum(_cpu_s(process) for process in tree(root))


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)


END_S_MAX = 10.0
LOG_LINES_SHOWN = 15


class BenchmarkFailed(Exception):
    """A benchmark can't continue; the message has the reason and the remedy."""


@contextmanager
def failures_as_messages() -> Iterator[None]:
    """Ends a benchmark that fails in the block with the error's message, and with status 130 after Ctrl-C."""
    try:
        yield
    except BenchmarkFailed as error:
        sys.exit(f"\n{error}")
    except KeyboardInterrupt:
        sys.exit(130)


class ServerFailed(BenchmarkFailed):
    """A server didn't start, or ended by itself; the message has the last lines of its log."""


class Processes:
    """The processes that the benchmark has started."""

    def __init__(self) -> None:
        self._started: list[tuple[psutil.Popen, Path]] = []

    def start(self, words: Sequence[str], env: Mapping[str, str], folder: Path, log: Path) -> psutil.Process:
        """Starts a process in a session of its own: Ctrl-C reaches only the benchmark, which then ends the process. It
        keeps its bytecode, without which each start would compile every module."""
        env = {name: value for name, value in env.items() if name != "PYTHONDONTWRITEBYTECODE"}
        with log.open("wb") as output:
            process = psutil.Popen(
                list(words),
                env=env,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append((process, log))
        return process

    def check(self, only: psutil.Process | None = None) -> None:
        """Raises ServerFailed if one of the processes, or this one, has ended by itself."""
        for process, log in self._started:
            if only in (None, process) and process.poll() is not None:
                lines = log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
                raise ServerFailed("\n".join([f"A server ended with status {process.returncode}:", *lines]))

    def end_one(self, ended: psutil.Process) -> None:
        self._started = [one for one in self._started if one[0] != ended]
        end_tree(ended)

    def end(self) -> None:
        while self._started:
            process, _ = self._started.pop()
            end_tree(process)


def end_tree(root: psutil.Process) -> None:
    """Asks the root to end, then the rest of its tree, and kills the processes that still run."""
    members = tree(root)
    for member in members:
        _quietly(member.resume)
    _terminate([root])
    left = [member for member in members if member.is_running()]
    _terminate([member for member in left if member != root])
    _, stuck = psutil.wait_procs(members, timeout=0)
    for member in stuck:
        _quietly(member.kill)
    psutil.wait_procs(stuck, timeout=END_S_MAX)


def _terminate(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        _quietly(process.terminate)
    psutil.wait_procs(processes, timeout=END_S_MAX)


def _quietly(action: Any) -> None:
    try:
        action()
    except psutil.NoSuchProcess:
        pass


@contextmanager
def processes() -> Iterator[Processes]:
    """Processes that are ended at the end of the block, also after Ctrl-C, SIGTERM or SIGHUP."""
    started = Processes()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    try:
        yield started
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        started.end()
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


PORTS = (20_000, 32_000)


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that are free now; all different, and below those that the system gives to other
    sockets, which a server with many processes (Ray) could get before it listens."""
    sockets: list[socket.socket] = []
    while len(sockets) < count:
        with suppress(OSError):  # that port is in use
            sockets.append(socket.create_server(("127.0.0.1", random.randrange(*PORTS))))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
