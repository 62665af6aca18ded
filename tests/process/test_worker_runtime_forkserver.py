"""A real forkserver and the workers it forks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support import GUARD_S, until
from ts.protocol.frames import Cancel, Ready, Stop
from ts.runtime.process import THREAD_VARIABLES, allotted_cores, physical_cores


def collect(server, count):
    return [server.reply() for _ in range(count)]


def test_a_forked_worker_serves_and_its_end_is_reported(start_forkserver):
    server = start_forkserver("--plain")
    worker, pid = server.fork()
    answer = worker.load("probe.py")
    assert isinstance(answer, Ready)
    assert answer.info["pid"] == pid
    assert worker.ask({"op": "value", "value": "hello"}) == b"hello"
    worker.send(Stop())
    worker.to_end()
    assert server.reply() == {"op": "exit", "pid": pid, "status": 0}


def test_how_a_child_ended_is_reported(start_forkserver):
    server = start_forkserver("--plain")
    worker, pid = server.fork()
    worker.load("probe.py")
    worker.predict({"op": "die"})
    reply = server.reply()
    assert reply["pid"] == pid
    assert os.waitstatus_to_exitcode(reply["status"]) == -signal.SIGKILL
    worker, pid = server.fork()
    worker.load("probe.py")
    worker.predict({"op": "raise", "kind": "exit"})
    assert os.waitstatus_to_exitcode(server.reply()["status"]) == 7


def test_a_child_inherits_nothing_it_should_not(start_forkserver):
    server = start_forkserver("--plain")
    others = [server.fork()[0] for _ in range(2)]
    worker, pid = server.fork({"PATH": os.environ["PATH"], "ONLY": "this"})
    worker.load("probe.py", threads=None)
    found = worker.json({"op": "process"})
    path_of_model = str(Path(__file__).parent.parent / "handlers")  # for processes that the handler starts
    assert found["env"] == {"PATH": os.environ["PATH"], "ONLY": "this", "PYTHONPATH": path_of_model}
    assert found["pid"] == pid
    assert found["leads_session"]
    assert found["sigint"]
    assert len(found["fds"]) == 8  # 0, 1, 2, the socket, its watch's pair, the progress file, and the listing's own
    assert len(others) == 2


def test_output_goes_to_the_pipes(start_forkserver):
    server = start_forkserver("--plain")
    worker, _ = server.fork()
    worker.load("probe.py")
    worker.ask({"op": "print"})
    worker.ask({"op": "raise", "kind": "value"})
    worker.ask({"op": "complain"})
    folder = server.folder / "forked1"
    printed, said, traceback = (folder / "stdout").read_text().partition("\nInvoking custom service failed.")
    assert (printed, bool(said), "ValueError: boom" in traceback) == ("printed line", True, True)
    assert (folder / "stderr").read_text() == "a complaint\n"


def test_a_bad_request_is_refused_and_the_next_one_served(start_forkserver):
    server = start_forkserver("--plain")
    server.ask({"op": "dance", "id": 1}, [])
    assert server.reply() == {"op": "failed", "id": 1, "error": "no such op: dance"}
    server.ask({"op": "fork", "id": 2, "env": {}}, [])
    reply = server.reply()
    assert (reply["op"], reply["id"]) == ("failed", 2)
    assert "4 descriptors" in reply["error"]
    worker, _ = server.fork()
    assert isinstance(worker.load("probe.py"), Ready)


def test_requests_that_arrive_in_pieces_or_together(start_forkserver):
    server = start_forkserver("--plain")
    body = json.dumps({"op": "none", "id": 1}).encode()
    data = server.LENGTH.pack(len(body)) + body
    for at in range(len(data)):
        server.control.sendall(data[at : at + 1])
    server.control.sendall(data * 3)
    assert [reply["op"] for reply in collect(server, 4)] == ["failed"] * 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_ends_the_server_reaches_neither_forkserver_nor_workers(start_forkserver, number):
    server = start_forkserver("--plain")
    worker, pid = server.fork()
    worker.load("probe.py")
    os.kill(server.process.pid, number)
    os.kill(pid, number)
    assert worker.ask({"op": "value", "value": "alive"}) == b"alive"
    assert isinstance(server.fork()[0].load("probe.py"), Ready)


@pytest.mark.parametrize("how", ["spawned", "forked"])
def test_what_a_handler_starts_ends_by_sigterm(start_forkserver, how):
    server = start_forkserver("--plain")
    worker, _ = server.fork()
    worker.load("probe.py")
    assert json.loads(worker.ask({"op": "terminate", "how": how})) == -signal.SIGTERM


def test_the_end_of_the_control_socket_ends_everything(start_forkserver):
    server = start_forkserver("--plain")
    worker, _ = server.fork()
    worker.load("probe.py")
    server.control.close()
    assert server.process.wait(60) == 0
    if sys.platform == "linux":
        worker.to_end()


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_workers_die_with_the_forkserver_even_inside_a_handler(start_forkserver):
    server = start_forkserver("--plain")
    worker, _ = server.fork()
    worker.load("probe.py")
    worker.predict({"op": "until_cancelled"}, batch_id=1)
    until(lambda: worker.begun(1))
    server.process.kill()
    worker.to_end()


def test_a_worker_dies_with_its_socket_while_the_forkserver_lives(start_forkserver):
    server = start_forkserver("--plain")
    worker, pid = server.fork()
    worker.load("probe.py")
    worker.predict({"op": "stream_forever"})
    worker.sock.close()
    assert server.reply() == {"op": "exit", "pid": pid, "status": 0}


# --- with torch


@pytest.fixture
def torch_server(start_forkserver):
    """A forkserver with torch; `plain` is the one it was forked from."""
    pytest.importorskip("torch")
    plain = start_forkserver()
    server = plain.with_torch()
    server.plain = plain
    yield server
    server.close()


def test_workers_without_torch_serve_while_it_is_being_imported(torch_server):
    worker, _ = torch_server.plain.fork()
    assert isinstance(worker.load("probe.py"), Ready)
    assert worker.json({"op": "process"})["torch"] is False
    torch_server.wait_until_ready()
    worker, _ = torch_server.fork()
    worker.load("probe.py")
    assert worker.json({"op": "process"})["torch"] is True


def test_the_forkservers_have_one_thread(torch_server):
    torch_server.wait_until_ready()
    if sys.platform == "linux":
        for server in (torch_server, torch_server.plain):
            assert len(os.listdir(f"/proc/{server.pid}/task")) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_the_forkserver_with_torch_dies_with_the_plain_one(torch_server):
    torch_server.plain.process.kill()
    assert torch_server.control.recv(1) == b""


def test_the_end_of_the_forkserver_with_torch_is_reported_by_the_plain_one(torch_server):
    torch_server.wait_until_ready().control.close()
    assert torch_server.plain.reply() == {"op": "exit", "pid": torch_server.pid, "status": 0}
    assert isinstance(torch_server.plain.fork()[0].load("probe.py"), Ready)


def test_forked_workers_draw_different_numbers(shared_forkservers):
    draws = []
    for _ in range(2):
        worker, _ = shared_forkservers(True).fork()
        worker.load("probe.py")
        draws.append(worker.json({"op": "random"}))
    first, second = draws
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_parallel_operations_work_while_loading_and_serving(shared_forkservers, tmp_path):
    """The model runs multi-threaded operations when it is loaded, in every worker, and again when it serves."""
    (tmp_path / "parallel.py").write_text(
        "import torch\n"
        "class Parallel:\n"
        "    def initialize(self, context):\n"
        "        self.weights = torch.ones(500, 500)\n"
        "        self.check = float((self.weights @ self.weights).sum())\n"
        "    def handle(self, data, context):\n"
        "        again = float((self.weights @ self.weights).sum())\n"
        "        return [{'equal': again == self.check, 'threads': torch.get_num_threads()}] * len(data)\n"
    )
    workers = [shared_forkservers(True).fork()[0] for _ in range(3)]
    for worker in workers:
        worker.begin_load("parallel.py", model_dir=str(tmp_path), threads=2)
    for worker in workers:
        assert isinstance(worker.loaded(), Ready)
        assert worker.json(b"x") == {"equal": True, "threads": 2}


CORES = physical_cores()
SHARE = max(1, CORES // 2)


@pytest.mark.parametrize(
    ("settings", "given", "sees", "known"),
    [
        ({}, None, CORES, None),
        ({"workers": 2}, None, SHARE, str(SHARE)),
        ({"workers": 1000}, None, 1, "1"),
        ({"workers": 2}, "3", 3, "3"),
        ({"threads": 5, "workers": 2}, "3", 5, "5"),
    ],
)
@pytest.mark.parametrize("when", ["at its start", pytest.param("by the handler", marks=pytest.mark.long)])
def test_the_threads_that_a_handler_sees(shared_forkservers, tmp_path, when, settings, given, sees, known):
    """The model's setting, else the environment's, else its share of the cores, also if torch is imported later."""
    (tmp_path / "seeing.py").write_text(
        "import os, torch\ndef handle(data, context):\n"
        "    return data and [{'threads': torch.get_num_threads(), 'known': os.environ.get('OMP_NUM_THREADS')}]\n"
    )
    server = shared_forkservers(when == "at its start")
    env = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}
    worker, _ = server.fork({**env, "OMP_NUM_THREADS": given} if given else env)
    if when == "by the handler":
        sees = min(sees, CORES)  # torch's own rule for what the environment says
    answer = worker.load("seeing.py", model_dir=str(tmp_path), **{"threads": None, **settings})
    assert worker.json(b"x") == {"threads": sees, "known": known}
    assert answer.info["threads"] == sees


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "5000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, sys.maxsize),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, sys.maxsize),
        ({"cpu.max": "broken"}, sys.maxsize),
        ({}, sys.maxsize),
    ],
)
def test_the_cores_that_a_container_may_use(tmp_path, files, cores):
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert allotted_cores(tmp_path) == cores


def test_cancelling_works_in_a_forked_worker(shared_forkservers):
    worker, _ = shared_forkservers(True).fork()
    worker.load("probe.py")
    job = worker.predict({"op": "until_cancelled"})[0]
    worker.send(Cancel(job))
    assert worker.answer(job).code == 499


def test_a_missing_torch_is_left_to_the_server_to_tell() -> None:
    code = "import sys; sys.modules['torch'] = None; from ts.runtime.forkserver import preload; preload(['torch'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=GUARD_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
