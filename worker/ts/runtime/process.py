"""The process of a worker: its descriptors, signals, seeds, threads, and the marks on the lines that it prints."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from ts.protocol.text import marked
from ts.runtime.jobs import Batch

PR_SET_PDEATHSIG = 1
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
ORPHANED_STATUS = 71
#: The signals that ask a server to stop.
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def die_with(parent_pid: int) -> None:
    """Linux: the kernel kills this process when the forkserver ends; elsewhere its socket's end does it."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:  # it ended before the call
        os._exit(ORPHANED_STATUS)


def keep_only(socket_fd: int, progress_fd: int, stdout_fd: int, stderr_fd: int) -> tuple[int, int]:
    """Connects stdout and stderr to the pipes, closes all descriptors but two; returns their new numbers."""
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (stdout_fd, 1), (stderr_fd, 2)):
        os.dup2(source, target)
    keep_open({0, 1, 2, socket_fd, progress_fd})
    return socket_fd, progress_fd


def keep_open(fds: set[int]) -> None:
    low = 0
    for fd in sorted(fds):
        if low < fd:  # an empty range before 0 closes everything (seen in 3.11)
            os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, max(map(int, os.listdir("/dev/fd")), default=low) + 1)


def replace_streams(stdout_fd: int, stderr_fd: int) -> None:
    """Connects stdout and stderr to the pipes, and stdin to the null device."""
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (stdout_fd, 1), (stderr_fd, 2)):
        os.dup2(source, target)
    for fd in {null, stdout_fd, stderr_fd} - {0, 1, 2}:
        os.close(fd)


def reset_signals() -> None:
    for number in STOPPING:
        signal.signal(number, signal.SIG_DFL)


def outlive_stops() -> None:
    """Keeps the process running through the signals that end the server (SIGTERM of systemd or supervisord, Ctrl-C, a
    terminal that goes away), which often reach all its processes. It goes on until its frontend says otherwise:
    accepted requests are still to be answered.

    Not ignored but handled, so that programs which a handler starts end by SIGTERM as usual, and reset in forks. A
    handler that a model installs itself counts instead.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stays)
        signal.siginterrupt(number, False)
    os.register_at_fork(before=_block, after_in_parent=_restore, after_in_child=_forked)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def stays(number: int, frame: object) -> None:
    pass


class _Masks(threading.local):
    """The signal masks from before the forks that a thread is about to make."""

    def __init__(self) -> None:
        self.before: list[set[int]] = []


_masks = _Masks()


def _block() -> None:
    _masks.before.append(signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGHUP)))


def _restore() -> None:
    """Restores the former mask: the fork of a worker has signals blocked until the worker handles them itself."""
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before.pop())


def _forked() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is stays:
            signal.signal(number, signal.SIG_DFL)
    _restore()


def reseed() -> None:
    """Reseeds the random generators: forks would otherwise draw the same numbers."""
    seed = int.from_bytes(os.urandom(8), "little") >> 1
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Makes libraries that are imported in the block use one thread, as far as environment variables control it."""
    given = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    try:
        yield
    finally:
        for variable, value in given.items():
            os.environ.pop(variable, None)
            if value is not None:
                os.environ[variable] = value


def set_threads(threads: int | None, workers: int = 1) -> None:
    """Sets the threads per operation: the model's setting, the environment's, or the cores divided by `workers`."""
    given = _given_threads()
    wanted = threads or given or max(1, physical_cores() // workers)
    if threads is not None or (workers > 1 and not given):
        os.environ.update({name: str(wanted) for name in THREAD_VARIABLES if threads or name not in os.environ})
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(wanted)


def _given_threads() -> int:
    """The number of threads set in the environment; 0 without one."""
    value = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(value) if value.isdecimal() else 0


def physical_cores() -> int:
    """The number of cores this process may use; two hardware threads of a core count once if the system reports
    them. A container's CPU limit counts, rounded up."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    return min(len({_core(cpu) for cpu in usable}), allotted_cores())


def allotted_cores(root: Path = Path("/sys/fs/cgroup")) -> int:
    """The CPU limit of the control group (cgroup v2, v1), in processors; very many without a limit."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = ((root / "cpu" / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        except OSError:
            return sys.maxsize
    limited = quota.isdecimal() and period.isdecimal() and int(period) > 0  # "max" and -1: without a limit
    return max(1, -(-int(quota) // int(period))) if limited else sys.maxsize


def _core(cpu: int) -> str:
    siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return siblings.read_text()
    except OSError:
        return str(cpu)


_request_ids: ContextVar[str] = ContextVar("request_ids", default="")


def turn_to(batch: Batch) -> None:
    """Assigns further output of this thread or task to the requests of `batch`."""
    _request_ids.set(",".join(batch.request_ids().values()))


def mark_lines() -> None:
    """Marks printed lines from now on; threads started by a handler belong to no request."""
    sys.stdout, sys.stderr = MarkedStream(sys.stdout), MarkedStream(sys.stderr)


class _Stdout(logging.StreamHandler[TextIO]):
    """Writes to the current standard output."""

    @property
    def stream(self) -> TextIO:
        return sys.stdout

    @stream.setter
    def stream(self, value: TextIO) -> None:
        pass


def log_to_stdout() -> None:
    """Prints messages that a handler logs through Python, from INFO up, as text alone, as in TorchServe's workers."""
    logging.basicConfig(handlers=[_Stdout()], format="%(message)s", level=logging.INFO)


class MarkedStream:
    """A text stream whose lines begin with the mark of the request they were printed in."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._begins = True  # a new line

    def write(self, text: str) -> int:
        ids = _request_ids.get()
        if ids and text:
            lines = text.splitlines(keepends=True)
            first = 0 if self._begins else 1
            lines[first:] = [marked(line, ids) for line in lines[first:]]
            self._stream.write("".join(lines))
        else:
            self._stream.write(text)
        if text:
            self._begins = text.endswith("\n")
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def modules_in(folder: str) -> dict[str, ModuleType]:
    """The imported modules whose files are in the folder, by their names, wherever links lead. Only their folders are
    resolved, each once: to resolve each file, the kernel is asked for all the folders above it."""
    root = os.path.join(os.path.realpath(folder), "")
    folders: dict[str, str] = {}
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str):
            continue
        parent, base = os.path.split(file)
        if parent not in folders:
            folders[parent] = os.path.join(os.path.realpath(parent), "")
        real = os.path.realpath(file) if os.path.islink(file) else folders[parent] + base
        if real.startswith(root):
            found[name] = module
    return found
