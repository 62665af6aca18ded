"""A process that forks others on request: its control socket, its children, and their first steps; and the resources
that its forks couldn't share (threads, devices, connections and child processes).

The control socket carries `u32 LE length + JSON`. A request `{"op": "fork", "id": int, "env": {...}}` comes with four
descriptors (worker socket, progress file, stdout, stderr); `env` is the child's whole environment, None for the
process's own. Answers: `ready` once, `forked` or `failed` per request, `exit` per child. The end of the socket ends the
process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import stat
import struct
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, NoReturn

from ts.runtime import process

LENGTH = struct.Struct("<I")
#: Seconds for the children to end with the server.
ENDS_S = 2.0
REQUEST_BYTES_MAX = 4 * 1024 * 1024
READ_BYTES = 64 * 1024
CRASHED_STATUS = 1


class Forking:
    """The control socket, and the children that have not been reported yet. The process has one thread: a forked
    child has only that one, and locks of other threads would stay locked."""

    #: The requests that fork, each with the number of its descriptors.
    forks: ClassVar[Mapping[str, int]] = {"fork": 4}

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._data = b""
        self._fds: list[int] = []
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        self._children: set[int] = set()

    def serve(self) -> None:
        """Forks until the control socket ends, and returns once the children have ended, too."""
        process.outlive_stops()
        self._watch_children()
        self._answer({"op": "ready", "pid": os.getpid()})
        poller = select.poll()
        for fd in (self._control.fileno(), self._wake_read):
            poller.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poller.poll()}
            if self._wake_read in ready:
                self._reap()
            if self._control.fileno() in ready and not self._read():
                break
        for _ in range(2):  # a forkserver among the children has children of its own
            self._await_children()
            for pid in self._children:
                with contextlib.suppress(OSError):  # it has ended
                    if os.getpgid(pid) == pid:
                        os.killpg(pid, signal.SIGKILL)

    def _await_children(self) -> None:
        """Waits for up to ENDS_S until all children have ended. Their sockets end with this process's own; the kernel
        kills them with this process, but not what they have started, which they end themselves."""
        end_s = time.monotonic() + ENDS_S
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        while True:
            self._reap()
            left_s = end_s - time.monotonic()
            if not self._children or left_s <= 0:
                return
            poller.poll(left_s * 1000)

    def _watch_children(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def _answer(self, reply: dict[str, Any]) -> None:
        body = json.dumps(reply).encode()
        with contextlib.suppress(ConnectionError):  # the end of the socket is read next
            self._control.sendall(LENGTH.pack(len(body)) + body)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._children.discard(pid)
            self._answer({"op": "exit", "pid": pid, "status": status})

    def _read(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self._control, READ_BYTES, 64)
        except ConnectionError:
            return False
        self._data += data
        self._fds += fds
        for request in self._requests():
            self._handle(request)
        return bool(data)

    def _requests(self) -> Iterable[dict[str, Any]]:
        while len(self._data) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._data)
            if length > REQUEST_BYTES_MAX:
                raise ValueError(f"request of {length} bytes")
            if len(self._data) < LENGTH.size + length:
                return
            body, self._data = self._data[LENGTH.size : LENGTH.size + length], self._data[LENGTH.size + length :]
            yield json.loads(body)

    def _handle(self, request: dict[str, Any]) -> None:
        if request.get("op") in self.forks:
            self._answer(self._forked(request))
            return
        try:
            reply = self.asked(request)
        except Exception as error:
            traceback.print_exc()
            reply = {"op": "failed", "error": f"{type(error).__name__}: {error}"}
        self._answer({**reply, "id": request.get("id")})

    def asked(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request other than `fork`."""
        return {"op": "failed", "error": f"no such op: {request.get('op')}"}

    def _forked(self, request: dict[str, Any]) -> dict[str, Any]:
        count = self.forks[request["op"]]
        fds, self._fds = self._fds[:count], self._fds[count:]
        try:
            if len(fds) != count:
                raise ValueError(f"{count} descriptors expected, got {len(fds)}")
            return {"op": "forked", "id": request["id"], "pid": self._fork(fds, request)}
        except (OSError, ValueError) as error:
            return {"op": "failed", "id": request["id"], "error": f"{type(error).__name__}: {error}"}
        finally:
            for fd in fds:
                os.close(fd)

    def _fork(self, fds: list[int], request: dict[str, Any]) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        parent_pid = os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, process.STOPPING)  # until the worker handles them itself
        try:
            pid = os.fork()
            if pid == 0:
                self._be_born(parent_pid, fds, request)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._children.add(pid)
        return pid

    def _be_born(self, parent_pid: int, fds: list[int], request: dict[str, Any]) -> NoReturn:
        """The child's side of the fork; never returns into its parent's code."""
        try:
            process.die_with(parent_pid)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            env = request.get("env")
            if env is not None:
                os.environ.clear()
                os.environ.update(env)
            process.reseed()
            self.become(fds, request)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(CRASHED_STATUS)

    def become(self, fds: list[int], request: dict[str, Any]) -> None:
        """The life of a child with its descriptors, until its end."""
        raise NotImplementedError

    def forget(self) -> None:
        self._control.close()
        for fd in (self._wake_read, self._wake_write, *self._fds):
            os.close(fd)


NAMES_MAX = 4
#: Linux's directory about this process, which other systems lack.
PROC = "/proc/self"
#: The targets of /proc/self/fd that two processes can't share. Files are opened again instead.
SHARED_BADLY = ("socket:", "pipe:", "anon_inode:")
DEVICES = ("/dev/nvidia", "/dev/dri/", "/dev/kfd", "/dev/accel")
ACCELERATORS = ("cuda", "xpu", "mps")
#: The most seconds in which a thread that has been joined leaves the kernel.
LEAVES_S_MAX = 0.5


class Footprint(NamedTuple):
    """The threads, descriptors and children of this process. `tasks`: kernel threads by id, with their names;
    `files`: descriptors and their targets; all {} if the system doesn't provide them."""

    threads: frozenset[int]
    tasks: dict[int, str]
    files: dict[int, str]
    children: frozenset[int]

    @staticmethod
    def now() -> Footprint:
        threads = frozenset(one.native_id or 0 for one in threading.enumerate() if one is not threading.main_thread())
        tasks = _tasks()
        return Footprint(threads, tasks, _files(), _children(tasks))

    def refusal(self, before: Footprint) -> str:
        """The reason why this process can't be forked since the footprint `before`; "" if it can."""
        opened = {fd: where for fd, where in self.files.items() if before.files.get(fd) != where}
        new = (where for fd, where in opened.items() if fd not in before.files)
        if device := _device() or next((where for where in new if where.startswith(DEVICES)), ""):
            return f"it uses {device}, which a forked process can't"
        if threads := self.threads - before.threads:
            names = [one.name for one in threading.enumerate() if one.native_id in threads]
            return f"it has started {_some(names, 'thread')}, which forked processes don't have"
        if tasks := self.tasks.keys() - before.tasks.keys():
            names = [self.tasks[one] for one in sorted(tasks)]
            return (
                f"it has started {_some(names, 'native thread')}, which forked processes don't have: by a parallel "
                "operation with more than one thread, or in a library"
            )
        if started := self.children - before.children:
            return f"it has started {_some([str(one) for one in sorted(started)], 'process', 'es')}"
        if bad := [where for where in opened.values() if where.startswith(SHARED_BADLY)]:
            return f"it has opened {_some(bad, 'connection')}, which forked processes would share"
        return ""


def refusal_since(before: Footprint) -> str:
    """Why this process can't be forked since that footprint, "" if it can. Ending threads may end first."""
    until_s = time.monotonic() + LEAVES_S_MAX
    while (now := Footprint.now()).refusal(before) and time.monotonic() < until_s:
        if now.tasks.keys() <= before.tasks.keys():
            break
        time.sleep(LEAVES_S_MAX / 100)
    return now.refusal(before)


def _some(names: list[str], what: str, plural: str = "s") -> str:
    """`2 threads (a, b)`."""
    shown = ", ".join(names[:NAMES_MAX]) + (", …" if len(names) > NAMES_MAX else "")
    return f"{len(names)} {what}{plural if len(names) > 1 else ''} ({shown})"


def _tasks() -> dict[int, str]:
    found = {}
    for name in _listed(f"{PROC}/task"):
        with contextlib.suppress(OSError), open(f"{PROC}/task/{name}/comm") as file:  # or it has ended meanwhile
            found[int(name)] = file.read().strip()
    return found


def _files() -> dict[int, str]:
    found = {}
    for name in _listed(f"{PROC}/fd"):
        with contextlib.suppress(OSError):  # of the listing's own
            found[int(name)] = os.readlink(f"{PROC}/fd/{name}")
    return found


def _children(tasks: Collection[int]) -> frozenset[int]:
    found: set[int] = set()
    for task in tasks:
        with contextlib.suppress(OSError), open(f"{PROC}/task/{task}/children") as file:  # which some kernels lack
            found.update(map(int, file.read().split()))
    return frozenset(found)


def _listed(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _device() -> str:
    """The kind of accelerator that torch has initialised, "" for none."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return ""
    for kind in ACCELERATORS:
        is_initialized = getattr(getattr(torch, kind, None), "is_initialized", None)
        if is_initialized is not None and is_initialized():
            return kind
    return ""


def owned_files(but: Collection[int]) -> None:
    """Reopens a forked process's regular files at their offsets, which inherited descriptors would share."""
    for fd in _files():
        if fd <= 2 or fd in but:
            continue
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                continue
            again = os.open(f"{PROC}/fd/{fd}", fcntl.fcntl(fd, fcntl.F_GETFL))
        except OSError:  # a file that can't be opened again stays as it is
            continue
        os.lseek(again, os.lseek(fd, 0, os.SEEK_CUR), os.SEEK_SET)
        os.dup2(again, fd, inheritable=os.get_inheritable(fd))
        os.close(again)
