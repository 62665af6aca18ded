"""Python programs that start without importing: each is a fork of a process that has imported their modules.

For tests that need a server but don't test its start: three quarters of the computing time of a start are imports. A
program has its own arguments, working directory, standard streams and environment, like an executed one, but its
modules were imported before.

A server's forkserver is such a program too: a fork of a process that has imported nothing but the forkserver's modules,
hence a child of that process, not of the server. `family` finds it, and its workers.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psutil

NUMBER = struct.Struct("<q")
FORKSERVER = "ts.runtime.forkserver"
LIMITS = tuple(name for name in dir(resource) if name.startswith("RLIMIT_"))


class Running:
    """A running program, with the members of `subprocess.Popen` that don't concern its streams. `life`: of it can be
    read the process's id, then its exit status."""

    def __init__(self, life: int) -> None:
        self.returncode: int | None = None
        self._life = life
        self._one_at_a_time = threading.Lock()
        self.pid = _number(life)

    def poll(self) -> int | None:
        """The exit status, that of a signal as a negative number; None while it runs."""
        with self._one_at_a_time:
            if self.returncode is None and _readable(self._life, 0):
                self.returncode = _number(self._life)
                os.close(self._life)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not _readable(self._life, timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its status is on the way
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Program(Running):
    """A running program of a test."""

    def __init__(self, stdout: IO[str], stdin: IO[str] | None, life: int) -> None:
        super().__init__(life)
        self.stdout = stdout
        self.stdin = stdin

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdout, self.stdin):
            if stream is not None:
                stream.close()
        self.wait()


class Template:
    """The process that has imported the modules. `target` ("module:function") is the main function of its programs,
    with their arguments in `sys.argv`; its result is their exit status. `options` and `env` are the interpreter's. With
    `is_main` the programs are like those of `python -m module`. `forkservers`: the template that the forkservers of its
    programs are forked from."""

    def __init__(
        self,
        target: str,
        *modules: str,
        options: Sequence[str] = (),
        path: Path | None = None,
        env: Mapping[str, str] | None = None,
        is_main: bool = False,
        forkservers: Template | None = None,
    ) -> None:
        self.owner = os.getpid()
        self.control, theirs = socket.socketpair()
        self.env = dict(os.environ if env is None else env)
        others = [] if forkservers is None else [forkservers.control.fileno()]
        passed = [theirs.fileno(), *others]
        asked = {
            "control": theirs.fileno(),
            "target": target,
            "modules": modules,
            "path": path and str(path),
            "is_main": is_main,
            "forkservers": forkservers and [*others, _python(forkservers.env)],
        }
        command = [sys.executable, *options, str(Path(__file__)), json.dumps(asked)]
        with theirs:
            self.process = subprocess.Popen(command, pass_fds=passed, stdin=subprocess.DEVNULL, env=self.env)

    def start(
        self,
        words: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
        stderr: int | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Program:
        """A program with these arguments. The others are those of `subprocess.Popen`: its folder and environment are
        this process's unless given; `stdin` may be PIPE, `stdout` a descriptor, and `stderr` STDOUT or a descriptor."""
        output = os.pipe()
        given = os.pipe() if stdin == subprocess.PIPE else None
        fds = {1: output[1] if stdout is None else stdout, **{fd: fd for fd in pass_fds}}
        if stderr is not None:
            fds[2] = fds[1] if stderr == subprocess.STDOUT else stderr
        if given:
            fds[0] = given[0]
        life = ask(self.control, words, fds, cwd=str(cwd or Path.cwd()), env=dict(os.environ if env is None else env))
        for fd in (output[1], *(given or ())[:1]):
            os.close(fd)
        return Program(os.fdopen(output[0]), os.fdopen(given[1], "w") if given else None, life)

    def close(self) -> None:
        """Ends it. A fork of the process that made it forgets it."""
        from support import GUARD_S  # its modules aren't for the programs

        if self.owner == os.getpid():
            self.control.shutdown(socket.SHUT_RDWR)
            self.process.wait(GUARD_S)
        self.control.close()
        self.process.returncode = 0


def ask(control: socket.socket, words: Sequence[str], fds: Mapping[int, int], **more: Any) -> int:
    """Asks a template for a program, whose descriptors are `fds`, by their number there; returns the descriptor of its
    life. Processes may ask at the same time: what all of them send through the socket is so short that it is whole."""
    life, body = os.pipe(), os.pipe()
    asked = {"words": list(words), "fds": list(fds), "umask": _umask(), **more}
    try:
        socket.send_fds(control, [NUMBER.pack(0)], [body[0], life[1], *fds.values()])
    finally:
        os.close(body[0])
        os.close(life[1])
    with open(body[1], "wb") as file:
        file.write(json.dumps(asked).encode())
    return life[0]


def family(pid: int) -> list[psutil.Process]:
    """The processes of a server: its descendants, and a forkserver that was forked from a template, with its own."""
    import psutil  # not for the programs

    found: dict[int, psutil.Process] = {}
    for root in (pid, *_named(_name(pid))):
        try:
            process = psutil.Process(root)
            found |= {one.pid: one for one in (process, *process.children(recursive=True))}
        except psutil.NoSuchProcess:
            continue
    found.pop(pid, None)
    return list(found.values())


def forkservers(pid: int) -> set[int]:
    """Those of the server's processes that its workers are forked from. A worker has the command or name of its
    forkserver."""
    import psutil

    parents = {}
    for process in family(pid):
        try:
            if FORKSERVER in process.cmdline() or process.name() == _name(pid):
                parents[process.pid] = process.ppid()
        except psutil.NoSuchProcess:
            continue
    return {one for one, parent in parents.items() if parent not in parents}


def _named(name: str) -> list[int]:
    """The processes with this name."""
    found = []
    for file in Path("/proc").glob("[0-9]*/comm"):
        try:
            if file.read_text() == f"{name}\n":
                found.append(int(file.parent.name))
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
    return found


def _name(pid: int) -> str:
    """The name, as in `ps`, of the forkserver of this server."""
    return f"for {pid}"


def _umask() -> int:
    before = os.umask(0o077)
    os.umask(before)
    return before


def _readable(fd: int, timeout_s: float | None) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(None if timeout_s is None else timeout_s * 1000))


def _number(fd: int) -> int:
    data = os.read(fd, NUMBER.size)
    assert len(data) == NUMBER.size, "the template has ended"
    return int(NUMBER.unpack(data)[0])


# --- in the template's process


def serve(control: socket.socket, keep: Sequence[int]) -> bool:
    """Forks programs until the socket ends (False); True in each of them, where the descriptors `keep` are open."""
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
            size, fds, _, _ = socket.recv_fds(control, NUMBER.size, 16)
            if not size:
                return False
            with open(fds.pop(0), "rb") as body:
                data = body.read()
            if data.endswith(b"}") and _forked(control, json.loads(data), fds, keep, lives):
                return True
            for fd in fds:
                os.close(fd)


def _forked(
    control: socket.socket, request: dict[str, Any], fds: list[int], keep: Sequence[int], lives: dict[int, int]
) -> bool:
    """True in the program. Signals that it has to have blocked are blocked before it begins."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, request.get("blocked", ()))
    if (pid := os.fork()) == 0:
        control.detach()
        _become(request, fds[1:], keep)
        return True
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    lives[pid] = fds.pop(0)
    os.write(lives[pid], NUMBER.pack(pid))
    return False


def _tell_ends(lives: dict[int, int]) -> None:
    while lives:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        fd = lives.pop(pid)
        try:
            os.write(fd, NUMBER.pack(os.waitstatus_to_exitcode(status)))
        except BrokenPipeError:
            pass  # a killed server doesn't hear of its forkserver's end
        os.close(fd)


def _become(request: dict[str, Any], fds: list[int], keep: Sequence[int]) -> None:
    """Turns the child into the program: nothing of the template's descriptors and signals is left."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    above = max([*request["fds"], *keep, 2]) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds]
    for fd, number in zip(moved, request["fds"], strict=True):
        os.dup2(fd, number)
    for fd in {*map(int, os.listdir("/dev/fd"))} - {0, 1, 2, *request["fds"], *keep}:
        os.closerange(fd, fd + 1)
    if request.get("session"):
        os.setsid()
    if name := request.get("name"):
        Path("/proc/self/comm").write_text(name)
    for limit, values in request.get("limits", {}).items():
        if resource.getrlimit(number := getattr(resource, limit)) != tuple(values):
            resource.setrlimit(number, values)
    os.chdir(request["cwd"])
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv[1:] = request["words"]
    sys.path[0] = request.get("path", sys.path[0])


# --- in a server's process


def fork_forkservers(control: socket.socket, variables: Mapping[str, str]) -> None:
    """The server's forkserver is from now on forked from the template behind the socket, unless it would have other
    `variables` of the interpreter than that one."""
    spawning: Any = importlib.import_module("ts_frontend.workers.spawning")
    executed = spawning.spawn

    def spawn(argv: Sequence[str], **how: Any) -> Any:
        if tuple(argv[:3]) != (sys.executable, "-m", FORKSERVER) or _python(how["env"]) != variables:
            return executed(argv, **how)
        fds = {1: 1, 2: 2} | {fd: fd for fd in how["pass_fds"]}
        asked = {
            "cwd": str(Path.cwd()),
            "path": str(Path.cwd()),
            "env": how["env"],
            "session": True,
            "blocked": list(spawning.STOPPING),
            "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
            "name": _name(os.getpid()),
        }
        return Running(ask(control, argv[3:], fds, **asked))

    spawning.spawn = spawn


def read_before() -> None:
    """Reads what every server reads at its start and no test changes: the definitions of metrics, and the folders of
    installed packages."""
    metrics: Any = importlib.import_module("ts_frontend.telemetry.metrics.registry")
    metrics.read_definitions = functools.cache(metrics.read_definitions)
    metrics.read_definitions(metrics.DEFAULT_FILE)
    importlib.import_module("ts_frontend.cli.launch").rivals()


def _python(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith("PYTHON")}


def main() -> int:
    asked = json.loads(sys.argv[1])
    sys.path[0] = asked["path"] or ""
    for name in asked["modules"]:
        importlib.import_module(name)
    name, function = asked["target"].split(":")
    module = importlib.import_module(name)
    run: Callable[[], int | None] = getattr(module, function)
    keep = []
    if asked["forkservers"]:
        fd, variables = asked["forkservers"]
        os.set_inheritable(fd, False)
        fork_forkservers(socket.socket(fileno=fd), variables)
        keep = [fd]
    if "ts_frontend.server" in asked["modules"]:
        read_before()
    gc.collect()
    gc.freeze()  # a collection would copy every shared page in the programs
    if asked["is_main"]:
        sys.modules["warm_start"] = sys.modules["__main__"]  # whose end would be that of its names
        sys.argv[0], sys.modules["__main__"] = str(module.__file__), module
    with socket.socket(fileno=asked["control"]) as control:
        forked = serve(control, keep)
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
