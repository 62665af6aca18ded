"""Forks workers from a process that has imported what they need: `python -m ts.runtime.forkserver --fd N [--plain]`.

The control socket carries `u32 LE length + JSON`. A request `{"op": "fork", "id": int, "env": {...}}` comes with four
descriptors (worker socket, progress file, stdout, stderr); `env` is the worker's whole environment. A request
`{"op": "preload", "id": int}` comes with one, the control socket of a second forkserver: a fork that imports torch,
which takes a second or more, while this one goes on forking workers that don't need it. Answers: `ready` once, `forked`
or `failed` per request, `exit` per child. The end of the socket ends the process.

It has one thread and computes nothing: a child forked after a parallel operation in its parent would hang.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Iterable
from typing import Any, NoReturn

from ts.runtime import process

LENGTH = struct.Struct("<I")
REQUEST_BYTES_MAX = 4 * 1024 * 1024
#: Descriptors that come with a request.
FDS = {"fork": 4, "preload": 1}
READ_BYTES = 64 * 1024
CRASHED_STATUS = 1

PRELOADED = ("ts.runtime.main", "ts.handler_utils.utils", "yaml")
#: Left out with --plain.
MORE_PRELOADED = ("numpy",)
PRELOADED_WITH_TORCH = ("torch", "ts.torch_handler.base_handler")


class Forkserver:
    """The control socket, and the children that have not been reported yet."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._data = b""
        self._fds: list[int] = []
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)

    def serve(self) -> None:
        """Until the control socket ends."""
        process.outlive_stops()
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
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
        op = request.get("op")
        if op not in FDS:
            return self._answer({"op": "failed", "id": request.get("id"), "error": f"no such op: {op}"})
        fds, self._fds = self._fds[: FDS[op]], self._fds[FDS[op] :]
        try:
            if len(fds) != FDS[op]:
                raise ValueError(f"{FDS[op]} descriptors expected, got {len(fds)}")
            pid = self._fork(request, fds)
        except (OSError, ValueError) as error:
            self._answer({"op": "failed", "id": request["id"], "error": f"{type(error).__name__}: {error}"})
        else:
            self._answer({"op": "forked", "id": request["id"], "pid": pid})
        finally:
            for fd in fds:
                os.close(fd)
        return None

    def _fork(self, request: dict[str, Any], fds: list[int]) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        parent_pid = os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, process.STOPPING)  # until the child handles them itself
        try:
            pid = os.fork()
            if pid == 0:
                if request["op"] == "fork":
                    _become_worker(parent_pid, fds, request.get("env"))
                else:
                    _become_forkserver(parent_pid, fds[0])
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid


def _become_worker(parent_pid: int, fds: list[int], env: dict[str, str] | None) -> NoReturn:
    """The child's side of the fork; never returns into the forkserver's code."""
    try:
        process.die_with(parent_pid)
        os.setsid()
        process.reset_signals()
        socket_fd, progress_fd = process.keep_only(*fds)
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        process.reseed()
        from ts.runtime.main import live

        live(socket_fd, progress_fd)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(CRASHED_STATUS)


def _become_forkserver(parent_pid: int, control_fd: int) -> NoReturn:
    """The child's side of the fork that imports torch; never returns into the first forkserver's code."""
    try:
        process.die_with(parent_pid)
        process.reset_signals()
        process.keep_open({0, 1, 2, control_fd})
        preload(PRELOADED_WITH_TORCH)
        Forkserver(socket.socket(fileno=control_fd)).serve()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(CRASHED_STATUS)


def preload(names: Iterable[str]) -> None:
    """Imports modules that workers need, with one thread in each pool of threads, which the children change."""
    given = {name: os.environ.get(name) for name in process.THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(process.THREAD_VARIABLES, "1"))
    gc.disable()  # modules stay; looking for others among them takes an eighth of the time
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and error.name == "torch":
                continue  # the server says so, once
            print(f"forkserver: {name} isn't preloaded: {type(error).__name__}: {error}", file=sys.stderr)
    gc.freeze()  # the collector's marks would copy every shared page in the children
    gc.enable()
    for variable, value in given.items():
        os.environ.pop(variable)
        if value is not None:
            os.environ[variable] = value


def main() -> None:
    parser = argparse.ArgumentParser(prog="ts.runtime.forkserver", description="Forks torchserve's worker processes.")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--plain", action="store_true", help="import nothing but the worker's own modules")
    arguments = parser.parse_args()
    preload(PRELOADED if arguments.plain else (*PRELOADED, *MORE_PRELOADED))
    Forkserver(socket.socket(fileno=arguments.fd)).serve()


if __name__ == "__main__":
    main()
