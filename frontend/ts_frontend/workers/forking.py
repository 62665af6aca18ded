"""The frontend's side of the forkserver: a process that has imported torch once and forks workers on request."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import socket
import struct
from collections.abc import Mapping
from typing import Any

from ts_frontend.workers.exits import Exit
from ts_frontend.workers.process import LaunchFailed, resolve, start_forkserver
from ts_frontend.workers.started import Ends, LineSink, Process, Spec, adopt

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
REPLY_BYTES_MAX = 1 << 20
EXIT_STATUS_S_MAX = 2.0


class ForkLauncher:
    """Starts workers through the forkserver. One that dies takes the workers it had forked with it (on Linux the
    kernel ends them); the next launch starts a new one, and what those had not started runs on their successors."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self._control: socket.socket | None = None
        self._ids = itertools.count(1)
        self._forks: dict[int, asyncio.Future[int]] = {}
        self._processes: dict[int, Process] = {}
        self._early: dict[int, Exit] = {}
        self._reader: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._lock = asyncio.Lock()
        self._closing = False

    async def start(self) -> None:
        """Starts the forkserver; returns at once, `launch` waits until it has imported torch."""
        loop = asyncio.get_running_loop()
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        control.setblocking(False)
        self._ready = loop.create_future()
        process = await asyncio.to_thread(start_forkserver, theirs.fileno(), self._env)
        theirs.close()
        self._control = control
        self._reader = asyncio.create_task(self._read(control, self._ready, process))

    async def launch(self, spec: Spec, sink: LineSink) -> Process:
        async with self._lock:
            if self._control is None:
                await self.start()
            ready = self._ready
        assert ready is not None
        await asyncio.shield(ready)
        ends = Ends()
        try:
            pid = await self._fork(spec, ends)
        except BaseException:
            ends.close()
            raise
        ends.close_worker_side()
        process = adopt(pid, spec, ends, sink)
        self._processes[pid] = process
        if pid in self._early:
            self._ended(pid, self._early.pop(pid))
        elif process.pidfd is not None:
            self._watch(process)
        return process

    async def _fork(self, spec: Spec, ends: Ends) -> int:
        number = next(self._ids)
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._forks[number] = answer
        body = json.dumps({"op": "fork", "id": number, "env": dict(spec.env)}).encode()
        try:
            await self._send(_LENGTH.pack(len(body)) + body, ends.worker_fds())
            return await answer
        finally:
            self._forks.pop(number, None)

    async def _send(self, data: bytes, fds: list[int]) -> None:
        async with self._lock:
            control = self._control
            if control is None:
                raise LaunchFailed("the forkserver has ended")
            loop = asyncio.get_running_loop()
            view = memoryview(data)
            while len(view):
                try:
                    size = socket.send_fds(control, [view], fds) if fds else control.send(view)
                except BlockingIOError:
                    await _writable(loop, control)
                    continue
                except OSError as error:
                    raise LaunchFailed(f"the forkserver has ended: {error}") from error
                view, fds = view[size:], []

    # --- replies

    async def _read(self, control: socket.socket, ready: asyncio.Future[None], process: Any) -> None:
        loop = asyncio.get_running_loop()
        data = b""
        reason = "it closed its socket"
        try:
            while piece := await loop.sock_recv(control, 65536):
                data = self._take(data + piece, ready)
        except (OSError, ValueError) as error:
            reason = str(error)
        finally:
            control.close()
            if self._control is control:
                self._control = None
        code = await asyncio.to_thread(process.wait)
        self._lost(ready, f"the forkserver has ended ({Exit(code).describe()}): {reason}")

    def _take(self, data: bytes, ready: asyncio.Future[None]) -> bytes:
        """Handles the whole replies in `data`; what is left of it."""
        while len(data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data)
            if length > REPLY_BYTES_MAX:
                raise ValueError(f"reply of {length} bytes")
            if len(data) < _LENGTH.size + length:
                break
            self._handle(json.loads(data[_LENGTH.size : _LENGTH.size + length]), ready)
            data = data[_LENGTH.size + length :]
        return data

    def _handle(self, reply: dict[str, Any], ready: asyncio.Future[None]) -> None:
        op = reply["op"]
        if op == "ready":
            ready.set_result(None)
        elif op == "exit":
            self._ended(reply["pid"], Exit.of_wait_status(reply["status"]))
        elif (answer := self._forks.get(reply["id"])) is not None and not answer.done():
            if op == "forked":
                self._early.pop(reply["pid"], None)  # of an earlier process with that number
                answer.set_result(reply["pid"])
            else:
                answer.set_exception(LaunchFailed(f"fork failed: {reply.get('error')}"))

    def _ended(self, pid: int, how: Exit) -> None:
        process = self._processes.pop(pid, None)
        if process is None:
            self._early[pid] = how
        else:
            self._unwatch(process)
            process.ended(how)

    def _lost(self, ready: asyncio.Future[None], reason: str) -> None:
        if not self._closing:
            log.error("%s; the next worker starts a new one", reason)
        error = LaunchFailed(reason)
        if not ready.done():
            ready.set_exception(error)
            ready.exception()
        for answer in self._forks.values():
            if not answer.done():
                answer.set_exception(error)

    # --- a pidfd tells that a process ended even when the forkserver can't

    def _watch(self, process: Process) -> None:
        assert process.pidfd is not None
        loop = asyncio.get_running_loop()
        loop.add_reader(process.pidfd, self._pidfd_ready, process)

    def _unwatch(self, process: Process) -> None:
        if process.pidfd is not None:
            asyncio.get_running_loop().remove_reader(process.pidfd)

    def _pidfd_ready(self, process: Process) -> None:
        self._unwatch(process)
        wait_s = EXIT_STATUS_S_MAX if self._control is not None else 0.0
        asyncio.get_running_loop().call_later(wait_s, self._unknown, process)

    def _unknown(self, process: Process) -> None:
        if self._processes.pop(process.pid, None) is not None:
            process.ended(Exit(None))

    async def close(self) -> None:
        """Ends the forkserver; workers it forked are the supervisor's to end first."""
        self._closing = True
        control = self._control
        if control is not None:
            control.shutdown(socket.SHUT_RDWR)
        if self._reader is not None:
            await self._reader


async def _writable(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_writer(sock.fileno(), resolve, ready)
    try:
        await ready
    finally:
        loop.remove_writer(sock.fileno())
