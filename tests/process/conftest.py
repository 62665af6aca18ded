"""A real worker process (exec'd or forked) at the end of a socket, driven by the test with frames."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support import GUARD_S
from ts.protocol.decoder import Decoder
from ts.protocol.frames import (
    Chunk,
    Failed,
    Input,
    Item,
    Load,
    LoadFailed,
    Message,
    Pieces,
    Predict,
    Ready,
    Stop,
    chunks_of,
    encode_bytes,
)
from ts.protocol.shared import PROGRESS_BYTES, has_begun
from ts.runtime.forkserver import MORE_PRELOADED, PRELOADED
from ts.runtime.process import THREAD_VARIABLES
from warm_start import Program, Template

HANDLERS = Path(__file__).parent.parent / "handlers"


class DrivenWorker:
    """The frontend's role, played by a test."""

    def __init__(self, folder: Path) -> None:
        self.sock, self.theirs = socket.socketpair()
        self.sock.settimeout(GUARD_S)
        self.out_file, self.err_file = folder / "stdout", folder / "stderr"
        self.progress = (folder / "torchrelay-progress").open("w+b")
        self.progress.truncate(PROGRESS_BYTES)
        self.decoder = Decoder(1 << 30)
        self.ids = itertools.count(1)
        self.pending: dict[int, list[Chunk]] = {}
        self.answers: dict[int, bytes | Failed] = {}
        self.order: list[int] = []
        self.first: dict[int, Chunk] = {}
        self.other: list[Message] = []
        self.ended = False

    def send(self, *messages: Message) -> None:
        self.sock.sendall(b"".join(encode_bytes(message) for message in messages))

    def load(self, handler: str, **settings: Any) -> Ready | LoadFailed:
        self.begin_load(handler, **settings)
        return self.loaded()

    def begin_load(self, handler: str, **settings: Any) -> None:
        base = {"model_name": "m", "model_version": "1.0", "model_dir": str(HANDLERS), "handler": handler}
        self.send(Load({**base, "batch_size": 1, "decode_input_request": True, "threads": 1, **settings}))

    def loaded(self) -> Ready | LoadFailed:
        while not self.other:
            assert self.receive(), "the worker ended without an answer to Load"
        message = self.other.pop(0)
        assert isinstance(message, (Ready, LoadFailed))
        return message

    def predict(self, *bodies: Any, deadline_s: float = math.inf, batch_id: int | None = None) -> list[int]:
        """Sends one batch, each body a JSON value or a list of inputs; the jobs' ids."""
        predict = self.batch(*bodies, deadline_s=deadline_s, batch_id=batch_id)
        self.send(predict)
        return [item.job_id for item in predict.items]

    def batch(
        self, *bodies: Any, deadline_s: float = math.inf, batch_id: int | None = None, headers: Any = ()
    ) -> Predict:
        items = []
        for body in bodies:
            job_id = next(self.ids)
            items.append(Item(job_id, f"id-{job_id}", deadline_s, headers, _inputs(body)))
        return Predict(items[0].job_id if batch_id is None else batch_id, items)

    def receive(self) -> bool:
        """Takes the received messages; returns False at the end of the socket."""
        try:
            data = self.sock.recv(1 << 20)
        except ConnectionError:
            data = b""
        for message in self.decoder.feed(data):
            self._take(message)
        self.ended = not data
        return bool(data)

    def _take(self, message: Message) -> None:
        if isinstance(message, Pieces):
            for piece in chunks_of(message):
                self._take(piece)
        elif isinstance(message, Chunk):
            self.first.setdefault(message.job_id, message)
            pieces = self.pending.setdefault(message.job_id, [])
            pieces.append(message)
            if message.last:
                self._end(message.job_id, b"".join(bytes(piece.data) for piece in pieces))
        elif isinstance(message, Failed):
            self._end(message.job_id, message)
        else:
            self.other.append(message)

    def _end(self, job_id: int, answer: bytes | Failed) -> None:
        assert job_id not in self.answers, "one final answer per request"
        self.answers[job_id] = answer
        self.order.append(job_id)

    def answer(self, job_id: int) -> bytes | Failed:
        while job_id not in self.answers:
            assert self.receive(), f"the worker ended without an answer to {job_id}"
        return self.answers[job_id]

    def ask(self, *bodies: Any, **options: Any) -> Any:
        """The answer to a batch: a list, or for one body that answer itself."""
        answers = [self.answer(job_id) for job_id in self.predict(*bodies, **options)]
        return answers if len(bodies) > 1 else answers[0]

    def json(self, body: Any) -> Any:
        answer = self.ask(body)
        assert isinstance(answer, bytes), answer
        return json.loads(answer)

    def pieces(self, job_id: int, count: int) -> list[bytes]:
        """The first pieces of a stream."""
        while len(self.pending.get(job_id, ())) < count:
            assert self.receive()
        return [bytes(piece.data) for piece in self.pending[job_id]]

    def begun(self, *batch_ids: int) -> list[int]:
        """Of these batches, those that the handler may have been called for."""
        table = os.pread(self.progress.fileno(), PROGRESS_BYTES, 0)
        return [batch_id for batch_id in batch_ids if has_begun(table, batch_id)]

    def to_end(self) -> None:
        while self.receive():
            pass

    def close(self) -> None:
        self.sock.close()
        self.theirs.close()
        self.progress.close()


def interpreter() -> tuple[str, str | None]:
    """What decides which package `ts` a worker imports: a test may set both."""
    return sys.executable, os.environ.get("PYTHONPATH")


OWN_INTERPRETER = interpreter()


@functools.cache
def worker_template() -> Template:
    """The process that workers are forked from, with OWN_INTERPRETER, and with NumPy, as a forkserver has it."""
    env = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1")}  # forked with a single thread
    return Template("ts.runtime.main:main", *PRELOADED, *MORE_PRELOADED, env=env, is_main=True)


class StartedWorker(DrivenWorker):
    """A worker like that of `python -m ts.runtime.main`: forked with its modules imported, unless it is `executed`, as
    with another interpreter than the template's."""

    def __init__(self, folder: Path, *, executed: bool) -> None:
        super().__init__(folder)
        fds = self.theirs.fileno(), self.progress.fileno()
        words = ["--fd", str(fds[0]), "--progress-fd", str(fds[1])]
        self.process: Program | subprocess.Popen[bytes]
        with self.out_file.open("wb") as out, self.err_file.open("wb") as err:
            if executed or interpreter() != OWN_INTERPRETER:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "ts.runtime.main", *words],
                    pass_fds=fds,
                    stdout=out,
                    stderr=err,
                    stdin=subprocess.DEVNULL,
                )
            else:
                self.process = worker_template().start(words, stdout=out.fileno(), stderr=err.fileno(), pass_fds=fds)
                self.process.stdout.close()
        self.theirs.close()

    def stop(self) -> int:
        self.send(Stop())
        self.to_end()
        return self.process.wait(GUARD_S)

    def close(self) -> None:
        super().close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(GUARD_S)


def _inputs(body: Any) -> list[Input]:
    if isinstance(body, list):
        return body
    if isinstance(body, bytes):
        return [Input("data", "", body)]
    return [Input("body", "application/json", json.dumps(body).encode())]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Processes side by side share the template."""
    if any(Path(__file__).parent in item.path.parents for item in session.items):
        worker_template()


def pytest_sessionfinish() -> None:
    if worker_template.cache_info().currsize:
        worker_template().close()


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[Callable[..., StartedWorker]]:
    """Starts a worker with a handler of tests/handlers; LoadFailed is an error of the test."""
    workers: list[StartedWorker] = []

    def start(handler: str = "probe.py", load: bool = True, executed: bool = False, **settings: Any) -> StartedWorker:
        folder = tmp_path / f"worker{len(workers)}"
        folder.mkdir()
        workers.append(StartedWorker(folder, executed=executed))
        if load:
            answer = workers[-1].load(handler, **settings)
            assert isinstance(answer, Ready), answer
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()


class DrivenForkserver:
    """The control socket of a real forkserver."""

    LENGTH = struct.Struct("<I")

    def __init__(self, folder: Path, control: socket.socket, process: subprocess.Popen[bytes] | None) -> None:
        self.folder = folder
        self.control = control
        self.control.settimeout(GUARD_S)
        self.process = process
        self.pid = 0 if process is None else process.pid
        self.data = b""
        self.workers: list[DrivenWorker] = []
        self.holders: list[DrivenHolder] = []
        self.env: dict[str, str] | None = dict(os.environ)
        self.ids = itertools.count(1)

    @staticmethod
    def started(folder: Path, *options: str) -> DrivenForkserver:
        """A new one."""
        control, theirs = socket.socketpair()
        argv = [sys.executable, "-m", "ts.runtime.forkserver", "--fd", str(theirs.fileno()), *options]
        process = subprocess.Popen(argv, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
        theirs.close()
        return DrivenForkserver(folder, control, process)

    def with_torch(self) -> DrivenForkserver:
        """A fork of it that imports torch, before it is ready."""
        control, theirs = socket.socketpair()
        self.ask({"op": "preload", "id": next(self.ids)}, [theirs.fileno()])
        theirs.close()
        folder = self.folder / "with_torch"
        folder.mkdir()
        second = DrivenForkserver(folder, control, None)
        second.pid = self.reply()["pid"]
        return second

    def wait_until_ready(self) -> DrivenForkserver:
        assert self.reply() == {"op": "ready", "pid": self.pid}
        return self

    def reply(self) -> dict[str, Any]:
        while len(self.data) < 4 or len(self.data) < 4 + self.LENGTH.unpack_from(self.data)[0]:
            piece = self.control.recv(65536)
            assert piece, "the forkserver ended"
            self.data += piece
        (length,) = self.LENGTH.unpack_from(self.data)
        body, self.data = self.data[4 : 4 + length], self.data[4 + length :]
        found: dict[str, Any] = json.loads(body)
        return found

    def ask(self, request: dict[str, Any], fds: list[int]) -> None:
        body = json.dumps(request).encode()
        socket.send_fds(self.control, [self.LENGTH.pack(len(body)) + body], fds)

    def hold(self) -> DrivenHolder:
        """A forked holder of a model, which has loaded none yet."""
        channels, pid = self.fork(more={"holds": True})
        holder = DrivenHolder(self.folder / f"holder{pid}", channels.sock, pid)
        holder.wait_until_ready()
        self.holders.append(holder)
        return holder

    def fork(self, env: dict[str, str] | None = None, more: dict[str, Any] | None = None) -> tuple[DrivenWorker, int]:
        """A forked worker and its pid."""
        number = next(self.ids)
        folder = self.folder / f"forked{number}"
        folder.mkdir()
        worker = DrivenWorker(folder)
        self.workers.append(worker)
        with worker.out_file.open("wb") as out, worker.err_file.open("wb") as err:
            fds = [worker.theirs.fileno(), worker.progress.fileno(), out.fileno(), err.fileno()]
            self.ask({"op": "fork", "id": number, "env": self.env if env is None else env, **(more or {})}, fds)
            worker.theirs.close()
            reply = self.reply()
            while reply["op"] == "exit":  # of a worker that was forked before
                reply = self.reply()
        assert (reply["op"], reply["id"]) == ("forked", number), reply
        return worker, reply["pid"]

    def close(self) -> None:
        self.control.close()
        for holder in self.holders:
            holder.close()
        for worker in self.workers:
            worker.close()
        if self.process is not None:
            self.process.wait(GUARD_S)


class DrivenHolder(DrivenForkserver):
    """A real process that holds a model for the workers it forks."""

    def __init__(self, folder: Path, control: socket.socket, pid: int) -> None:
        folder.mkdir()
        super().__init__(folder, control, None)
        self.pid, self.env = pid, None

    def load(self, model_dir: Path, handler: str = "handler.py", **settings: Any) -> dict[str, Any]:
        """Has it load a model; its reply."""
        base = {"model_name": "m", "model_version": "1.0", "model_dir": str(model_dir), "handler": handler}
        number = next(self.ids)
        self.ask({"op": "load", "id": number, "settings": {**base, "batch_size": 1, **settings}}, [])
        reply = self.reply()
        assert reply["id"] == number, reply
        return reply


@pytest.fixture
def start_forkserver(tmp_path: Path) -> Iterator[Callable[..., DrivenForkserver]]:
    """Starts a forkserver and waits until it is ready."""
    servers: list[DrivenForkserver] = []

    def start(*options: str) -> DrivenForkserver:
        servers.append(DrivenForkserver.started(tmp_path, *options))
        return servers[-1].wait_until_ready()

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def shared_forkservers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[bool], DrivenForkserver]]:
    """The module's forkserver without or with torch, for tests that ask it for nothing but workers and holders."""
    servers: dict[bool, DrivenForkserver] = {}

    def start(with_torch: bool) -> DrivenForkserver:
        if False not in servers:
            plain = DrivenForkserver.started(tmp_path_factory.mktemp("forkserver"), "--plain")
            servers[False] = plain.wait_until_ready()
        if with_torch and True not in servers:
            servers[True] = servers[False].with_torch().wait_until_ready()
        return servers[with_torch]

    yield start
    for server in servers.values():
        server.close()
