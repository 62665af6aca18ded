"""The frontend's side of processes that fork workers on request: a forkserver, which has imported torch once, and the
control socket that it shares with holders of models (`workers/holder.py`)."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ts_frontend.tasks import watched
from ts_frontend.workers.launchers import ExecLauncher, LaunchFailed, resolve, start_forkserver
from ts_frontend.workers.process import Channels, ExitStatus, LineSink, ProcessSpec, WorkerProcess, attach

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
REPLY_BYTES_MAX = 1 << 20
EXIT_STATUS_S_MAX = 2.0
CLOSE_S_MAX = 2.0


class ForkserverLost(Exception):
    """The process that forks has ended, or was ended; the message says how."""


@dataclass(frozen=True, slots=True)
class ForkingProcess:
    """The process at the other end of a control socket. `what`: its name in messages; `wait`: until it has ended."""

    what: str
    pid: int
    kill: Callable[[], None]
    wait: Callable[[], Awaitable[ExitStatus]]


class Forkserver:
    """A process that forks, from its start to its end. Each process has an object of its own."""

    def __init__(self, control: socket.socket, child: ForkingProcess) -> None:
        self._control = control
        self._child = child
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._processes: dict[int, WorkerProcess] = {}
        self._early: dict[int, ExitStatus] = {}
        self._sending = asyncio.Lock()
        self._room: asyncio.Future[None] | None = None
        self._closing = False
        #: It may be asked for more workers.
        self.usable = True
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ready.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        self.reader = watched(self._read(), f"The reader of {child.what}")

    @staticmethod
    async def start(env: Mapping[str, str], preload_torch: bool = True) -> Forkserver:
        """Starts a forkserver, which is `ready` when it has imported its preloaded modules."""
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        control.setblocking(False)
        try:
            child = await asyncio.to_thread(start_forkserver, theirs.fileno(), env, preload_torch)
        except BaseException:
            control.close()
            raise
        finally:
            theirs.close()

        async def wait() -> ExitStatus:
            return ExitStatus(await asyncio.to_thread(child.wait))

        return Forkserver(control, ForkingProcess("the forkserver", child.pid, child.kill, wait))

    @property
    def pid(self) -> int:
        return self._child.pid

    async def ask(self, request: Mapping[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
        """Returns the reply to a request. Raises ForkserverLost; LaunchFailed when it can't be done."""
        number = next(self._ids)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        body = json.dumps({**request, "id": number}).encode()
        try:
            await self._send(_LENGTH.pack(len(body)) + body, list(fds))
            return await answer
        finally:
            del self._answers[number]

    async def worker(
        self, spec: ProcessSpec, sink: LineSink, env: Mapping[str, str] | None, limit_s: float
    ) -> WorkerProcess:
        """Forks a worker, or a holder, in at most `limit_s` seconds. `env`: its whole environment, None for that of the
        process that forks. Raises ForkserverLost, LaunchFailed, TimeoutError."""
        channels = Channels()
        request = {"op": "fork", "env": None if env is None else dict(env), "holds": spec.holds}
        try:
            reply = await asyncio.wait_for(self.ask(request, channels.worker_fds()), limit_s)
        except BaseException:
            channels.close()
            raise
        channels.close_worker_side()
        return self.attach(reply["pid"], spec, channels, sink)

    def attach(self, pid: int, spec: ProcessSpec, channels: Channels, sink: LineSink) -> WorkerProcess:
        """Returns the worker process that was forked as `pid`."""
        process = attach(pid, spec, channels, sink)
        self._processes[pid] = process
        if pid in self._early:
            self._ended(pid, self._early.pop(pid))
        elif process.pidfd is not None:
            self._watch(process)
        return process

    async def _send(self, data: bytes, fds: list[int]) -> None:
        """Sends a whole request. After a partial one, which would garble the next, the forkserver is set aside."""
        async with self._sending:
            view = memoryview(data)
            try:
                while len(view):
                    size = await self._send_some(view, fds)
                    view, fds = view[size:], []
            except BaseException:
                if len(view) < len(data):
                    self.set_aside()
                raise

    async def _send_some(self, view: memoryview, fds: list[int]) -> int:
        while self.usable:
            try:
                return socket.send_fds(self._control, [view], fds) if fds else self._control.send(view)
            except BlockingIOError:
                await self._writable()
            except OSError as error:
                raise ForkserverLost(f"{self._child.what} has ended: {error}") from error
        raise ForkserverLost(f"{self._child.what} was set aside")

    async def _writable(self) -> None:
        """Waits until the forkserver takes more, or is set aside."""
        loop = asyncio.get_running_loop()
        self._room = loop.create_future()
        loop.add_writer(self._control, resolve, self._room)
        try:
            await self._room
        finally:
            loop.remove_writer(self._control)

    # --- replies

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        data = b""
        reason = "it closed its socket"
        try:
            while piece := await loop.sock_recv(self._control, 65536):
                data = self._take(data + piece)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error)
        except Exception as error:  # of any kind: callers that wait must hear that no answer will come
            log.exception("A reply of %s can't be handled", self._child.what)
            reason = f"{type(error).__name__}: {error}"
        self._stop_sending()
        async with self._sending:
            self._control.close()
        how = await self._child.wait()
        self._lost(f"{self._child.what} has ended ({how.describe()}): {reason}")

    def _take(self, data: bytes) -> bytes:
        """Handles the whole replies in `data` and returns the rest."""
        while len(data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data)
            if length > REPLY_BYTES_MAX:
                raise ValueError(f"reply of {length} bytes")
            if len(data) < _LENGTH.size + length:
                break
            self._handle(json.loads(data[_LENGTH.size : _LENGTH.size + length]))
            data = data[_LENGTH.size + length :]
        return data

    def _handle(self, reply: dict[str, Any]) -> None:
        op = reply["op"]
        if op == "ready":
            resolve(self.ready)
        elif op == "exit":
            self._ended(reply["pid"], ExitStatus.of_wait_status(reply["status"]))
        elif (answer := self._answers.get(reply["id"])) is not None and not answer.done():
            if op == "forked":
                self._early.pop(reply["pid"], None)  # of an earlier process with that number
            if op == "failed":
                answer.set_exception(LaunchFailed(f"fork failed: {reply.get('error')}"))
            else:
                answer.set_result(reply)

    def _ended(self, pid: int, how: ExitStatus) -> None:
        process = self._processes.pop(pid, None)
        if process is None:
            self._early[pid] = how
            return
        self._unwatch(process)
        process.ended(how)
        self._end_if_unused()

    def _lost(self, reason: str) -> None:
        if not self._closing:
            log.error("%s; the next worker starts a new one", reason)
        error = ForkserverLost(reason)
        if not self.ready.done():
            self.ready.set_exception(error)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)

    # --- a pidfd tells that a process ended even when the forkserver can't

    def _watch(self, process: WorkerProcess) -> None:
        assert process.pidfd is not None
        asyncio.get_running_loop().add_reader(process.pidfd, self._pidfd_ready, process)

    def _unwatch(self, process: WorkerProcess) -> None:
        if process.pidfd is not None:
            asyncio.get_running_loop().remove_reader(process.pidfd)

    def _pidfd_ready(self, process: WorkerProcess) -> None:
        self._unwatch(process)
        wait_s = EXIT_STATUS_S_MAX if self.usable else 0.0
        asyncio.get_running_loop().call_later(wait_s, self._unknown, process)

    def _unknown(self, process: WorkerProcess) -> None:
        if self._processes.get(process.pid) is process:
            del self._processes[process.pid]
            process.ended(ExitStatus(None))
            self._end_if_unused()

    # --- its end

    def set_aside(self) -> None:
        """Sends the forkserver no more requests. Its workers would die with it, so it ends with the last of them."""
        self._stop_sending()
        self._end_if_unused()

    def _stop_sending(self) -> None:
        self.usable = False
        if self._room is not None:
            resolve(self._room)

    def _end_if_unused(self) -> None:
        if not self.usable and not self._closing and not self._processes:
            self._closing = True
            self._child.kill()

    async def close(self) -> None:
        """Ends the forkserver, by force if it doesn't end within CLOSE_S_MAX seconds."""
        self._closing = True
        self._stop_sending()
        if not self.reader.done():
            self._shut_down()
            done, _ = await asyncio.wait({self.reader}, timeout=CLOSE_S_MAX)
            if not done:
                self._child.kill()
                await asyncio.wait({self.reader})

    def _shut_down(self) -> None:
        try:
            self._control.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has closed it already, and is ending


#: Until a new forkserver has imported torch, on a cold disk.
READY_S_MAX = 120.0
#: Until it has forked a worker: usually some 10 ms.
FORK_S_MAX = 15.0


class ForkLauncher:
    """One forkserver at a time. One that dies takes the workers it had forked with it (on Linux the kernel ends them);
    the next launch starts a new one, and requests that those workers had not started run on their successors.

    One that lives and doesn't answer is set aside: its workers go on, it ends with the last of them, and the start that
    found out is exec'd by `fallback`.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        fallback: ExecLauncher,
        *,
        preload_torch: bool = True,
        ready_s_max: float = READY_S_MAX,
        fork_s_max: float = FORK_S_MAX,
    ) -> None:
        self._env, self._preload_torch = env, preload_torch
        self._fallback = fallback
        self._ready_s_max, self._fork_s_max = ready_s_max, fork_s_max
        self._current: Forkserver | None = None
        self._all: set[Forkserver] = set()
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        """Starts the forkserver; returns at once, `launch` waits until it is ready."""
        await self._server()

    async def _server(self) -> Forkserver:
        async with self._lock:
            if self._current is None or not self._current.usable:
                self._current = await Forkserver.start(self._env, self._preload_torch)
                self._all.add(self._current)
                self._current.reader.add_done_callback(self._forget)
            return self._current

    def _forget(self, _: object) -> None:
        self._all = {server for server in self._all if not server.reader.done()}

    async def launch(self, spec: ProcessSpec, sink: LineSink) -> WorkerProcess:
        server = await self._server()
        try:
            return await self._fork(server, spec, sink)
        except asyncio.TimeoutError:
            server.set_aside()
            log.error(
                "The forkserver (pid %s) doesn't answer: worker of %s is exec'd, the next start makes a new forkserver",
                server.pid,
                spec.name,
            )
        except ForkserverLost as error:
            log.error("%s: worker of %s is exec'd, the next start makes a new forkserver", error, spec.name)
        return await self._fallback.launch(spec, sink)

    async def _fork(self, server: Forkserver, spec: ProcessSpec, sink: LineSink) -> WorkerProcess:
        await asyncio.wait_for(asyncio.shield(server.ready), self._ready_s_max)
        return await server.worker(spec, sink, spec.env, self._fork_s_max)

    async def close(self) -> None:
        """Ends the forkservers; workers they forked are the supervisor's to end first."""
        await asyncio.gather(*(server.close() for server in self._all))
