"""Many requests at once: none delays another that isn't behind it in a queue, and protocols share a queue."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest

from e2e.servers import text_of, text_request
from support import GUARD_S, until
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub

STREAMS = 16
#: Answers once the file that it was given the path of is there.
GATED = """
import os, time

def handle(data, context):
    if data is None:
        return None
    gate = bytes(*data[0].values()).decode()
    ends_s = time.monotonic() + 60
    while not os.path.exists(gate) and time.monotonic() < ends_s:
        time.sleep(0.005)
    return ["open" if os.path.exists(gate) else "never opened"] * len(data)
"""
#: Waits for company that never comes in time unless it comes from both protocols.
COMPANY = """
def handle(data, context):
    if data is None:
        return None
    context.metrics.add_metric("BatchSize", len(data), unit="Count")
    return [bytes(*row.values()).decode().upper() for row in data]
"""
COMPANY_CONFIG = "batchSize: 2\nmaxBatchDelay: 60000\nminWorkers: 1\nmaxWorkers: 1\n"
COUNTING = """
async def handle(data, context):
    if data is None:
        return
    index = bytes(*data[0].values()).decode()
    for number in range(5):
        yield [f"{index}:{number} "]
"""
#: Answers when so many calls as WORKERS are in it at once, each in a worker of its own.
MEETING = """
import os, pathlib, time

def handle(data, context):
    if data is None:
        return None
    place = pathlib.Path(bytes(*data[0].values()).decode())
    (place / str(os.getpid())).touch()
    ends_s = time.monotonic() + 60
    while len(list(place.iterdir())) < WORKERS and time.monotonic() < ends_s:
        time.sleep(0.005)
    return [str(len(list(place.iterdir())))] * len(data)
"""
#: Work for a CPU; says in which process it was done, and when.
BUSY = """
import os, time

def handle(data, context):
    if data is None:
        return None
    begun_s = time.monotonic()
    sum(range(1_000_000))
    return [f"{os.getpid()} {begun_s} {time.monotonic()}"] * len(data)
"""
WORKERS = 4
#: PIECES pieces of 64 KiB, numbered.
LONG = """
async def handle(data, context):
    for number in range(0 if data is None else PIECES):
        yield [f"{number} ".ljust(65536, ".")]
"""
PIECES = 125
SLOW_READERS = 64
#: What so many streams of 8 MB each may have on their way in the server; h2corn itself takes 2 MB of each.
WAITING_BYTES_MAX = SLOW_READERS * (4 << 20)


@pytest.fixture(scope="module")
def crowded(
    tmp_path_factory: pytest.TempPathFactory, serving: Callable[..., Any], write_to: Callable[..., str]
) -> Iterator[Any]:
    directory: Path = tmp_path_factory.mktemp("crowded")
    store = directory / "store"
    store.mkdir()
    write_to(store, "gated", GATED, config="minWorkers: 1\nmaxWorkers: 1\n")
    write_to(store, "company", COMPANY, config=COMPANY_CONFIG)
    write_to(store, "counting", COUNTING, config="minWorkers: 2\nmaxWorkers: 2\n")
    write_to(store, "meeting", MEETING.replace("WORKERS", str(WORKERS)))
    write_to(store, "busy_1", BUSY, config="minWorkers: 1\nmaxWorkers: 1\n")
    write_to(store, "busy_2", BUSY, config="minWorkers: 2\nmaxWorkers: 2\n")
    write_to(store, "long", LONG.replace("PIECES", str(PIECES)), config="minWorkers: 1\nmaxWorkers: 1\n")
    settings: dict[str, object] = {
        "metrics_mode": "prometheus",
        "model_metrics_auto_detect": "true",
        "lone_requests_wait": "true",
    }
    with serving(directory, store, settings, ["--ncs", "--models", "all", "--grpc-workers", str(WORKERS)]) as server:
        yield server


@pytest.mark.parametrize("method", ["ModelInfer", "ModelInferStream"])
def test_slow_requests_do_not_hold_up_others(crowded: Any, tmp_path: Path, method: str) -> None:
    """Promise 000-06: eight requests are on their way and none can end before ServerLive has answered."""
    gate = tmp_path / "gate"
    with grpc.insecure_channel(crowded.inference) as channel, ThreadPoolExecutor(8) as pool:
        stub = GRPCInferenceServiceStub(channel)

        def slow() -> list[str]:
            answer = getattr(stub, method)(text_request("gated", str(gate)), timeout=GUARD_S)
            return [text_of(one) for one in ([answer] if method == "ModelInfer" else answer)]

        calls = [pool.submit(slow) for _ in range(8)]
        try:
            until_taken(crowded, 8)
            assert stub.ServerLive(pb.ServerLiveRequest(), timeout=GUARD_S).live
            assert stub.ModelMetadata(pb.ModelMetadataRequest(name="gated"), timeout=GUARD_S).name == "gated"
            assert not any(call.done() for call in calls)
        finally:
            gate.touch()
        assert [call.result() for call in calls] == [["open"]] * 8


def until_taken(server: Any, count: int) -> None:
    """Returns when the model `gated` has so many requests, waiting and running."""
    names = ("ts_queued_requests", "ts_running_requests")
    until(lambda: sum(server.metric(name, model_name="gated") for name in names) >= count)


def test_sixteen_streams_at_once(crowded: Any) -> None:
    """Promise 000-23: each client has a channel of its own and gets its own answers, whole and in order."""
    together = threading.Barrier(STREAMS)

    def run(index: int) -> str:
        with grpc.insecure_channel(crowded.inference, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            together.wait(GUARD_S)
            answers = GRPCInferenceServiceStub(channel).ModelInferStream(
                text_request("counting", f"client {index}"), timeout=GUARD_S
            )
            return "".join(map(text_of, answers))

    with ThreadPoolExecutor(STREAMS) as pool:
        found = list(pool.map(run, range(STREAMS)))
    assert found == ["".join(f"client {index}:{number} " for number in range(5)) for index in range(STREAMS)]


def test_two_protocols_share_a_batch(crowded: Any) -> None:
    """Promise 000-20: neither request is answered without the other, and both texts are equal."""
    with grpc.insecure_channel(crowded.inference) as channel, ThreadPoolExecutor(2) as pool:
        stub = GRPCInferenceServiceStub(channel)
        by_grpc: Future[Any] = pool.submit(stub.ModelInfer, text_request("company", "one text"), timeout=GUARD_S)
        body = {"model": "company", "prompt": "one text"}
        by_http = pool.submit(httpx.post, f"{crowded.http}/v1/completions", json=body, timeout=GUARD_S)
        told = json.loads(by_http.result().text)
        assert told["choices"][0]["text"] == text_of(by_grpc.result()) == "ONE TEXT"
    # What a worker reports comes beside its answer, not before it.
    sizes = until(lambda: [line for line in crowded.scraped().splitlines() if line.startswith("BatchSize{")])
    assert [line.rpartition(" ")[2] for line in sizes] == ["2.0"]


def test_as_many_calls_run_at_once_as_there_are_workers(crowded: Any, tmp_path: Path) -> None:
    """Promises 001-22, 001-37: none of them ends before all of them have begun, each in a worker of its own."""
    until(lambda: len(crowded.worker_pids("meeting")) >= WORKERS)
    with grpc.insecure_channel(crowded.inference) as channel, ThreadPoolExecutor(WORKERS) as pool:
        stub = GRPCInferenceServiceStub(channel)
        calls = [
            pool.submit(stub.ModelInfer, text_request("meeting", str(tmp_path)), timeout=GUARD_S)
            for _ in range(WORKERS)
        ]
        assert [text_of(call.result()) for call in calls] == [str(WORKERS)] * WORKERS


def work_at_once(server: Any, model: str, workers: int) -> float:
    """How many of 60 calls that need a CPU were being worked on at once, on average."""
    until(lambda: len(server.worker_pids(model)) >= workers)
    with grpc.insecure_channel(server.inference) as channel:
        infer = GRPCInferenceServiceStub(channel).ModelInfer
        calls = [infer.future(text_request(model, "x"), timeout=GUARD_S) for _ in range(60)]
        told = [text_of(call.result()).split() for call in calls]
    assert len({pid for pid, _, _ in told}) == workers
    spans = [(float(begun), float(ended)) for _, begun, ended in told]
    return sum(ended - begun for begun, ended in spans) / (max(ended for _, ended in spans) - min(spans)[0])


@pytest.mark.long
def test_more_workers_do_more_at_once(crowded: Any) -> None:
    """Promise 001-46. Without a clock's verdict: two workers are at work at the same time, however slow the machine is;
    one never works on two calls at once."""
    assert work_at_once(crowded, "busy_1", 1) <= 1
    assert any(work_at_once(crowded, "busy_2", 2) > 1.3 for _ in range(5))


def number_of(answer: pb.ModelStreamInferResponse) -> int | None:
    """None for the last one, which says only that."""
    return int(text_of(answer.infer_response).split()[0]) if answer.infer_response.outputs else None


@pytest.mark.long
def test_slow_readers_in_tritons_dialect_hold_up_nobody(crowded: Any) -> None:
    """Each of 64 streams has a connection of its own and reads one piece of its 8 MB; then all read on."""
    # Without bandwidth probing a client's window stays small, so that it's full at once.
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
    server = psutil.Process(crowded.process.pid)
    with contextlib.ExitStack() as opened:
        channels = [
            opened.enter_context(grpc.insecure_channel(crowded.inference, options)) for _ in range(SLOW_READERS)
        ]
        stubs = [GRPCInferenceServiceStub(channel) for channel in channels]
        before = server.memory_info().rss
        slow = [stub.ModelStreamInfer(iter([text_request("long", "x")]), timeout=GUARD_S) for stub in stubs]
        assert [number_of(next(stream)) for stream in slow] == [0] * SLOW_READERS
        with grpc.insecure_channel(crowded.inference) as channel:
            stub = GRPCInferenceServiceStub(channel)
            quick = stub.ModelStreamInfer(iter([text_request("long", "x")]), timeout=GUARD_S)
            assert [number_of(answer) for answer in quick][:PIECES] == list(range(PIECES))
            assert text_of(stub.ModelInfer(text_request("counting", "a client"), timeout=GUARD_S)).startswith(
                "a client:0"
            )
        assert server.memory_info().rss - before < WAITING_BYTES_MAX
        for stream in slow:
            assert [number_of(answer) for answer in stream][: PIECES - 1] == list(range(1, PIECES))
