"""Python programs that start without importing: each is a fork of a process that has imported their modules.

For tests that need a server but don't test its start: half of the computing time of a start is imports. A program has
its own arguments, working directory, standard streams and environment, like an executed one, but its modules were
imported before.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from support import GUARD_S

NUMBER = struct.Struct("<q")


class Program:
    """A running program, with the members of `subprocess.Popen` that tests use."""

    def __init__(self, stdout: IO[str], stdin: IO[str] | None, life: int) -> None:
        self.stdout = stdout
        self.stdin = stdin
        self.returncode: int | None = None
        self._life = life  # of it can be read: the process's id, then its exit status
        self.pid = _number(life)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdout, self.stdin):
            if stream is not None:
                stream.close()
        self.wait()

    def poll(self) -> int | None:
        """The exit status, that of a signal as a negative number; None while it runs."""
        if self.returncode is None and _readable(self._life, 0):
            self.returncode = _number(self._life)
            os.close(self._life)
        return self.returncode

    def wait(self, timeout: float = GUARD_S) -> int:
        if self.returncode is None and not _readable(self._life, timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Template:
    """The process that has imported the modules. `target` ("module:function") is the main function of its programs,
    with their arguments in `sys.argv`; its result is their exit status. `options`: of the interpreter."""

    def __init__(self, target: str, *modules: str, options: Sequence[str] = (), path: Path | None = None) -> None:
        self._control, theirs = socket.socketpair()
        self._one_at_a_time = threading.Lock()
        asked = {"control": theirs.fileno(), "target": target, "modules": modules, "path": path and str(path)}
        command = [sys.executable, *options, str(Path(__file__)), json.dumps(asked)]
        with theirs:
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def start(
        self,
        words: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stderr: int | None = None,
    ) -> Program:
        """A program with these arguments. The others are those of `subprocess.Popen`: its folder and environment are
        this process's unless given; `stdin` may be PIPE, and `stderr` may be STDOUT."""
        life, stdout = os.pipe(), os.pipe()
        given = os.pipe() if stdin == subprocess.PIPE else None
        theirs = [life[1], stdout[1], *([given[0]] if given else [])]
        with self._one_at_a_time:
            asked = {
                "words": list(words),
                "cwd": str(cwd or Path.cwd()),
                "env": dict(os.environ if env is None else env),
                "joined": stderr == subprocess.STDOUT,
                "umask": _umask(),
            }
            body = json.dumps(asked).encode()
            socket.send_fds(self._control, [NUMBER.pack(len(body))], theirs)
            self._control.sendall(body)
        for fd in theirs:
            os.close(fd)
        return Program(os.fdopen(stdout[0]), os.fdopen(given[1], "w") if given else None, life[0])

    def close(self) -> None:
        self._control.close()
        self._process.wait(GUARD_S)


def _umask() -> int:
    before = os.umask(0o077)
    os.umask(before)
    return before


def _readable(fd: int, timeout_s: float) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


def _number(fd: int) -> int:
    data = os.read(fd, NUMBER.size)
    assert len(data) == NUMBER.size, "the template has ended"
    return int(NUMBER.unpack(data)[0])


# --- in the template's process


def serve(control: socket.socket) -> bool:
    """Forks programs until the socket ends (False); True in each of them."""
    wake_read, wake_write = os.pipe()
    for fd in (wake_read, wake_write):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    lives: dict[int, int] = {}
    poller = select.poll()
    for fd in (control.fileno(), wake_read):
        poller.register(fd, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poller.poll()}
        if wake_read in ready:
            os.read(wake_read, 4096)
            _tell_ends(lives)
        if control.fileno() in ready:
            size, fds, _, _ = socket.recv_fds(control, NUMBER.size, 3)
            if not size:
                return False
            request = json.loads(_exactly(control, NUMBER.unpack(size)[0]))
            if (pid := os.fork()) == 0:
                control.detach()
                _become(request, fds)
                return True
            lives[pid], *streams = fds
            os.write(lives[pid], NUMBER.pack(pid))
            for fd in streams:
                os.close(fd)


def _tell_ends(lives: dict[int, int]) -> None:
    while lives:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        fd = lives.pop(pid)
        os.write(fd, NUMBER.pack(os.waitstatus_to_exitcode(status)))
        os.close(fd)


def _exactly(link: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = link.recv(count - len(data))
        assert piece, "the request ended too early"
        data += piece
    return data


def _become(request: dict[str, Any], fds: list[int]) -> None:
    """Turns the child into the program: nothing of the template's descriptors and signals is left."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, output, *given = fds
    os.dup2(output, 1)
    if request["joined"]:
        os.dup2(output, 2)
    if given:
        os.dup2(given[0], 0)
    os.closerange(3, max(map(int, os.listdir("/dev/fd"))) + 1)
    os.chdir(request["cwd"])
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv[1:] = request["words"]


def main() -> int:
    asked = json.loads(sys.argv[1])
    sys.path[0] = asked["path"] or ""
    for name in asked["modules"]:
        importlib.import_module(name)
    module, function = asked["target"].split(":")
    run: Callable[[], int | None] = getattr(importlib.import_module(module), function)
    gc.collect()
    gc.freeze()  # a collection would copy every shared page in the programs
    with socket.socket(fileno=asked["control"]) as control:
        forked = serve(control)
    if not forked:
        return 0
    status = run() or 0
    if not sys.warnoptions:  # with them, what is still open as its modules end is told
        _leave(status)
    return status


def _leave(status: int) -> None:
    """Ends the program as the interpreter does: its threads, its exit functions, its output. The memory of its modules
    ends with the process: to free them one by one takes longer than all else that it does at its end."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
