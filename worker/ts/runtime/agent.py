"""The supervisor of a worker on another machine than the frontend: it starts the worker's process, sends its lines, its
memory, and its end with the batches that it had begun to the frontend, and ends it on request or at the end of the
connection.

It runs in a process placed there by Ray, as long as the worker lives.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import IO, Any

from ts.protocol.secure import PeerCertificate, SecureSocket, client_context, keep_watch
from ts.protocol.shared import PROGRESS_BYTES, newest

READ_BYTES = 64 * 1024
#: The longest line; a longer one is sent in parts.
LINE_BYTES_MAX = 64 * 1024
MEMORY_EVERY_S = 1.0
#: The longest wait until the pipes of an ended worker are empty.
PIPES_S_MAX = 1.0
CONNECT_S_MAX = 20.0
GREETING_BYTES_MAX = 4096


def greet(instructions: dict[str, Any], role: str, **more: Any) -> tuple[SecureSocket, float]:
    """Connects to the frontend and identifies itself. Returns the socket, and the seconds by which the frontend's
    monotonic clock is ahead of this machine's. Raises OSError."""
    own = PeerCertificate(instructions["authority"], instructions["certificate"], instructions["key"])
    plain = socket.create_connection((instructions["host"], instructions["port"]), CONNECT_S_MAX)
    try:
        keep_watch(plain)
        sock = client_context(own).wrap_socket(plain)
        begun_s = time.monotonic()
        hello = {"token": instructions["token"], "role": role, "pid": os.getpid(), **more}
        sock.sendall(json.dumps(hello).encode() + b"\n")
        reply = b""
        while not reply.endswith(b"\n"):
            data = sock.recv(1)
            if not data or len(reply) > GREETING_BYTES_MAX:
                raise ConnectionError("the server doesn't know this process")
            reply += data
    except BaseException:
        plain.close()
        raise
    ended_s = time.monotonic()
    ahead_s = float(json.loads(reply)["now"]) - (begun_s + ended_s) / 2
    return SecureSocket(sock), 0.0 if abs(ahead_s) < ended_s - begun_s else ahead_s


class Agent:
    """One worker's. `instructions`: as `ts.runtime.remote` has them, and `env`: variables to add."""

    def __init__(self, instructions: Mapping[str, Any], node: Mapping[str, Any]) -> None:
        self._instructions = dict(instructions)
        self._sock, _ = greet(self._instructions, "agent", node=dict(node))
        self._record, path = tempfile.mkstemp()
        os.unlink(path)
        self._child = self._start()
        self._rest: dict[str, bytes] = {"stdout": b"", "stderr": b""}
        self._commands = b""
        self._unsent = bytearray()
        self._selector = selectors.DefaultSelector()

    def _start(self) -> subprocess.Popen[bytes]:
        os.truncate(self._record, PROGRESS_BYTES)
        instructions = {**self._instructions, "record": self._record}
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        paths = [root, os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, **instructions.pop("env", {}), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        child = subprocess.Popen(
            [sys.executable, "-m", "ts.runtime.remote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            cwd=instructions["model_dir"],
            pass_fds=[self._record],
            start_new_session=True,
        )
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError), child.stdin as given:
            given.write(json.dumps(instructions).encode())
        return child

    def run(self) -> int | None:
        """Returns the worker's exit status, None if the frontend has left first."""
        child, selector = self._child, self._selector
        pipes: list[IO[bytes]] = [one for one in (child.stdout, child.stderr) if one is not None]
        for name, pipe in zip(("stdout", "stderr"), pipes, strict=True):
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_READ, name)
        selector.register(self._sock, selectors.EVENT_READ, "frontend")
        next_memory_s = 0.0
        try:
            while child.poll() is None:
                now_s = time.monotonic()
                if now_s >= next_memory_s:
                    next_memory_s = now_s + MEMORY_EVERY_S
                    self._send(rss=_resident_bytes(child.pid))
                self._turn(0.2)
            end_s = time.monotonic() + PIPES_S_MAX
            while len(selector.get_map()) > 1 and time.monotonic() < end_s:
                self._turn(0.05)
            for name, rest in self._rest.items():
                if rest:
                    self._send(stream=name, lines=[rest.decode("utf-8", "backslashreplace")])
            self._send(exit=child.returncode, begun=newest(os.pread(self._record, PROGRESS_BYTES, 0)))
            while self._unsent:
                self._turn(0.2)
            return child.returncode
        except ConnectionError:
            return None
        finally:
            self._kill()
            child.wait()
            self._sock.close()
            os.close(self._record)
            selector.close()

    def _turn(self, timeout_s: float) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        self._selector.modify(self._sock, events, "frontend")
        for key, _ in self._selector.select(timeout_s):
            if key.data == "frontend":
                self._obey()
            else:
                self._read(key.fd, key.data, key.fileobj)
        self._flush()

    def _read(self, fd: int, name: str, pipe: Any) -> None:
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._selector.unregister(pipe)
            return
        *lines, rest = (self._rest[name] + data).split(b"\n")
        if len(rest) > LINE_BYTES_MAX:
            lines.append(rest)
            rest = b""
        self._rest[name] = rest
        if lines:
            self._send(stream=name, lines=[line.rstrip(b"\r").decode("utf-8", "backslashreplace") for line in lines])

    def _obey(self) -> None:
        """Reads the frontend's only order, to end the worker. Raises ConnectionError at the end of the connection."""
        try:
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionError("the frontend has left")
        *orders, self._commands = (self._commands + data).split(b"\n")
        if b"kill" in orders:
            self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)

    def _send(self, **what: Any) -> None:
        self._unsent += json.dumps(what).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        while self._unsent:
            try:
                sent = self._sock.sendmsg([memoryview(bytes(self._unsent))])
            except BlockingIOError:
                return
            del self._unsent[:sent]


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
