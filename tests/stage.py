"""Pools with a launcher and a clock of the test's: worker processes that the test plays. The pool, its slots, workers,
queue and connections are the server's own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from support import GUARD_S, until_async
from ts.protocol.decoder import Decoder
from ts.protocol.frames import Chunk, Failed, Input, LoadFailed, Message, Predict, Ready, encode_bytes
from ts.protocol.shared import PROGRESS_BYTES, Progress
from ts_frontend.job import Job, Ledger
from ts_frontend.scheduling.batcher import Policy
from ts_frontend.scheduling.queues import JobQueue
from ts_frontend.workers.pool import Clock, Pool, PoolResources
from ts_frontend.workers.process import Backoff, Channels, ExitStatus, LineSink, ProcessSpec, WorkerPlan, WorkerProcess
from ts_frontend.workers.resources import CPU

SYNTAX_ERROR = {
    "code": 500,
    "message": "SyntaxError: invalid syntax (m.py, line 1)",
    "traceback": "  m.py\nSyntaxError",
}


class Actor(WorkerProcess):
    """A process that the test plays: `theirs`: its end of the socket; `given`: the received messages that no test
    has read yet."""

    theirs: socket.socket
    given: list[Message]
    memory: int

    def take_stage(self, theirs: socket.socket) -> None:
        self.theirs, self.given, self.memory = theirs, [], 0
        theirs.setblocking(False)
        self._decoder, self._table = Decoder(1 << 20), bytearray(PROGRESS_BYTES)

    def heard(self, kind: type[Any]) -> Any:
        """The next message of that kind; None when it hasn't come."""
        try:
            if self.theirs.fileno() < 0:
                return None
            self.given += self._decoder.feed(self.theirs.recv(1 << 20))
        except BlockingIOError:
            pass
        found = next((message for message in self.given if isinstance(message, kind)), None)
        if found is not None:
            self.given.remove(found)
        return found

    async def batch(self, begins: bool = True) -> Predict:
        """Waits for a batch, and notes that its handler is called."""
        found = await until_async(lambda: self.heard(Predict))
        assert isinstance(found, Predict)
        if begins:
            self.note(found)
        return found

    def note(self, batch: Predict) -> None:
        """Notes that the batch's handler is called."""
        Progress(self._table).begin(batch.batch_id)
        os.pwrite(self.progress.fileno(), self._table, 0)

    def hold(self, count: int) -> None:
        """Says that so many requests wait in its engine."""
        Progress(self._table).wait(count)
        os.pwrite(self.progress.fileno(), self._table, 0)

    def resident_bytes(self) -> int:
        return self.memory

    def say(self, *messages: Message) -> None:
        self.theirs.sendall(b"".join(map(encode_bytes, messages)))

    def answer(self, batch: Predict, data: bytes = b"ok") -> None:
        self.say(*(Chunk(item.job_id, data) for item in batch.items))

    def fail(self, batch: Predict) -> None:
        """The handler raises."""
        whole = len(batch.items) > 1
        self.say(*(Failed(item.job_id, 503, "Prediction failed", whole=whole) for item in batch.items))

    def kill_with_stacks(self) -> None:
        self.kill()

    def kill(self) -> None:
        self.end(-signal.SIGKILL)

    def end(self, code: int | None) -> None:
        self.theirs.close()
        self.ended(ExitStatus(code))

    def release(self) -> None:
        self.progress.close()


class Stage:
    """The launcher and the other resources of a pool. `scenes`: the behaviour of the next processes; all later ones
    are ready. A scene is ready, fails (a handler's exception), dies (killed while loading), exits (with a status
    while loading), hangs (loads forever), an exception (raised by the launch), or a function that the launch awaits
    and that may return one of these words."""

    def __init__(self, *scenes: str | Exception | Callable[[], Awaitable[str | None]]) -> None:
        self.scenes = list(scenes)
        self.launcher = self
        self.actors: list[Actor] = []
        self.launched = 0
        self.lines: list[str] = []
        self.handler_kind = "blocking"
        self.memory = 0
        self.device = CPU
        self._id = 9000

    def next_worker_id(self) -> int:
        self._id += 1
        return self._id - 1

    def line_sink(self, worker_id: int) -> LineSink:
        return lambda stream, line: self.lines.append(line)

    async def launch(self, spec: ProcessSpec, sink: LineSink) -> WorkerProcess:
        self.launched += 1
        scene = self.scenes.pop(0) if self.scenes else "ready"
        if isinstance(scene, Exception):
            raise scene
        if callable(scene):
            scene = await scene() or "ready"
        channels = Channels()
        actor = Actor(1 << 30, spec.name, channels.sock, channels.progress)
        actor.take_stage(socket.socket(fileno=channels.worker_sock.detach()))
        actor.memory = self.memory
        channels.worker_sock = socket.socket()
        channels.close_worker_side()
        for fd in (channels.stdout, channels.stderr):
            os.close(fd)
        self.actors.append(actor)
        if scene == "ready":
            actor.say(Ready({"handler_kind": self.handler_kind}))
        elif scene == "fails":
            actor.say(LoadFailed(SYNTAX_ERROR))
        elif scene != "hangs":
            actor.end({"dies": -signal.SIGKILL, "exits": 3}[scene])
        return actor

    async def close(self) -> None:
        pass


class Skipping(Clock):
    """Time that passes at once, but for the pauses after `held` of them: those wait for the hurry."""

    def __init__(self, held: int = 1 << 30) -> None:
        self.pauses: list[float] = []
        self._skipped_s = 0.0
        self._held = held
        self.holding = asyncio.Event()

    def now_s(self) -> float:
        return time.monotonic() + self._skipped_s

    async def pause(self, seconds: float, hurry: asyncio.Event) -> None:
        self.pauses.append(seconds)
        if len(self.pauses) > self._held:
            self.holding.set()
            await hurry.wait()
        self._skipped_s += seconds


def pool_of(
    stage: Stage,
    clock: Clock,
    give_up_s: float = 300.0,
    on_change: Callable[[], None] = lambda: None,
    policy: Policy | None = None,
    **plan: Any,
) -> Pool:
    """`plan`: more fields of its workers' plan."""
    usual = WorkerPlan(
        ProcessSpec("m_1.0", {}), {}, startup_timeout_s=GUARD_S, response_timeout_s=GUARD_S, message_bytes_max=1 << 20
    )
    backoff = lambda: Backoff(give_up_s)  # noqa: E731
    resources = PoolResources(stage.launcher, stage.next_worker_id, lambda: stage.device, stage.line_sink)
    return Pool("m_1.0", replace(usual, **plan), JobQueue(policy or Policy()), resources, backoff, on_change, clock)


def waiting(pool: Pool, ledger: Ledger | None = None, **more: Any) -> Job:
    """A request in the queue; `more`: of Job."""
    job = Job(ledger or Ledger(), [Input("data", "", b"x")], request_id="r", **more)
    pool.queue.put(job)
    return job
