"""The frontend's side of the processes that fork workers: forkservers, which have imported the workers' modules, and
the holder of a model version, which has loaded its model once.

There are two forkservers. The plain one is ready early; it forks the workers of models without torch, and the
forkserver that imports torch.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import socket
import subprocess
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from ts_frontend.tasks import owned, watched
from ts_frontend.workers.launchers import ExecLauncher, Launcher, LaunchFailed, resolve
from ts_frontend.workers.process import (
    Channels,
    ExitStatus,
    ForkedProcess,
    LineSink,
    ProcessSpec,
    WorkerPlan,
    WorkerProcess,
    attach,
)
from ts_frontend.workers.spawning import (
    FIRST_REQUEST_ID,
    LENGTH,
    Inherited,
    StartedForkserver,
    request_bytes,
    start_forkserver,
)

log = logging.getLogger(__name__)


T = TypeVar("T")

REPLY_BYTES_MAX = 1 << 20
EXIT_STATUS_S_MAX = 2.0
CLOSE_S_MAX = 2.0


class ForkserverLost(Exception):
    """The forkserver has ended, or was ended; the message has the cause."""


class ForkserverProcess(Protocol):
    """The process at the other end of a control socket. `what`: its name in messages."""

    @property
    def pid(self) -> int: ...

    @property
    def what(self) -> str: ...

    def kill(self) -> None: ...

    async def end(self) -> ExitStatus:
        """Returns the cause of its end, when it has closed its control socket."""


@dataclass(frozen=True, slots=True)
class _Started:
    """A forkserver that this process started."""

    child: subprocess.Popen[bytes] | Inherited
    what: str = "the forkserver"

    @property
    def pid(self) -> int:
        return self.child.pid

    def kill(self) -> None:
        self.child.kill()

    async def end(self) -> ExitStatus:
        return ExitStatus(await asyncio.to_thread(self.child.wait))


class _Forked(ForkedProcess):
    """A forkserver that another one forked."""

    what = "the forkserver"

    async def end(self) -> ExitStatus:
        await asyncio.wait({self.exited}, timeout=EXIT_STATUS_S_MAX)
        return self.exited.result() if self.exited.done() else ExitStatus(None)


class Forkserver:
    """One forkserver from its start to its end. Each forkserver has an object of its own. `torch_control`: the
    control socket of the forkserver with torch that it was already asked for."""

    def __init__(
        self, control: socket.socket, child: ForkserverProcess, torch_control: socket.socket | None = None
    ) -> None:
        self._control = control
        self._child = child
        self._torch_control = torch_control
        self._ids = itertools.count(FIRST_REQUEST_ID + 1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._processes: dict[int, ForkedProcess] = {}
        self._early: dict[int, ExitStatus] = {}
        self._unread = b""
        self._sending = asyncio.Lock()
        self._room: asyncio.Future[None] | None = None
        self._closing = False
        #: True while it accepts requests for workers.
        self.usable = True
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ready.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        if torch_control is not None:
            self._expect(FIRST_REQUEST_ID)
        self.reader = watched(self._read(), "The forkserver's reader")

    @staticmethod
    def of(started: StartedForkserver) -> Forkserver:
        """The forkserver that was started, which is `ready` when it has imported its preloaded modules."""
        inherited = isinstance(started.child, Inherited)
        found = Forkserver(started.control, _Started(started.child), None if inherited else started.torch_control)
        if started.ready:
            resolve(found.ready)
        return found

    def forked_earlier(self, control: socket.socket, pid: int, ready: bool) -> Forkserver:
        """The forkserver with torch that this one forked, and whether it has told that it is ready."""
        found = self._forked(control, pid)
        if ready:
            resolve(found.ready)
        return found

    def leave(self) -> int | None:
        """Leaves the forkserver, which has no processes any more, to the next server in this process: its control
        socket. None if it can't be left."""
        if not self.usable or self._processes or self._answers or self._unread:
            return None
        self._closing, self.usable = True, False
        self.reader.cancel()
        fd = os.dup(self._control.fileno())
        os.set_inheritable(fd, True)
        return fd

    @property
    def pid(self) -> int:
        return self._child.pid

    async def fork(self, spec: ProcessSpec, channels: Channels, *, env: Mapping[str, str] | None) -> int:
        """Forks a worker, or a holder, and returns its pid. `env`: its whole environment, None for that of the process
        that forks. Raises ForkserverLost; LaunchFailed when it couldn't fork."""
        more = {"env": None if env is None else dict(env), "holds": spec.holds}
        return int((await self.ask("fork", channels.worker_fds(), **more))["pid"])

    async def ask(self, op: str, fds: Sequence[int] = (), **more: Any) -> dict[str, Any]:
        """Returns the reply to a request. Raises as `fork` does."""
        number = next(self._ids)
        return await self._asked(number, request_bytes(op, number, **more), list(fds))

    async def with_torch(self) -> Forkserver:
        """Forks a forkserver that imports torch, or returns the one already asked for. Raises as `fork`."""
        control, self._torch_control = self._torch_control, None
        theirs: socket.socket | None = None
        try:
            if control is not None:
                pid = int((await self._answer(FIRST_REQUEST_ID))["pid"])
            else:
                control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                control.setblocking(False)
                pid = int((await self.ask("preload", [theirs.fileno()]))["pid"])
        except BaseException:
            if control is not None:
                control.close()  # with which the process ends, should it be forked yet
            raise
        finally:
            if theirs is not None:
                theirs.close()
        return self._forked(control, pid)

    def _forked(self, control: socket.socket, pid: int) -> Forkserver:
        child = _Forked(pid, "forkserver")
        child.open_pidfd()
        self._adopt(child)
        return Forkserver(control, child)

    def _expect(self, number: int) -> None:
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        self._answers[number] = answer

    async def _asked(self, number: int, request: bytes, fds: list[int]) -> dict[str, Any]:
        self._expect(number)
        try:
            await self._send(request, fds)
        except BaseException:
            del self._answers[number]
            raise
        return await self._answer(number)

    async def _answer(self, number: int) -> dict[str, Any]:
        try:
            return await self._answers[number]
        finally:
            del self._answers[number]

    async def worker(
        self, spec: ProcessSpec, sink: LineSink, env: Mapping[str, str] | None, limit_s: float
    ) -> WorkerProcess:
        """Forks a worker or a holder in `limit_s`; a forkserver without an answer is set aside. Raises as `fork`."""
        channels = Channels()
        try:
            pid = await asyncio.wait_for(self.fork(spec, channels, env=env), limit_s)
        except TimeoutError:
            channels.close()
            self.set_aside()
            raise ForkserverLost(f"{self._child.what} (pid {self.pid}) doesn't answer") from None
        except BaseException:
            channels.close()
            raise
        channels.close_worker_side()
        return self.attach(pid, spec, channels, sink)

    def attach(self, pid: int, spec: ProcessSpec, channels: Channels, sink: LineSink) -> WorkerProcess:
        """Returns the worker process that the forkserver forked as `pid`."""
        process = attach(pid, spec, channels, sink)
        self._adopt(process)
        return process

    def forget(self, pid: int) -> None:
        """Follows a process that it forked no longer."""
        process = self._processes.pop(pid, None)
        if process is not None:
            self._unwatch(process)

    def _adopt(self, process: ForkedProcess) -> None:
        self._processes[process.pid] = process
        if process.pid in self._early:
            self._ended(process.pid, self._early.pop(process.pid))
        elif process.pidfd is not None:
            asyncio.get_running_loop().add_reader(process.pidfd, self._pidfd_ready, process)

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
        """Waits until the forkserver's socket is writable, or it is set aside."""
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
        reason = "it closed its socket"
        try:
            while piece := await loop.sock_recv(self._control, 65536):
                self._unread = self._take(self._unread + piece)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error)
        except Exception as error:  # of any kind: callers that wait must hear that no answer will come
            log.exception("A reply of %s can't be handled", self._child.what)
            reason = f"{type(error).__name__}: {error}"
        self._stop_sending()
        async with self._sending:
            self._control.close()
        how = await self._child.end()
        self._lost(f"{self._child.what} has ended ({how.describe()}): {reason}")

    def _take(self, data: bytes) -> bytes:
        while len(data) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(data)
            if length > REPLY_BYTES_MAX:
                raise ValueError(f"reply of {length} bytes")
            if len(data) < LENGTH.size + length:
                break
            self._handle(json.loads(data[LENGTH.size : LENGTH.size + length]))
            data = data[LENGTH.size + length :]
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

    def _unwatch(self, process: ForkedProcess) -> None:
        if process.pidfd is not None:
            asyncio.get_running_loop().remove_reader(process.pidfd)

    def _pidfd_ready(self, process: ForkedProcess) -> None:
        self._unwatch(process)
        wait_s = EXIT_STATUS_S_MAX if self.usable else 0.0
        asyncio.get_running_loop().call_later(wait_s, self._unknown, process)

    def _unknown(self, process: ForkedProcess) -> None:
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
            try:
                self._control.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it has closed it already, and is ending
            done, _ = await asyncio.wait({self.reader}, timeout=CLOSE_S_MAX)
            if not done:
                self._child.kill()
                await asyncio.wait({self.reader})


#: The most seconds until a new forkserver has imported torch, from a cold disk.
READY_S_MAX = 120.0
#: The most seconds until it has forked a worker, which usually takes about 10 ms.
FORK_S_MAX = 15.0


class ForkLauncher:
    """The plain forkserver and the one with torch, one of each at a time. One that dies takes the processes it had
    forked with it (on Linux the kernel ends them); the next launch starts a new one, and requests that those workers
    had not started run on their successors.

    A forkserver that lives but doesn't answer is set aside: its workers keep running, it ends with the last of them,
    and the worker that couldn't be forked is exec'd by `fallback`. `started`: the first forkserver, if it was started
    already.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        fallback: ExecLauncher,
        *,
        preload_torch: bool = True,
        started: StartedForkserver | None = None,
        ready_s_max: float = READY_S_MAX,
        fork_s_max: float = FORK_S_MAX,
    ) -> None:
        self._env, self._preload_torch = env, preload_torch
        self._fallback = fallback
        self._ready_s_max, self._fork_s_max = ready_s_max, fork_s_max
        self._started = started
        self._plain: Forkserver | None = None
        self._with_torch: Forkserver | None = None
        self._all: set[Forkserver] = set()
        self._plain_lock, self._torch_lock = asyncio.Lock(), asyncio.Lock()
        self._preloading: asyncio.Task[None] | None = None
        self._made_of = ""

    async def start(self) -> None:
        """Starts the forkservers; returns at once, `launch` waits until the one it needs is ready."""
        await self._plain_server()
        if self._preload_torch:
            self._preloading = watched(self._preload(), "The start of the forkserver with torch")

    async def _preload(self) -> None:
        try:
            await self._torch_server()
        except (ForkserverLost, LaunchFailed, OSError) as error:
            log.error("The forkserver with torch can't be started: %s; the next worker tries again", error)

    async def _plain_server(self) -> Forkserver:
        async with self._plain_lock:
            if self._plain is None or not self._plain.usable:
                started, self._started = self._started, None
                if started is None:
                    started = await asyncio.to_thread(start_forkserver, self._env, self._preload_torch)
                if self._with_torch is not None:  # the old one's child: both end with their workers
                    self._with_torch.set_aside()
                self._made_of = started.made_of
                self._plain = self._keep(Forkserver.of(started))
                if started.torch_pid and started.torch_control is not None:
                    control, pid, ready = started.torch_control, started.torch_pid, started.torch_ready
                    self._with_torch = self._keep(self._plain.forked_earlier(control, pid, ready))
            return self._plain

    async def _torch_server(self) -> Forkserver:
        async with self._torch_lock:
            plain = await self._plain_server()
            if self._with_torch is None or not self._with_torch.usable:
                await self._answered(plain, asyncio.shield(plain.ready), self._ready_s_max)
                self._with_torch = self._keep(await self._answered(plain, plain.with_torch(), self._fork_s_max))
            return self._with_torch

    def _keep(self, server: Forkserver) -> Forkserver:
        self._all.add(server)
        server.reader.add_done_callback(self._forget)
        return server

    def _forget(self, _: object) -> None:
        self._all = {server for server in self._all if not server.reader.done()}

    async def _answered(self, server: Forkserver, asked: Awaitable[T], limit_s: float) -> T:
        """The answer of a forkserver, which is set aside if it gives none within the limit. Raises ForkserverLost."""
        try:
            return await asyncio.wait_for(asked, limit_s)
        except TimeoutError:
            server.set_aside()
            raise ForkserverLost(f"The forkserver (pid {server.pid}) doesn't answer") from None

    async def launch(self, spec: ProcessSpec, sink: LineSink) -> WorkerProcess:
        try:
            with_torch = spec.with_torch and self._preload_torch
            server = await (self._torch_server() if with_torch else self._plain_server())
            return await self._fork(server, spec, sink)
        except ForkserverLost as error:
            log.error("%s: worker of %s is exec'd, the next start makes a new forkserver", error, spec.name)
        return await self._fallback.launch(spec, sink)

    async def _fork(self, server: Forkserver, spec: ProcessSpec, sink: LineSink) -> WorkerProcess:
        await self._answered(server, asyncio.shield(server.ready), self._ready_s_max)
        return await server.worker(spec, sink, spec.env, self._fork_s_max)

    def leave(self) -> dict[str, Any] | None:
        """Leaves the forkservers to the next server in this process, as `spawning.first_forkserver` takes them. None if
        one is missing, or has processes."""
        plain, torch = self._plain, self._with_torch
        if plain is None or (torch is None and self._preload_torch):
            return None
        fds = {"torch_control": torch.leave()} if torch is not None else {}
        if torch is not None:
            plain.forget(torch.pid)
        fds["control"] = plain.leave()
        if None in fds.values():
            for fd in fds.values():
                if fd is not None:
                    os.close(fd)
            return None
        self._all.clear()
        told = {"pid": plain.pid, "made_of": self._made_of, "ready": plain.ready.done()}
        if torch is not None:
            told |= {"torch_pid": torch.pid, "torch_ready": torch.ready.done()}
        return {**fds, **told}

    async def close(self) -> None:
        """Ends the forkservers; the supervisor has to end their workers first."""
        if self._started is not None:
            self._started.close()
        if self._preloading is not None:
            self._preloading.cancel()
            await asyncio.wait({self._preloading})
        await asyncio.gather(*(server.close() for server in self._all))


WHAT = "the process that holds the weights of {name}"


@dataclass(frozen=True, slots=True)
class _Held:
    """A holder's process, which was launched as workers are."""

    what: str
    process: WorkerProcess

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        self.process.kill()

    async def end(self) -> ExitStatus:
        how = await asyncio.shield(self.process.exited)
        self.process.release()
        return how


class HolderLauncher:
    """Starts the workers of one model version from its holder. The holder is started with the first worker, and again
    with the next worker after a failed load or after its death, which also ends its workers; `rest` and `close` end it.

    A holder whose handler can't be forked reports the reason: from then on `below`, which started the holder, starts
    the workers, and they load the model themselves.
    """

    def __init__(self, below: Launcher, plan: WorkerPlan) -> None:
        self._below, self._plan = below, plan
        self._what = WHAT.format(name=plan.spec.name)
        self._loading: asyncio.Task[Forkserver | None] | None = None
        self._holders: set[Forkserver] = set()
        self._failed = False
        #: The reason why the workers load the model themselves; "" as long as they don't.
        self.refusal = ""
        #: The seconds of the latest load, and the number of loads.
        self.load_s = 0.0
        self.loads = 0

    @property
    def pid(self) -> int:
        """The process id of the holder; 0 without a ready one."""
        holder = self._current()
        return holder.pid if holder is not None else 0

    def _current(self) -> Forkserver | None:
        task = self._loading
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        holder = task.result()
        return holder if holder is not None and holder.usable else None

    async def launch(self, spec: ProcessSpec, sink: LineSink) -> WorkerProcess:
        """Forks a worker that already has the model. Raises OSError, LaunchFailed."""
        holder = await self._holder(spec, sink) if not self.refusal else None
        if holder is None:
            return await self._below.launch(spec, sink)
        try:
            return await holder.worker(spec, sink, None, FORK_S_MAX)
        except ForkserverLost as error:
            raise LaunchFailed(str(error)) from error

    async def _holder(self, spec: ProcessSpec, sink: LineSink) -> Forkserver | None:
        """Returns the holder when it has loaded the model, None when it refuses to fork."""
        if self._loading is None or (self._loading.done() and (self._failed or self._current() is None)):
            self.rest()
            self._failed = False
            self._loading = owned(self._loaded(spec, sink))
        loading = self._loading
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            if loading.cancelled():
                raise LaunchFailed(f"{self._what} was ended while it loaded the model") from None
            raise

    async def _loaded(self, spec: ProcessSpec, sink: LineSink) -> Forkserver | None:
        process = await self._below.launch(replace(spec, holds=True), sink)
        process.sock.setblocking(False)
        holder = Forkserver(process.sock, _Held(self._what, process))
        self._holders.add(holder)
        holder.reader.add_done_callback(lambda _: self._holders.discard(holder))
        limit_s = self._plan.startup_timeout_s
        try:
            reply = await asyncio.wait_for(holder.ask("load", settings=self._settings()), limit_s)
        except TimeoutError:
            holder.set_aside()
            raise LaunchFailed(f"{self._what} didn't load it within {limit_s:g} s (startupTimeout)") from None
        except ForkserverLost as error:
            raise LaunchFailed(f"{error}, while it loaded the model") from error
        except BaseException:
            holder.set_aside()
            raise
        return self._judged(holder, reply)

    def _settings(self) -> Mapping[str, Any]:
        return {**self._plan.load, "gpu_id": None, "device_type": "cpu"}

    def _judged(self, holder: Forkserver, reply: Mapping[str, Any]) -> Forkserver | None:
        self.loads += 1
        self.load_s = float(reply["load_s"])
        self._failed = bool(reply["failed"])
        self.refusal = str(reply["refusal"])
        if self.refusal:
            log.warning(
                "%s: shareWeights has no effect, each worker loads the model: %s", self._plan.spec.name, self.refusal
            )
            holder.set_aside()
            return None
        if not self._failed:
            log.info("%s holds them (pid %s), loaded in %.1f s.", _first_upper(self._what), holder.pid, self.load_s)
        return holder

    async def renewed(self, anew: str) -> str:
        """Makes the next workers use the model's present source files, and load the model again if the holder's
        loaded state is outdated, or for the reason `anew`. Returns the reason, "" if the loaded state stays valid."""
        anew = anew or await self._refused()
        if anew:
            self.rest()
            self.refusal = ""  # it is tried again whether it can be forked
        return anew

    async def _refused(self) -> str:
        if self.refusal:
            return f"each worker loads it: {self.refusal}"
        holder = self._current()
        if holder is None or self._failed:
            return "it wasn't loaded"
        try:
            reply = await asyncio.wait_for(holder.ask("renewal"), FORK_S_MAX)
        except (TimeoutError, ForkserverLost, LaunchFailed) as error:
            return f"{self._what} gave no answer: {error}"
        return str(reply["refusal"])

    # --- its end

    def rest(self) -> None:
        """Releases the model's memory: the holder ends with its last worker. The next worker starts a new one."""
        task, self._loading = self._loading, None
        if task is not None:
            task.cancel()
        for holder in self._holders:
            holder.set_aside()

    async def close(self) -> None:
        task = self._loading
        self.rest()
        if task is not None:
            await asyncio.wait({task})
        await asyncio.gather(*(holder.close() for holder in list(self._holders)))


def _first_upper(text: str) -> str:
    return text[:1].upper() + text[1:]
