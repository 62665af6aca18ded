"""Workers of a cluster, with real agents, workers and TLS, and without Ray: their start, their death with a node, and
their wait for a place."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import ssl
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster_stage import PlayedCluster, certificates
from support import GUARD_S, until, until_async
from ts.protocol.frames import Input
from ts.protocol.secure import PeerCertificate, SecureSocket, client_context, server_context
from ts.protocol.shared import NOTE, PROGRESS_BYTES
from ts.runtime.remote_link import SentProgress
from ts_frontend.errors import WorkerDied
from ts_frontend.job import Job, Ledger
from ts_frontend.workers.cluster import launcher
from ts_frontend.workers.cluster.link import ended
from ts_frontend.workers.cluster.resources import NEW_S, ClusterRequest, Spares
from ts_frontend.workers.pool import Pool, Slot
from ts_frontend.workers.process import StartFailed
from ts_frontend.workers.worker import Worker

HANDLER = """
import os, sys, time
def handle(data, context):
    if data is None:
        print("loaded in", os.getcwd())
        return None
    word = bytes(data[0]["data"]).decode()
    with open("begun.txt", "a") as file:
        file.write(word + "\\n")
    while word.startswith("hang") and not os.path.exists("go"):
        time.sleep(0.01)
    if word == "exit":
        os._exit(3)
    return [word.upper() if len(word) < 100 else word]
"""

FORKS = """
import os, time
def handle(data, context):
    if data is None:
        return None
    child = os.fork()
    if not child:
        os.setsid()
        time.sleep(600)
    return [str(child)]
"""
#: A module that hangs as long as its process has the parent that it began with.
HANGS = """
import os, time
open("hangs", "w").close()
parent = os.getppid()
while os.getppid() == parent:
    time.sleep(0.01)
os._exit(0)
"""
#: Dies once between the note of a batch and its record, which precedes the call.
DIES = """
import os, signal
from ts.runtime.remote_link import SentProgress
tell = SentProgress._tell
def told(progress, batch_id):
    tell(progress, batch_id)
    if os.path.exists("die"):
        os.unlink("die")
        os.kill(os.getpid(), signal.SIGKILL)
SentProgress._tell = told
"""
#: More than the buffers of a connection hold.
NOTES_MANY = 5000


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return certificates(tmp_path_factory.mktemp("pems"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "handler.py").write_text(HANDLER)
    return tmp_path


def ask(pool: Pool, word: str) -> Job:
    job = Job(Ledger(), [Input("data", "", word.encode())], request_id=word[:20])
    pool.queue.put(job)
    return job


async def answer(job: Job) -> str:
    return bytes(await job.result()).decode()


async def first_worker(pool: Pool) -> tuple[Slot, Worker]:
    """Starts a worker in an empty pool."""
    await pool.scale(1)
    (slot,) = pool.slots
    assert slot.worker is not None
    return slot, slot.worker


async def test_a_worker_elsewhere_is_a_worker_like_any_other(model: Path, pems: dict[str, str]) -> None:
    async with PlayedCluster(model, pems) as cluster:
        pool = cluster.pool
        slot, worker = await first_worker(pool)
        assert await answer(ask(pool, "hello")) == "HELLO"
        large = "x" * 700_000
        assert await answer(ask(pool, large)) == large, "in many records, both ways"
        assert worker.node == {"id": "node1", "address": "10.0.0.1", "host": "h"}
        assert worker.pids == [], "its process id means nothing here"
        assert worker.spent == {}
        await until_async(lambda: worker.memory_bytes)
        await until_async(lambda: f"stdout: loaded in {model}" in cluster.lines)
        job = ask(pool, "exit")
        with pytest.raises(WorkerDied, match="exit code 3"):
            await job.result()
        await until_async(lambda: pool.ready_count and slot.worker is not worker)
        assert await answer(ask(pool, "again")) == "AGAIN"


async def test_a_dead_node_gives_back_what_it_had_not_begun(
    model: Path, pems: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async with PlayedCluster(model, pems) as cluster:
        pool = cluster.pool
        slot, worker = await first_worker(pool)
        for word in ("a", "b", "c", "d"):
            await ask(pool, word).result()  # it counts as quick: more is sent ahead
        hanging = ask(pool, "hang")
        begun = model / "begun.txt"
        await until_async(lambda: "hang" in begun.read_text())
        ahead = [ask(pool, word) for word in ("e", "f")]
        cluster.bridge.end(1)
        with pytest.raises(WorkerDied, match=r"The connection to its node 10\.0\.0\.1 \(node1\) ended"):
            await hanging.result()
        assert [await answer(job) for job in ahead] == ["E", "F"]
        assert begun.read_text().split() == ["a", "b", "c", "d", "hang", "e", "f"], "nothing ran twice"
        assert pool.last_failure is not None and "10.0.0.1 (node1)" in pool.last_failure.reason
        assert slot.worker is not None and slot.worker.node["id"] == "node2", "elsewhere"
        assert [order["id"] for order in cluster.bridge.orders if order["order"] == "place"] == [1, 2]
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.pure_form
async def test_a_request_whose_note_was_sent_but_whose_handler_was_not_called_runs_elsewhere(
    model: Path, pems: dict[str, str]
) -> None:
    """The agent reports the worker's own record."""
    (model / "handler.py").write_text(DIES + HANDLER)
    async with PlayedCluster(model, pems) as cluster:
        await first_worker(cluster.pool)
        assert await answer(ask(cluster.pool, "first")) == "FIRST"
        (model / "die").touch()
        assert await answer(ask(cluster.pool, "second")) == "SECOND"
        assert (model / "begun.txt").read_text().split() == ["first", "second"]
        assert cluster.pool.last_failure is not None, "a worker has died meanwhile"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems report each note")
async def test_the_notes_of_begun_batches_do_not_wake_the_server(
    model: Path, pems: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    read = launcher._Incoming._readable

    def counted(incoming: launcher._Incoming) -> None:
        nonlocal looks
        looks += incoming._reads_max == launcher.NOTES_PER_TURN_MAX
        read(incoming)

    monkeypatch.setattr(launcher._Incoming, "_readable", counted)
    async with PlayedCluster(model, pems) as cluster:
        pool = cluster.pool
        await pool.scale(1)
        for number in range(500):
            assert await answer(ask(pool, f"r{number}")) == f"R{number}"
    assert 0 < looks < 50, "500 notes of 30 bytes, read 4096 bytes at a time"


def test_a_worker_whose_notes_nobody_reads_waits_before_it_calls_its_handler(pems: dict[str, str]) -> None:
    ours, theirs = (
        PeerCertificate(pems["authority"], pems[role], pems[f"{role}_key"]) for role in ("server", "worker")
    )
    plain = socket.socketpair()
    with ThreadPoolExecutor(1) as pool:
        shaking = pool.submit(server_context(ours).wrap_socket, plain[0], True)
        worker = SecureSocket(client_context(theirs).wrap_socket(plain[1]))
        server = shaking.result(GUARD_S)
    begun = 0

    def begin_many() -> None:
        nonlocal begun
        progress = SentProgress(worker, bytearray(PROGRESS_BYTES))
        for batch_id in range(1, NOTES_MANY + 1):
            progress.begin(batch_id)
            begun = batch_id

    writing = threading.Thread(target=begin_many)
    writing.start()
    poller = select.poll()
    poller.register(worker.fileno(), select.POLLOUT)
    until(lambda: not poller.poll(0))
    assert begun < NOTES_MANY and writing.is_alive()
    found = b""
    while len(found) < NOTES_MANY * NOTE.size:
        found += server.recv(1 << 16)
    writing.join(GUARD_S)
    assert [one for (one,) in NOTE.iter_unpack(found)] == list(range(1, NOTES_MANY + 1)), "each once, none lost"
    server.close()
    worker.close()


async def test_a_process_that_a_handler_forks_keeps_none_of_its_connections(model: Path, pems: dict[str, str]) -> None:
    """It may outlive its parent, whose end the server would then not see."""
    (model / "handler.py").write_text(FORKS)
    async with PlayedCluster(model, pems) as cluster:
        _, worker = await first_worker(cluster.pool)
        child = psutil.Process(int(await answer(ask(cluster.pool, "fork"))))
        process = worker.process
        assert process is not None
        try:
            assert len(psutil.Process(process.pid).net_connections("tcp")) == 2, "its requests, and its notes"
            assert child.net_connections("tcp") == []
        finally:
            child.kill()


async def test_a_node_of_which_only_an_actor_has_died_is_not_avoided(model: Path, pems: dict[str, str]) -> None:
    async with PlayedCluster(model, pems) as cluster:
        pool = cluster.pool
        slot, worker = await first_worker(pool)
        assert worker.node["id"] == "node1"
        cluster.bridge.end(1)
        await until_async(cluster.launcher._avoided)
        cluster.bridge.on_worker_ended(1, "The actor died: its process was killed", True)
        await until_async(lambda: pool.ready_count and slot.worker is not worker)
        assert slot.worker is not None and slot.worker.node["id"] == "node1", "Ray says that it lives"
        assert pool.last_failure is not None and "its process was killed" in pool.last_failure.reason


async def test_a_node_that_starts_no_worker_is_passed_over(
    model: Path, pems: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that doesn't come from the node of its spare process gets one on another node, and then any node."""
    monkeypatch.setattr(launcher, "SPARE_S", 0.1)
    async with PlayedCluster(model, pems) as cluster:
        bridge = cluster.bridge
        bridge.port = 7
        cluster.launcher._spares = spares = Spares()
        spares.told(bridge.state.nodes, -NEW_S)
        bridge.tell()
        bridge.room = False  # no actor is started, although the nodes that are told have room
        assert len(spares.due(bridge.state.nodes, [ClusterRequest()], {}, 0.0)) == 2
        scaling = asyncio.create_task(cluster.pool.scale(1))

        def placed() -> list[str]:
            return [order["node"] for order in bridge.orders if order["order"] == "place"]

        await until_async(lambda: placed() == ["node1", "node2", ""])
        bridge.carry_out(next(order for order in reversed(bridge.orders) if order["order"] == "place"))
        await scaling


async def played_ray(cluster: PlayedCluster) -> tuple[asyncio.Server, list[asyncio.StreamWriter]]:
    """Ray's own process on node1, played: a server, and the connections to it."""
    asking: list[asyncio.StreamWriter] = []
    ray = await asyncio.start_server(lambda _, writer: asking.append(writer), "127.0.0.1", 0)
    first, *others = cluster.bridge.state.nodes
    cluster.bridge.state.nodes = replace(first, address="127.0.0.1", port=ray.sockets[0].getsockname()[1]), *others
    cluster.bridge.on_told()
    return ray, asking


@pytest.mark.parametrize("already", [True, False])
async def test_a_node_whose_ray_has_ended_has_died(
    model: Path, pems: dict[str, str], monkeypatch: pytest.MonkeyPatch, already: bool
) -> None:
    """Ray's reason isn't waited for. `already`: its process there ended before the worker, or after it. The server
    has one connection to that process."""
    monkeypatch.setattr(launcher, "REASON_S_MAX", 2 * GUARD_S)
    async with PlayedCluster(model, pems) as cluster:
        pool = cluster.pool
        ray, asking = await played_ray(cluster)
        slot, worker = await first_worker(pool)
        await until_async(lambda: asking)  # the server watches it
        assert worker.process is not None
        if already:
            os.kill(cluster.bridge.actors[1].pid, signal.SIGSTOP)  # it can't end the worker, as it is told to
            ray.close()
            asking[0].close()
            await until_async(lambda: cluster.launcher._ended_nodes)
            cluster.bridge.end(1)
        else:
            cluster.bridge.end(1)
            await until_async(cluster.launcher._avoided)
            assert not worker.process.exited.done(), "only its actor may have died, of which Ray would tell"
            ray.close()
            asking[0].close()
        await until_async(lambda: pool.ready_count and slot.worker is not worker)
        assert slot.worker is not None and slot.worker.node["id"] == "node2"
        assert pool.last_failure is not None
        assert "Ray has ended on its node 10.0.0.1 (node1)" in pool.last_failure.reason
        assert len(asking) == 1
        for writer in asking:
            writer.close()


async def test_a_worker_whose_node_has_lost_its_ray_is_replaced_before_it_dies(
    model: Path, pems: dict[str, str]
) -> None:
    """Ray's other processes notice that only later, and end the worker."""
    async with PlayedCluster(model, pems) as cluster:
        pool = cluster.pool
        ray, asking = await played_ray(cluster)
        slot, worker = await first_worker(pool)
        await until_async(lambda: asking)
        for word in ("a", "b", "c", "d"):
            await ask(pool, word).result()  # it counts as quick: more is sent ahead
        hanging = ask(pool, "hang")
        await until_async(lambda: "hang" in (model / "begun.txt").read_text())
        ahead = ask(pool, "e")
        ray.close()
        asking[0].close()
        with pytest.raises(WorkerDied, match=r"Ray has ended on its node 10\.0\.0\.1 \(node1\)") as died:
            await hanging.result()
        assert died.value.http_status == 500, "no lack of memory, although its agent killed it"
        assert await answer(ahead) == "E"
        assert slot.worker is not worker and slot.worker is not None and slot.worker.node["id"] == "node2"
        for writer in asking:
            writer.close()


async def test_a_node_whose_ray_has_ended_gets_no_worker_even_if_it_had_none(model: Path, pems: dict[str, str]) -> None:
    async with PlayedCluster(model, pems) as cluster:
        ray, asking = await played_ray(cluster)
        await until_async(lambda: asking)
        ray.close()
        asking[0].close()
        await until_async(lambda: cluster.launcher._suspects)
        await first_worker(cluster.pool)
        assert cluster.bridge.orders[-1]["avoid"] == ["node1"]


async def test_the_end_of_a_process_is_seen_only_where_its_port_refuses() -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert not await ended("127.0.0.1", port), "it listens still: it only wants no silent connections"
    server.close()
    assert not await ended("127.0.0.1", port), "it may never have been reachable"


async def test_nodes_with_room_have_a_process_for_the_next_worker(
    model: Path, pems: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ts_frontend.workers.cluster.resources.APART_S", 0.0)
    async with PlayedCluster(model, pems) as cluster:
        bridge, pool = cluster.bridge, cluster.pool

        def asked() -> list[tuple[str, int]]:
            return [(order["address"], order["count"]) for order in bridge.orders if order["order"] == "spare"]

        bridge.port = 7
        cluster.launcher._spares = spares = Spares()
        spares.told(bridge.state.nodes, -NEW_S)
        await first_worker(pool)
        bridge.tell()
        assert asked() == [("10.0.0.1:7", 1), ("10.0.0.2:7", 1)]
        bridge.tell()
        assert len(asked()) == 2, "once"
        await pool.scale(2)
        assert [order["node"] for order in bridge.orders if order["order"] == "place"] == ["", "node2"]
        bridge.tell()
        assert asked()[2:] == [("10.0.0.2:7", 1)], "the worker has taken the one on its node"


async def test_a_worker_without_a_place_says_what_it_waits_for(
    model: Path, pems: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ts_frontend.workers.cluster.launcher.PATIENCE_S", 0.0)
    async with PlayedCluster(model, pems, startup_timeout_s=0.0) as cluster:
        bridge, pool = cluster.bridge, cluster.pool
        bridge.room = False
        bridge.tell()
        scaling = asyncio.create_task(pool.scale(1))
        now_s = 0.0

        def looked() -> bool:
            nonlocal now_s
            now_s += 1.0
            pool.slots[0].look(now_s)
            return scaling.done()

        await until_async(lambda: bridge.orders)
        await until_async(looked)
        with pytest.raises(StartFailed, match=r"CPU: 1\. The cluster has no more \(free: CPU: 0\)\. It starts as"):
            await scaling
        assert pool.slots[0].waits_for.startswith("waits for resources: CPU: 1")
        scaling = asyncio.create_task(pool.scale(1))
        await until_async(looked)
        with pytest.raises(StartFailed, match="waits for resources"):
            await scaling  # a second call is answered, too
        assert len(bridge.orders) == 1, "it is asked for once, and stays asked for"
        bridge.room = True
        bridge.carry_out(bridge.orders[0])
        await until_async(lambda: (looked(), not pool.slots[0].waits_for)[1])


async def test_a_place_that_is_lost_before_the_worker_came_is_no_fault_of_the_model(
    model: Path, pems: dict[str, str]
) -> None:
    async with PlayedCluster(model, pems) as cluster:
        bridge, pool = cluster.bridge, cluster.pool
        bridge.room = False
        bridge.tell()
        scaling = asyncio.create_task(pool.scale(1))
        waiting = ask(pool, "early")

        def placed() -> list[int]:
            return [order["id"] for order in bridge.orders if order["order"] == "place"]

        await until_async(lambda: placed() == [1])
        bridge.on_worker_ended(1, "The actor died: its node has died", True)
        await until_async(lambda: placed() == [1, 2])
        bridge.carry_out(bridge.orders[-1])
        await scaling
        assert await answer(waiting) == "EARLY"
        assert pool.load_failure is None and pool.last_failure is None


async def test_a_worker_that_hangs_before_it_connects_is_placed_again(
    model: Path, pems: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = model / "shlex.py"  # which the worker's process imports instead of Python's own, and its agent doesn't
    hangs.write_text(HANGS)
    monkeypatch.setattr(launcher, "WORKER_S_MAX", 0.5)
    async with PlayedCluster(model, pems) as cluster:
        scaling = asyncio.create_task(cluster.pool.scale(1))
        await until_async((model / "hangs").exists)
        hangs.unlink()
        monkeypatch.setattr(launcher, "WORKER_S_MAX", GUARD_S)
        await scaling
        (slot,) = cluster.pool.slots
        await until_async(lambda: cluster.pool.ready_count)
        assert await answer(ask(cluster.pool, "hello")) == "HELLO"
        assert slot.worker is not None and slot.worker.node["id"] != "node1", "another node"


async def test_without_ray_living_workers_serve_and_new_ones_wait(model: Path, pems: dict[str, str]) -> None:
    async with PlayedCluster(model, pems) as cluster:
        bridge, pool = cluster.bridge, cluster.pool
        await pool.scale(1)
        bridge.here = False
        bridge.state.lost("the bridge ended")
        bridge.on_end("the bridge ended")
        assert await answer(ask(pool, "on")) == "ON"
        with pytest.raises(StartFailed, match="waits for Ray: the bridge ended"):
            await pool.scale(2)
        assert await answer(ask(pool, "and on")) == "AND ON"
        bridge.here = True
        bridge.tell()
        await pool.scale(2)
        assert pool.ready_count == 2


async def test_only_processes_of_this_start_are_let_in(model: Path, pems: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "others").mkdir()
    others = certificates(tmp_path / "others")

    def knock(own: dict[str, str], hello: Any, role: str, port: int) -> bytes:
        certificate = PeerCertificate(pems["authority"], own[role], own[f"{role}_key"])
        plain = socket.create_connection(("127.0.0.1", port))
        with plain, client_context(certificate).wrap_socket(plain) as sock:
            sock.sendall(json.dumps(hello).encode() + b"\n")
            return sock.recv(100)

    async with PlayedCluster(model, pems) as cluster:
        gate = cluster.launcher._gate
        assert gate is not None
        gate.expect("known", lambda role, sock, hello: sock.close())
        hello = {"token": "known", "role": "worker"}
        assert b"now" in await asyncio.to_thread(knock, pems, hello, "worker", gate.port)
        refused: list[Any] = []
        tried: tuple[tuple[dict[str, str], Any, str], ...] = (
            (pems, {"token": "unknown"}, "worker"),
            (pems, ["no", "object"], "worker"),
            (others, hello, "worker"),
            (pems, hello, "server"),
        )
        for own, said, role in tried:
            try:
                refused.append(await asyncio.to_thread(knock, own, said, role, gate.port))
            except (ssl.SSLError, ConnectionError):
                refused.append(b"")
        assert refused == [b""] * 4


@pytest.mark.parametrize("missing", ["ray", "cryptography"])
def test_a_server_without_the_packages_for_ray_names_the_extra(missing: str) -> None:
    """Whichever of them is missing: Ray alone may be installed without the extra."""
    bridge = "ts_frontend.workers.cluster.bridge"
    program = f"import runpy, sys; sys.modules[{missing!r}] = None; runpy.run_module({bridge!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "need torchrelay's extra: pip install torchrelay[ray] (" in done.stderr.splitlines()[-1]
