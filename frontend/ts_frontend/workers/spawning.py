"""Starts processes of this server, blocking: a forkserver is started before the rest of the server is imported, so that
it imports torch meanwhile. Imports little."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ts.version
from ts_frontend.config.load import worker_environment
from ts_frontend.config.table import ServerConfig

#: The signals that ask a server to stop, as in ts.runtime.process.
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: The head of each request to a forkserver, and of each of its replies.
LENGTH = struct.Struct("<I")
#: The id of the request that comes with the start of a forkserver.
FIRST_REQUEST_ID = 0


def spawn(argv: Sequence[str], **how: Any) -> subprocess.Popen[bytes]:
    """Starts one of our own processes, in its own session and with the stop signals blocked until it handles them
    itself (`ts.runtime.process`), so that they can't end it before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        return subprocess.Popen(argv, start_new_session=True, **how)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def worker_env(config: ServerConfig) -> dict[str, str]:
    """The environment of workers: they import the same `ts` as the server."""
    env = worker_environment(config)
    package_root = str(Path(ts.version.__file__).parents[1])
    env["PYTHONPATH"] = os.pathsep.join(part for part in (package_root, env.get("PYTHONPATH", "")) if part)
    return env


def request_bytes(op: str, number: int, **more: Any) -> bytes:
    body = json.dumps({"op": op, "id": number, **more}).encode()
    return LENGTH.pack(len(body)) + body


@dataclass(frozen=True, slots=True)
class Inherited:
    """A child of the server that this one replaces, which had the same process."""

    pid: int

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@dataclass(frozen=True, slots=True, eq=False)
class StartedForkserver:
    """A started forkserver, and our ends of the control sockets: its own, and that of the fork with torch, which was
    requested as FIRST_REQUEST_ID (None: not requested). `made_of`: the environment and the files that it was started
    with. Of an inherited one: `torch_pid` (0: none), and whether each has told that it is ready."""

    child: subprocess.Popen[bytes] | Inherited
    control: socket.socket
    torch_control: socket.socket | None
    made_of: str = ""
    torch_pid: int = 0
    ready: bool = False
    torch_ready: bool = False

    def close(self) -> None:
        self.control.close()
        if self.torch_control is not None:
            self.torch_control.close()


def start_forkserver(env: Mapping[str, str], preload_torch: bool) -> StartedForkserver:
    """Starts a forkserver. Raises OSError."""
    opened: list[socket.socket] = []
    control, theirs = _pair(opened)
    torch_control: socket.socket | None = None
    try:
        argv = [sys.executable, "-m", "ts.runtime.forkserver", "--fd", str(theirs.fileno())]
        argv += [] if preload_torch else ["--plain"]
        if preload_torch:
            torch_control, torch_theirs = _pair(opened)
            socket.send_fds(control, [request_bytes("preload", FIRST_REQUEST_ID)], [torch_theirs.fileno()])
            torch_theirs.close()
        child = spawn(argv, env=dict(env), stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),))
    except BaseException:
        for one in opened:
            one.close()
        raise
    theirs.close()
    return StartedForkserver(child, control, torch_control, made_of(env, preload_torch))


def _pair(opened: list[socket.socket]) -> tuple[socket.socket, socket.socket]:
    """A socket pair: our non-blocking end and the other one; both are added to `opened`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    opened += (ours, theirs)
    ours.setblocking(False)
    return ours, theirs


def made_of(env: Mapping[str, str], preload_torch: bool) -> str:
    """Differs for forkservers that may have imported other files: an installation changes its directory."""
    places = [Path(place) for place in sys.path if os.path.isdir(place)]
    own = Path(ts.version.__file__).parent
    times = [place.stat().st_mtime_ns for place in (*places, *sorted(own.rglob("*.py")), *sorted(own.rglob("*.so")))]
    return hashlib.sha256(repr((sys.version, sorted(env.items()), preload_torch, times)).encode()).hexdigest()


def first_forkserver(config: ServerConfig, left: Mapping[str, Any] | None = None) -> StartedForkserver | None:
    """The forkserver of a server with this configuration; None when its workers aren't forked. `left`: the one that the
    server which this one replaces has left, which is taken if it isn't made of other files."""
    forks = config.worker_start == "fork" and not config.bypass_serve
    if left is not None:
        told = dict(left)
        control = socket.socket(fileno=told.pop("control"))
        torch_control = socket.socket(fileno=told.pop("torch_control")) if "torch_control" in told else None
        taken = StartedForkserver(Inherited(told.pop("pid")), control, torch_control, **told)
        if forks and taken.made_of == made_of(worker_env(config), config.preload_torch):
            for one in (control, torch_control):
                if one is not None:
                    one.setblocking(False)
                    one.set_inheritable(False)
            return taken
        taken.close()  # with which it ends
        threading.Thread(target=taken.child.wait, name="forkserver's end", daemon=True).start()
    return start_forkserver(worker_env(config), config.preload_torch) if forks else None
