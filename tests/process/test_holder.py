"""A real process that has loaded a model once, and the workers that it forks."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support import GUARD_S, alive, until
from ts.protocol.frames import LoadFailed, Ready
from ts.runtime.forkable import Footprint, refusal_since

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shareWeights needs Linux")

HANDLER = """
import json, os, random, signal, sys

{top}

class Model:
    def initialize(self, context):
        with open({trace!r}, "a") as trace:
            trace.write(f"{{os.getpid()}}\\n")
        self.values = {{"kept": list(range(5))}}
{initialize}

    def handle(self, data, context):
{handle}
        return [json.dumps(got)] * len(data)
"""


def indented(text: str) -> str:
    return "".join(f"        {line}\n" for line in text.splitlines())


class Model:
    """A model's folder; `write` makes its handler from parts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.trace = folder, folder / "trace"
        folder.mkdir()

    def write(self, initialize: str = "", handle: str = "got = os.getpid()", top: str = "") -> Path:
        text = HANDLER.format(
            top=top, trace=str(self.trace), initialize=indented(initialize), handle=indented(handle).rstrip()
        )
        (self.folder / "handler.py").write_text(text)
        return self.folder

    def loads(self) -> list[int]:
        """The processes that have loaded it."""
        return [int(line) for line in self.trace.read_text().split()]


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Model]:
    yield Model(tmp_path / "model")


@pytest.fixture
def holder(shared_forkservers: Callable[..., Any]) -> Any:
    return shared_forkservers(False).hold()


@pytest.fixture
def torch_holder(shared_forkservers: Callable[..., Any]) -> Any:
    return shared_forkservers(True).hold()


def forked(holder: Any, count: int, model_dir: Path) -> list[Any]:
    workers = []
    for _ in range(count):
        worker, _ = holder.fork()
        answer = worker.load("handler.py", model_dir=str(model_dir), threads=None)
        assert isinstance(answer, Ready), answer
        workers.append(worker)
    return workers


def test_workers_of_a_holder_have_its_model_and_their_own_changes(holder: Any, model: Model) -> None:
    folder = model.write(handle="self.values['kept'].append(os.getpid())\ngot = self.values['kept']")
    assert holder.load(folder) | {"load_s": 0} == {
        "op": "loaded",
        "id": 1,
        "load_s": 0,
        "refusal": "",
        "failed": False,
    }
    workers = forked(holder, 3, folder)
    answers = [worker.json({}) for worker in workers]
    assert [answer[:5] for answer in answers] == [list(range(5))] * 3
    assert len({answer[5] for answer in answers}) == 3, "what a worker writes is its own"
    assert model.loads() == [holder.pid]


def test_a_failed_load_is_what_its_workers_announce(holder: Any, model: Model) -> None:
    folder = model.write(initialize="raise ValueError('no such weights')")
    assert holder.load(folder)["failed"]
    worker, pid = holder.fork()
    answer = worker.load("handler.py", model_dir=str(folder))
    assert isinstance(answer, LoadFailed)
    assert "no such weights" in answer.info["message"] and "handler.py" in answer.info["traceback"]
    assert holder.reply() == {"op": "exit", "pid": pid, "status": 256}


def test_random_numbers_differ(torch_holder: Any, model: Model) -> None:
    folder = model.write(
        top="import numpy, torch",
        initialize="random.seed(1), numpy.random.seed(1), torch.manual_seed(1)",
        handle="got = [random.random(), numpy.random.rand(), torch.rand(1).item()]",
    )
    torch_holder.load(folder)
    drawn = [worker.json({}) for worker in forked(torch_holder, 3, folder)]
    assert [len(set(numbers)) for numbers in zip(*drawn, strict=True)] == [3, 3, 3]


def test_parallel_operations_work_before_and_after_the_fork(torch_holder: Any, model: Model) -> None:
    folder = model.write(
        top="import torch",
        initialize="self.weights = torch.rand(800, 800)\nself.sum = (self.weights @ self.weights).sum().item()",
        handle="torch.set_num_threads(2)\n"
        "got = abs((self.weights @ self.weights).sum().item() - self.sum) < 1e-3 * self.sum",
    )
    assert torch_holder.load(folder)["refusal"] == ""
    workers = forked(torch_holder, 2, folder)
    assert [worker.json({}) for worker in workers] == [True, True]


def test_the_number_of_threads_that_a_handler_sets_is_its_workers(torch_holder: Any, model: Model) -> None:
    folder = model.write(
        top="import torch", initialize="torch.set_num_threads(1)", handle="got = torch.get_num_threads()"
    )
    assert torch_holder.load(folder)["refusal"] == ""
    (worker,) = forked(torch_holder, 1, folder)
    assert worker.json({}) == 1


def test_threads_that_have_ended_are_no_reason() -> None:
    for _ in range(300):  # about every third thread is in the kernel for a moment after it was joined
        before = Footprint.now()
        thread = threading.Thread(target=bool)
        thread.start()
        thread.join(GUARD_S)
        assert refusal_since(before) == ""


def test_threads_of_torch_are_refused(torch_holder: Any, model: Model) -> None:
    folder = model.write(
        top="import torch",
        initialize="torch.set_num_threads(3)\nself.sum = torch.rand(1000, 1000).exp().sum().item()",
    )
    refusal = torch_holder.load(folder)["refusal"]
    assert "native thread" in refusal and "by a parallel operation" in refusal


@pytest.mark.parametrize(
    ("initialize", "words"),
    [
        (
            "import threading\nself.end = threading.Event()\n"
            "threading.Thread(target=self.end.wait, name='poller', daemon=True).start()",
            "it has started 1 thread (poller), which",
        ),
        ("import socket\nself.pair = socket.socketpair()", "it has opened 2 connections (socket:["),
        ("import subprocess\nself.child = subprocess.Popen(['sleep', '100'])", "it has started 1 process ("),
        ("from ts.runtime.calls import here\nhere()", "it calls another model while it is loaded"),
    ],
)
def test_what_forks_cannot_share_is_refused(holder: Any, model: Model, initialize: str, words: str) -> None:
    assert words in holder.load(model.write(initialize=initialize))["refusal"]


def test_a_device_is_refused(holder: Any, model: Model) -> None:
    """A stand-in for torch, since there may be no GPU."""
    folder = model.write(initialize="import torch\nassert torch.cuda.is_initialized()")
    (folder / "torch.py").write_text(
        "def get_num_threads(): return 1\nclass cuda:\n    is_initialized = staticmethod(lambda: True)\n"
    )
    assert holder.load(folder)["refusal"] == "it uses cuda, which a forked process can't"


def test_files_stay_open_and_each_worker_reads_from_its_own_place(holder: Any, model: Model) -> None:
    folder = model.write(
        initialize=f"self.file = open({__file__!r}, 'rb', buffering=0)\nself.file.read(7)",
        handle="got = self.file.read(20).decode()",
    )
    assert holder.load(folder)["refusal"] == ""
    expected = Path(__file__).read_text()[7:27]
    assert [worker.json({}) for worker in forked(holder, 3, folder)] == [expected] * 3


def test_async_handlers_get_a_loop_in_each_worker(holder: Any, model: Model) -> None:
    folder = model.write(handle="got = await self.later()")
    text = (folder / "handler.py").read_text().replace("    def ", "    async def ")
    (folder / "handler.py").write_text(
        text
        + "\n    async def later(self):\n        import asyncio\n        await asyncio.sleep(0)\n        return 'ok'\n"
    )
    assert holder.load(folder)["refusal"] == ""
    assert [worker.json({}) for worker in forked(holder, 2, folder)] == ["ok", "ok"]
    assert model.loads() == [holder.pid]


def test_an_async_handler_with_a_task_is_refused(holder: Any, model: Model) -> None:
    folder = model.write(initialize="import asyncio\nself.task = asyncio.ensure_future(asyncio.sleep(100))")
    text = (folder / "handler.py").read_text().replace("    def ", "    async def ")
    (folder / "handler.py").write_text(text)
    assert "asyncio tasks" in holder.load(folder)["refusal"]


def test_workers_inherit_no_descriptor_of_the_holder(holder: Any, model: Model) -> None:
    folder = model.write(
        handle="got = sorted(os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')[:-1])"
    )
    holder.load(folder)
    first, second = forked(holder, 2, folder)
    kinds = [link.split(":")[0] for link in second.json({})]
    assert kinds.count("socket") == 3, "its own and its watch's pair"
    assert kinds.count("pipe") == 0 and kinds.count("/dev/null") == 1


def test_workers_die_with_the_holder_and_the_holder_with_the_forkserver(
    start_forkserver: Callable[..., Any], model: Model
) -> None:
    server = start_forkserver("--plain")
    folder = model.write(handle="import time\ntime.sleep(1000)")
    for killed in ("holder", "forkserver"):
        holder = server.hold()
        holder.load(folder)
        (worker,) = forked(holder, 1, folder)
        ends_with(worker, holder.pid, holder.pid if killed == "holder" else server.process.pid)
        if killed == "holder":
            assert server.reply()["op"] == "exit"


def ends_with(worker: Any, holder_pid: int, killed_pid: int) -> None:
    """A worker in a handler's call, and its holder, end when a process is killed."""
    worker.predict({}, batch_id=1)
    until(lambda: worker.begun(1))
    os.kill(killed_pid, signal.SIGKILL)
    worker.to_end()
    until(lambda: not alive(holder_pid))


def test_the_end_of_its_socket_ends_a_holder(start_forkserver: Callable[..., Any], model: Model) -> None:
    server = start_forkserver("--plain")
    holder = server.hold()
    holder.load(model.write())
    holder.control.close()
    reply = server.reply()
    assert (reply["op"], reply["pid"]) == ("exit", holder.pid)
    assert json.dumps(reply["status"]) == "0"
