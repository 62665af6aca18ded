"""Several frontends behind one address: the same models at each, workers that they lend each other, and their ends."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest

from e2e.servers import Serving, request_for, write_model
from support import GUARD_S, free_port, http_call, until
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub

#: Says its process; `wait FILE` waits for the file.
WHO = """
import os, pathlib, time

def handle(data, context):
    found = []
    for row in data or ():
        words = bytes(row.get("data") or row.get("body")).decode().split()
        if words[0] == "wait":
            pathlib.Path(words[1] + ".begun").touch()
            while not pathlib.Path(words[1]).exists():
                time.sleep(0.01)
        found.append(str(os.getpid()))
    return found
"""
STREAM = """
import pathlib
from ts.protocol.frames import Cancel  # noqa: F401

def handle(data, context):
    place = pathlib.Path(bytes(data[0]["data"]).decode())
    try:
        for number in range(100_000):
            yield [str(number).zfill(10_000)]
            place.with_suffix(".count").write_text(str(number))
    except GeneratorExit:
        place.write_text("cancelled")
        raise
"""
COUNT = """
class Handler:
    def initialize(self, context):
        self.sums = {}
        self.context = context

    def handle(self, data, context):
        found = []
        for index, row in enumerate(data or ()):
            name = context.get_request_header(index, "ts_request_sequence_id")
            self.sums[name] = self.sums.get(name, 0) + int(bytes(row["body"]))
            found.append(str(self.sums[name]))
        return found

_handler = Handler()
def handle(data, context):
    if not hasattr(_handler, "sums"):
        _handler.initialize(context)
    return _handler.handle(data, context) if data else None
"""


@contextmanager
def fronts(directory: Path, workers: int, **settings: object) -> Iterator[Serving]:
    """A server with two frontends and the model `who`."""
    store = directory / "store"
    store.mkdir()
    write_model(store, "who", WHO)
    write_model(store, "other", WHO)
    write_model(store, "stream", STREAM)
    write_model(
        store, "count", COUNT, config="sequenceBatching: true\nsequenceMaxIdleMSec: 600000\nmaxNumSequence: 4\n"
    )
    more = {"frontends": 2, "default_workers_per_model": workers, "metrics_mode": "prometheus", **settings}
    with Serving(directory, store, dict(more), ["--models", "who"], executed=True) as server:
        until(lambda: len(server.worker_pids("who")) == workers, lambda: server.log)
        yield server


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with fronts(tmp_path_factory.mktemp("fronts"), 2) as server:
        yield server


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with fronts(tmp_path_factory.mktemp("lead"), 1) as server:
        yield server


def frontends(server: Serving) -> list[psutil.Process]:
    """The lead and its siblings, by what is said of them in the log."""
    said = [line.rsplit("(pid ", 1)[1].rstrip(").") for line in server.lines if " serves (pid " in line]
    found = [psutil.Process(server.process.pid)]
    for pid in map(int, said):
        if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            found.append(psutil.Process(pid))
    return found


def ask(server: Serving, body: str = "x", model: str = "who") -> Any:
    return http_call(server.port("http_inference"), "POST", f"/predictions/{model}", body)


def each(server: Serving, look: Callable[[], object], wanted: object) -> None:
    """Waits until `look()`, on many connections, says the same on each: some of them are at either frontend."""
    until(lambda: all(look() == wanted for _ in range(12)), lambda: server.log)


def metric(server: Serving, name: str) -> float:
    text = http_call(server.port("http_metrics"), "GET", f"/metrics?name[]={name}").body.decode()
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line and line[0] != "#")


def test_both_frontends_answer_with_workers_of_their_own(two: Serving) -> None:
    pids = set(map(str, two.worker_pids("who")))
    until(lambda: {ask(two).body.decode() for _ in range(20)} == pids, lambda: two.log)
    assert len(pids) == 2 and len(frontends(two)) == 2
    assert metric(two, "ts_frontends") == 2 and metric(two, "ts_ready_workers") == 2
    before = metric(two, "ts_ended_requests_total")
    for _ in range(10):
        assert ask(two).status == 200
        assert two.predict("who", b"x").decode() in pids
    assert metric(two, "ts_ended_requests_total") == before + 20
    assert [worker["status"] for worker in two.describe("who")["workers"]] == ["READY"] * 2


def test_management_is_seen_at_each_frontend(two: Serving) -> None:
    two.register("other", initial_workers=2)
    each(two, lambda: ask(two, model="other").status, 200)
    assert "scaled to 3" in two.scale("other", 3)
    pids = set(map(str, two.worker_pids("other")))
    assert len(pids) == 3
    assert {ask(two, model="other").body.decode() for _ in range(60)} <= pids
    two.scale("other", 1)
    assert len(two.worker_pids("other")) == 1
    each(two, lambda: ask(two, model="other").body.decode(), str(two.worker_pids("other")[0]))
    two.scale("other", 0)
    each(two, lambda: ask(two, model="other").status, 503)
    two.unregister("other")
    assert {ask(two, model="other").status for _ in range(12)} == {404}


def test_an_idle_worker_takes_the_jobs_of_a_busy_frontend(two: Serving, tmp_path: Path) -> None:
    """While one frontend's worker is held, that frontend's requests are answered by the other one's."""
    held = tmp_path / "go"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, two, f"wait {held}")
        until((tmp_path / "go.begun").exists, lambda: two.log)
        found = {ask(two).body.decode() for _ in range(20)}
        held.touch()
        busy = waiting.result().body.decode()
    assert found == set(map(str, two.worker_pids("who"))) - {busy}


def test_a_model_with_one_worker_answers_at_each_frontend(one_worker: Serving, tmp_path: Path) -> None:
    (pid,) = one_worker.worker_pids("who")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: ask(one_worker).body.decode(), range(100)))
    assert found == [str(pid)] * 100
    late = ask(one_worker, "x", model="nobody")
    assert late.status == 404
    held = tmp_path / "go"
    with ThreadPoolExecutor(1) as pool:  # a deadline ends requests that were handed over, too
        waiting = pool.submit(ask, one_worker, f"wait {held}")
        until((tmp_path / "go.begun").exists, lambda: one_worker.log)
        for _ in range(6):
            with pytest.raises(grpc.RpcError) as caught:
                one_worker.predict("who", b"x", timeout=0.3)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        held.touch()
        assert waiting.result().status == 200
    assert until(lambda: metric(one_worker, "ts_running_requests") == 0)


@contextmanager
def at(server: Serving, number: int) -> Iterator[httpx.Client]:
    """A client whose connection is one of that frontend, of which each has a worker of `who`."""
    sibling = frontends(server)[1]
    while True:
        with httpx.Client(base_url=server.http, timeout=GUARD_S) as client:
            worker = psutil.Process(int(client.post("/predictions/who", content="x").text))
            if (sibling in worker.parents()) == bool(number):
                yield client
                return


def test_a_model_on_demand_is_loaded_by_a_request_at_any_frontend(two: Serving) -> None:
    assert two.store is not None
    write_model(two.store, "lazy", WHO, config="loadOnDemand: true\n")
    two.register("lazy", initial_workers=1)
    with at(two, 1) as client:
        assert client.post("/predictions/lazy", content="x").status_code == 200
    two.unregister("lazy")


def test_requests_for_workers_that_do_not_become_ready_end(two: Serving) -> None:
    assert two.store is not None
    held = two.directory / "held"
    loads = f"while not __import__('os').path.exists({str(held)!r}):\n    __import__('time').sleep(0.01)\n"
    write_model(two.store, "slow", loads + WHO, config="responseTimeout: 1\n")
    two.register("slow", initial_workers=2, synchronous=False)
    answer = ask(two, model="slow")
    assert (answer.status, b"became ready within 1 s" in answer.body) == (503, True)
    held.touch()
    two.unregister("slow")


@pytest.mark.parametrize("number", [0, 1])
def test_a_model_that_cannot_be_loaded_says_so_at_any_frontend(two: Serving, number: int) -> None:
    assert two.store is not None
    name = f"broken{number}"
    write_model(two.store, name, "raise ValueError('no weights')\n")
    two.register(name, initial_workers=2, synchronous=False)
    with at(two, number) as client:
        answer = client.post(f"/predictions/{name}", content="x")
    assert (answer.status_code, "no weights" in answer.text) == (503, True), answer.text
    two.unregister(name)


def says(file: Path, word: str) -> bool:
    return file.exists() and file.read_text() == word


def rests(counted: Path, server: Serving) -> bool:
    """Whether the handler counts no further while other requests are answered."""
    before = counted.read_text()
    assert {ask(server).status for _ in range(10)} == {200}
    return bool(before) and counted.read_text() == before


def test_streams_are_handed_over_with_their_cancel_and_their_credit(one_worker: Serving, tmp_path: Path) -> None:
    one_worker.register("stream", initial_workers=1)
    for number in range(6):  # some of these connections are at the frontend without the worker
        place = tmp_path / f"stream{number}"
        with grpc.insecure_channel(one_worker.inference) as channel:
            stub = InferenceAPIsServiceStub(channel)
            call = stub.StreamPredictions(request_for("stream", str(place).encode()), timeout=GUARD_S)
            first = [int(next(call).prediction[-6:]) for _ in range(3)]
            assert first == [0, 1, 2]
            counted = place.with_suffix(".count")
            until(counted.exists, lambda: one_worker.log)
            until(partial(rests, counted, one_worker), lambda: one_worker.log)
            assert int(counted.read_text()) < 5_000, "its handler doesn't wait for the slow reader"
            call.cancel()
        until(partial(says, place, "cancelled"), lambda: one_worker.log)
    one_worker.unregister("stream")


def test_a_sequence_has_one_worker_wherever_its_requests_arrive(two: Serving) -> None:
    two.register("count", initial_workers=2)
    try:
        for name in ("a", "b", "c"):
            headers = {"ts_request_sequence_id": name}
            found = [httpx.post(f"{two.http}/predictions/count", content=b"1", headers=headers) for _ in range(10)]
            assert [int(one.text) for one in found] == list(range(1, 11))
    finally:
        two.unregister("count")


@contextmanager
def load(server: Serving) -> Iterator[list[Any]]:
    """Requests on eight threads, each on a new connection, while the block runs: yields their statuses."""
    ended, ends = threading.Event(), list[Any]()

    def run() -> None:
        while not ended.is_set():
            try:
                ends.append(ask(server).status)
            except OSError as error:
                ends.append(type(error).__name__)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        yield ends
    finally:
        ended.set()
        for thread in threads:
            thread.join(GUARD_S)
            assert not thread.is_alive()


def test_a_killed_sibling_comes_back_with_the_models_of_now(tmp_path: Path) -> None:
    with fronts(tmp_path, 2) as server:
        server.register("other", initial_workers=2)
        with load(server) as ends:
            until(lambda: len(ends) > 50)
            _, sibling = frontends(server)
            sibling.kill()
            server.wait_for_log("Frontend 1 has ended")
            server.wait_for_log("Frontend 1 serves", 2)
            count = len(ends)
            until(lambda: len(ends) > count + 50)
        assert set(ends) <= {200, 500, 503, "ConnectionResetError", "ConnectionRefusedError", "RemoteDisconnected"}
        assert ends[-20:].count(200) == 20
        until(lambda: len(server.worker_pids("other")) == 2, lambda: server.log)
        each(server, lambda: ask(server, model="other").status, 200)
        assert until(lambda: not metric(server, "ts_running_requests") and not metric(server, "ts_queued_requests"))
        assert metric(server, "ts_frontend_restarts_total") == 1
        assert server.terminate() == 0


def test_a_sibling_comes_back_once_the_lead_can_start_it(tmp_path: Path) -> None:
    with fronts(tmp_path, 2) as server:
        lead, sibling = frontends(server)
        limit = resource.prlimit(lead.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(lead.pid, resource.RLIMIT_NOFILE, (3, limit[1]))  # as if clients had all of its files
        sibling.kill()
        server.wait_for_log("Frontend 1 can't be started")
        resource.prlimit(lead.pid, resource.RLIMIT_NOFILE, limit)
        server.wait_for_log("Frontend 1 serves", 2)


def test_models_come_and_go_whole_while_a_sibling_fails(tmp_path: Path) -> None:
    with fronts(tmp_path, 2, model_control_mode="explicit") as server, at(server, 0) as client:
        _, sibling = frontends(server)
        before = [psutil.Process(pid) for pid in server.worker_pids("who")]
        limit = resource.prlimit(sibling.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(sibling.pid, resource.RLIMIT_NOFILE, (3, limit[1]))
        for synchronous in (True, False):
            with pytest.raises(grpc.RpcError, match="other 1.0: OSError: .* Too many open files"):
                server.register("other", initial_workers=2, synchronous=synchronous)
            assert client.post("/predictions/other", content="x").status_code == 404
        loaded = client.post("/v2/repository/models/other/load", json={})
        assert "Too many open files" in loaded.text  # the lead has it, and the sibling still can't
        server.unregister("who")
        assert not psutil.wait_procs(before, GUARD_S)[1]
        resource.prlimit(sibling.pid, resource.RLIMIT_NOFILE, limit)
        each(server, lambda: ask(server, model="other").status, 200)


def test_a_sibling_that_stands_still_is_left_out_of_what_the_lead_tells(tmp_path: Path) -> None:
    with fronts(tmp_path, 2) as server:
        _, sibling = frontends(server)
        sibling.suspend()
        assert metric(server, "ts_ready_workers") == 1
        assert len(server.describe("who")["workers"]) == 1
        assert any("Frontend 1 gives no answer to 'figures'" in line for line in server.lines)
        sibling.resume()
        assert metric(server, "ts_ready_workers") == 2


def test_the_lead_takes_all_with_it(tmp_path: Path) -> None:
    with fronts(tmp_path, 2) as server:
        processes = {*server.processes(), *frontends(server)}
        for one in frontends(server):
            processes |= {*one.children(recursive=True)}
        assert len(processes) >= 5
        os.kill(server.process.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(processes, GUARD_S)
        assert not alive


def test_a_drain_answers_what_was_accepted_at_each_frontend(tmp_path: Path) -> None:
    with fronts(tmp_path, 1) as server, ThreadPoolExecutor(8) as pool:
        held = tmp_path / "go"
        waiting = [pool.submit(ask, server, f"wait {held}") for _ in range(8)]
        until((tmp_path / "go.begun").exists, lambda: server.log)
        until(lambda: metric(server, "ts_queued_requests") >= 7, lambda: server.log)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_log("Draining", 2)
        held.touch()
        assert [one.result().status for one in waiting] == [200] * 8
        assert server.wait() == 0


def test_a_restart_has_siblings_anew_and_loses_nothing(tmp_path: Path) -> None:
    with fronts(tmp_path, 2) as server:
        before = frontends(server)
        with load(server) as ends:
            until(lambda: len(ends) > 20)
            server.process.send_signal(signal.SIGUSR2)
            server.wait_for_log("Model server started", 2)
            count = len(ends)
            until(lambda: len(ends) > count + 20)
        assert set(ends) == {200}
        assert len(frontends(server)) == 2 and frontends(server)[1] not in before
        assert httpx.get(f"{server.http}/ping").json() == {"status": "Healthy"}


def test_what_several_frontends_cannot_have_is_refused(tmp_path: Path, torchserve: Callable[..., Any]) -> None:
    port = free_port()
    with fronts(tmp_path, 1, inference_address=f"http://127.0.0.1:{port}"):
        other = tmp_path / "other"
        (other / "store").mkdir(parents=True)
        settings: dict[str, object] = {"frontends": 2, "inference_address": f"http://127.0.0.1:{port}"}
        taken = Serving(other, other / "store", settings, [], executed=True)
        assert taken.wait() == 1
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in taken.log
    words = ["--set", "frontends=2", "--set", "registered_memory_max=1000000"]
    refused = torchserve("--start", "--foreground", "--model-store", str(tmp_path / "store"), *words)
    assert refused.returncode == 1
    assert "frontends = 2 (--set frontends): not with registered_memory_max" in refused.stderr
