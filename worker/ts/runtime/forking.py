"""A process that forks others on request: its control socket, its children, and their first steps.

The control socket carries `u32 LE length + JSON`. A request `{"op": "fork", "id": int, "env": {...}}` comes with four
descriptors (worker socket, progress file, stdout, stderr); `env` is the child's whole environment, None for the
process's own. Answers: `ready` once, `forked` or `failed` per request, `exit` per child. The end of the socket ends the
process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NoReturn

from ts.runtime import process

LENGTH = struct.Struct("<I")
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

    def serve(self) -> None:
        """Serves until the control socket ends."""
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
                return

    def _watch_children(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def _answer(self, reply: dict[str, Any]) -> None:
        body = json.dumps(reply).encode()
        try:
            self._control.sendall(LENGTH.pack(len(body)) + body)
        except ConnectionError:
            os._exit(0)

    def _reap(self) -> None:
        try:
            os.read(self._wake_read, 4096)
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._answer({"op": "exit", "pid": pid, "status": status})

    def _read(self) -> bool:
        """False at the end of the control socket."""
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
        """Closes the parent's descriptors in a child."""
        self._control.close()
        for fd in (self._wake_read, self._wake_write, *self._fds):
            os.close(fd)
