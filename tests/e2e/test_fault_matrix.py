"""Each fault at each stage of a request, over each protocol, on both engines: the caller's answer, the handler's view,
and that nothing is left.

Faults: the caller leaves (cancel), its deadline passes (timeout), the request fails (error), its worker is killed
(death), the server is told to end (shutdown). Stages: it waits in the queue, its handler runs, its handler has sent a
piece, its handler has sent the last piece and hasn't returned. Handlers wait for files, so that nothing waits for time
to pass; only deadlines do, and one that passes before the stage was reached is tried again with more time.
"""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raw
from support import GUARD_S, until
from ts_frontend.scheduling.queues import SOLE_AHEAD_S

STAGES = ("queued", "running", "streaming", "after the last piece")
PROTOCOLS = ("gRPC", "HTTP/1.1", "HTTP/2")
FIRST_LIMIT_S = 0.25

COMMON = """
import asyncio, json, os, time
from pathlib import Path

def folder_of(row):
    found = row.get("data") or row.get("body")
    found = found[0] if isinstance(found, list) else found
    return Path(json.loads(found if isinstance(found, str) else bytes(found))["folder"])

def end(folder):
    if (folder / "raise").exists():
        raise ValueError("as asked")
"""
HELD = (
    COMMON
    + """
def handle(data, context):
    if data is None:
        return None
    folder = folder_of(data[0])
    (folder / "begun").write_text(str(os.getpid()))
    while not (folder / "release").exists():
        if context.cancelled:
            (folder / "told").touch()
            return ["late"]
        time.sleep(0.002)
    end(folder)
    return ["done"]
"""
)
#: Asynchronous, so that several wait side by side.
STREAM = (
    COMMON
    + """
async def waited(folder, name):
    while not (folder / name).exists():
        await asyncio.sleep(0.002)

async def handle(data, context):
    if data is None:
        return
    folder = folder_of(data[0])
    (folder / "begun").write_text(str(os.getpid()))
    try:
        for word in ("first", "last"):
            await waited(folder, word)
            yield [word]
        await waited(folder, "release")
    except (asyncio.CancelledError, GeneratorExit):
        (folder / "told").touch()
        raise
    end(folder)
    if (folder / "large").exists():
        for _ in range(400):
            yield ["x" * 1000]
"""
)


class Request:
    """A request whose handler waits for the files of its folder."""

    def __init__(self, server: Any, directory: Path, protocol: str, stage: str, limit_s: float | None = None) -> None:
        self.folder = directory / uuid.uuid4().hex
        self.folder.mkdir()
        self.streamed = stage not in ("queued", "running")
        model = "stream" if self.streamed else "held"
        body = json.dumps({"folder": str(self.folder)})
        if protocol == "gRPC":
            port = server.port("grpc_inference")
            self.call: Any = raw.Prediction(port, model, body.encode(), streamed=self.streamed, timeout_s=limit_s)
            return
        path, headers = f"/predictions/{model}", {}
        if limit_s is not None:  # only tensor requests have a limit over HTTP
            path = f"/v2/models/{model}/" + ("infer_stream" if self.streamed else "versions/1.0/infer")
            tensor = {"name": "data", "datatype": "BYTES", "shape": [1], "data": [body]}
            body = json.dumps({"inputs": [tensor], "parameters": {"timeout": round(limit_s * 1e6)}})
            headers = {"content-type": "application/json"}
        client = raw.Http1 if protocol == "HTTP/1.1" else raw.Http2
        self.call = client(server.port("http_inference"), path, body.encode(), headers)

    def do(self, *names: str) -> None:
        for name in names:
            (self.folder / name).touch()

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def reach(self, stage: str) -> None:
        """ConnectionError or AssertionError when it ends before."""
        if stage == "queued":
            return
        if not self.streamed:
            until(lambda: self.has("begun"))
            return
        for word in ("first", "last")[: 1 if stage == "streaming" else 2]:
            self.do(word)
            assert word in self.call.piece().decode()


class Served:
    """A server with the two models, and the requests on it."""

    def __init__(self, server: Any, directory: Path) -> None:
        self.server = server
        self.directory = directory
        self.requests: list[Request] = []
        self.pids = {model: server.worker_pids(model) for model in ("held", "stream")}

    def request(self, protocol: str, stage: str, limit_s: float | None = None) -> Request:
        one = Request(self.server, self.directory, protocol, stage, limit_s)
        self.requests.append(one)
        return one

    def holding(self, protocol: str) -> Request:
        """A request that occupies the only worker of `held`, so long that no other is sent ahead of its end."""
        holder = self.request(protocol, "running")
        holder.reach("running")
        ahead_until_s = time.monotonic() + SOLE_AHEAD_S
        until(lambda: time.monotonic() > ahead_until_s)
        return holder

    def waiting(self, count: int = 1) -> None:
        """Returns when so many requests wait."""
        until(lambda: self.server.describe("held")["jobQueueStatus"]["pendingRequests"] == count)

    def busy(self) -> dict[str, float]:
        """The gauges of requests that are queued or running, and aren't 0."""
        lines = self.server.scraped().splitlines()
        gauges = [line for line in lines if line.startswith(("ts_queued_requests{", "ts_running_requests{"))]
        found = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in gauges}
        assert found
        return {name: value for name, value in found.items() if value}

    def assert_nothing_left(self, protocol: str, *, same_workers: bool = True) -> None:
        """Nothing is queued or running; the same workers take requests, and streams of more than the credit."""
        until(lambda: not self.busy(), self.busy)
        one, many = self.request(protocol, "running"), self.request(protocol, "streaming")
        one.do("release")
        many.do("first", "last", "large", "release")
        assert one.call.end()[1:] == (b"done", True)
        assert many.call.end()[1:] == (b"firstlast" + b"x" * 400_000, True)
        ran = {"held": int((one.folder / "begun").read_text()), "stream": int((many.folder / "begun").read_text())}
        if same_workers:
            assert {model: [pid] for model, pid in ran.items()} == self.pids
        until(lambda: not self.busy(), self.busy)


@pytest.fixture(scope="module")
def started(server_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    config = "minWorkers: 1\nbatchSize: 1\n"
    models = {"held": (HELD, config), "stream": (STREAM, config)}
    with server_of(models, metrics_mode="prometheus") as server:
        yield Served(server, tmp_path_factory.mktemp("asked"))


@pytest.fixture
def served(started: Served) -> Iterator[Served]:
    yield started
    for one in started.requests:
        one.call.close()
    started.requests.clear()


at_each_stage = pytest.mark.parametrize("stage", STAGES)
over_each_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)
GRPC = {"deadline": "4", "internal": "13", "unavailable": "14"}


@over_each_protocol
@at_each_stage
def test_cancel(served: Served, protocol: str, stage: str) -> None:
    holder = served.holding(protocol) if stage == "queued" else None
    one = served.request(protocol, stage)
    if holder is not None:
        served.waiting()
    one.reach(stage)
    one.call.leave()
    if holder is not None:
        served.waiting(0)
        holder.do("release")
        assert holder.call.end().body == b"done"
    else:
        until(lambda: one.has("told"))
    served.assert_nothing_left(protocol)
    assert one.has("begun") is (holder is None)


def timed_out(served: Served, protocol: str, stage: str) -> Request:
    """A request whose deadline passes at the stage."""
    limit_s = FIRST_LIMIT_S
    while limit_s < GUARD_S:
        one = served.request(protocol, stage, limit_s)
        try:
            until(lambda: stage == "queued" or one.has("begun"), timeout_s=limit_s)  # noqa: B023
            one.reach(stage)
        except (ConnectionError, AssertionError):
            one.call.end()
            limit_s *= 2
        else:
            return one
    raise AssertionError(f"{stage} was not reached within {limit_s} s")


@over_each_protocol
@at_each_stage
def test_timeout(served: Served, protocol: str, stage: str) -> None:
    holder = served.holding(protocol) if stage == "queued" else None
    one = timed_out(served, protocol, stage)
    status, body, whole = one.call.end()
    assert whole
    if protocol == "gRPC":
        assert status == GRPC["deadline"]
    else:
        assert (status, b"Deadline passed" in body) == ("200" if one.streamed else "504", True)
    if holder is not None:
        holder.do("release")
        assert holder.call.end().body == b"done"
    else:
        until(lambda: one.has("told"))
    served.assert_nothing_left(protocol)
    assert one.has("begun") is (holder is None)


@over_each_protocol
@at_each_stage
def test_error(served: Served, protocol: str, stage: str) -> None:
    """Of the handler; requests in the queue fail when their model is left without a worker."""
    if stage == "queued":
        scaled_to_zero(served, protocol)
        return
    one = served.request(protocol, stage)
    one.reach(stage)
    one.do("raise", "first", "last", "release")
    status, body, whole = one.call.end()
    if protocol == "gRPC":
        assert (status, whole) == (GRPC["internal"], True)
    elif one.streamed:  # the status is gone: the answer stays unfinished
        assert (status, whole) == ("200", False)
    else:
        assert (status, whole, b"Prediction failed" in body) == ("503", True, True)
    served.assert_nothing_left(protocol)
    assert not one.has("told")


def scaled_to_zero(served: Served, protocol: str) -> None:
    holder = served.holding(protocol)
    one = served.request(protocol, "queued")
    served.waiting()
    served.server.scale("held", 0, synchronous=False)
    status, body, whole = one.call.end()
    assert (status, whole) == (GRPC["unavailable"] if protocol == "gRPC" else "503", True)
    assert protocol == "gRPC" or b"scaled to zero" in body
    holder.do("release")
    assert holder.call.end().body == b"done"  # it had begun
    served.server.scale("held", 1)
    served.pids["held"] = served.server.worker_pids("held")
    served.assert_nothing_left(protocol)
    assert not one.has("begun")


@over_each_protocol
@at_each_stage
def test_death_of_the_worker(served: Served, protocol: str, stage: str) -> None:
    """A request that had begun fails; one that waited is answered by the next worker."""
    holder = served.holding(protocol) if stage == "queued" else None
    one = served.request(protocol, stage)
    if holder is not None:
        served.waiting()
    one.reach(stage)
    model = "stream" if one.streamed else "held"
    os.kill(served.pids[model][0], signal.SIGKILL)
    if holder is not None:
        one.do("release")
        assert one.call.end()[1:] == (b"done", True)
    failed = (holder or one).call.end()
    if protocol == "gRPC":
        assert (failed.status, failed.whole) == (GRPC["unavailable"], True)
    elif one.streamed:
        assert (failed.status, failed.whole) == ("200", False)
    else:
        assert (failed.status, failed.whole, b"SIGKILL" in failed.body) == ("507", True, True)
    until(lambda: len(served.server.worker_pids(model)) == 1)
    served.pids[model] = served.server.worker_pids(model)
    served.assert_nothing_left(protocol)


def test_shutdown(served: Served) -> None:
    """All stages and protocols at once: whatever was accepted is answered, and the server ends with status 0."""
    server = served.server
    server.scale("held", len(PROTOCOLS))
    cells: dict[tuple[str, str], Request] = {}
    for protocol in PROTOCOLS:
        for stage in STAGES[1:]:
            cells[protocol, stage] = one = served.request(protocol, stage)
            one.reach(stage)
    for protocol in PROTOCOLS:
        cells[protocol, "queued"] = served.request(protocol, "queued")
    served.waiting(len(PROTOCOLS))
    server.process.send_signal(signal.SIGTERM)
    server.wait_for_log("Draining")
    for one in cells.values():
        one.do("first", "last", "release")
    ends: dict[tuple[str, str], raw.End] = {cell: one.call.end() for cell, one in cells.items()}
    rest = {"queued": b"done", "running": b"done", "streaming": b"last", "after the last piece": b""}
    wanted = {cell: raw.End("0" if cell[0] == "gRPC" else "200", rest[cell[1]], True) for cell in cells}
    assert ends == wanted
    assert server.wait() == 0, server.log
    assert not [cell for cell, one in cells.items() if one.has("told")]
