"""A hundred thousand requests to an ensemble whose workers are killed, a step's queue is short, and clients leave."""

from __future__ import annotations

import asyncio
import faulthandler
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

from e2e.open_inference.test_ensembles import PYTHON, config_of, ensemble_of, model_of, step, tensor, write
from support import GUARD_S, until
from ts.protocol import open_inference_pb2 as pb
from ts.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub

REQUESTS, CLIENTS = 100_000, 64
KILL_EVERY_S = 3.0
ADD = """
        if (given["X"] < 0).any():
            raise ValueError("a negative number")
        return {"Y": given["X"] + 1}
"""
SUM = """
        return {"Y": given["A"] + given["B"]}
"""
STEPS = ("first", "left", "right", "sum")
X_TO_Y = PYTHON + config_of([tensor("X")], [tensor("Y")], more="dynamic_batching {}")
SHORT = PYTHON + config_of(
    [tensor("X")], [tensor("Y")], more="dynamic_batching { default_queue_policy { max_queue_size: 32 } }"
)
DIAMOND = ensemble_of(
    [tensor("X")],
    [tensor("OUT")],
    [
        step("first", {"X": "X"}, {"Y": "a"}),
        step("left", {"X": "a"}, {"Y": "b"}),
        step("right", {"X": "a"}, {"Y": "c"}),
        step("sum", {"A": "b", "B": "c"}, {"Y": "OUT"}),
    ],
)
#: The ends that requests of a kind may have, besides an answer.
FAULTS = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
MAY_END: dict[str, set[grpc.StatusCode]] = {
    "plain": FAULTS,
    "left": FAULTS | {grpc.StatusCode.CANCELLED},
    "late": FAULTS | {grpc.StatusCode.DEADLINE_EXCEEDED},
    "wrong": FAULTS | {grpc.StatusCode.INTERNAL},
}


async def one(stub: Any, number: int, chance: random.Random, ends: Counter[str]) -> None:
    kind = chance.choices(list(MAY_END), [94, 3, 2, 1])[0]
    value = -10.0 if kind == "wrong" else float(number % 1000)
    request = pb.ModelInferRequest(model_name="diamond", raw_input_contents=[np.array([[value]], np.float32).tobytes()])
    request.inputs.add(name="X", datatype="FP32", shape=[1, 1])
    if kind == "late":
        request.parameters["timeout"].int64_param = chance.randrange(1_000, 20_000)
    call = stub.ModelInfer(request, timeout=GUARD_S)
    if kind == "left":
        asyncio.get_running_loop().call_later(chance.uniform(0, 0.05), call.cancel)
    try:
        answer = await call
    except asyncio.CancelledError:
        assert kind == "left"
        ends["left CANCELLED"] += 1
    except grpc.RpcError as error:
        code = error.code()
        assert code in MAY_END[kind], (kind, code, error.details())
        ends[f"{kind} {code.name}"] += 1
    else:
        assert kind != "wrong" and np.frombuffer(answer.raw_output_contents[0], np.float32) == [2 * value + 4], kind
        ends["answered"] += 1


async def load(served: Any, ends: Counter[str]) -> None:
    chance, numbers, over = random.Random(7), iter(range(REQUESTS)), asyncio.Event()

    async def client(channel: grpc.aio.Channel) -> None:
        stub = GRPCInferenceServiceStub(channel)
        for number in numbers:
            await one(stub, number, chance, ends)

    async def kill() -> None:
        while not over.is_set():
            pids = await asyncio.to_thread(served.worker_pids, chance.choice(STEPS))
            for pid in pids[:1]:
                psutil.Process(pid).kill()
                ends["killed"] += 1
            try:
                await asyncio.wait_for(over.wait(), KILL_EVERY_S)
            except TimeoutError:
                pass

    channels = [grpc.aio.insecure_channel(served.inference) for _ in range(4)]
    killing = asyncio.create_task(kill())
    try:
        await asyncio.gather(*(client(channels[index % len(channels)]) for index in range(CLIENTS)))
    finally:
        over.set()
        await killing
        await asyncio.gather(*(channel.close() for channel in channels))


@pytest.mark.slow
def test_every_request_to_an_ensemble_ends(tmp_path: Path, serving: Callable[..., Any]) -> None:
    faulthandler.cancel_dump_traceback_later()  # it takes minutes
    sources = {"first": ADD, "left": ADD, "right": ADD}
    for name, run in sources.items():
        write(tmp_path / "repository", name, model_of(run), SHORT if name == "left" else X_TO_Y)
    both = PYTHON + config_of([tensor("A"), tensor("B")], [tensor("Y")], more="dynamic_batching {}")
    write(tmp_path / "repository", "sum", model_of(SUM), both)
    write(tmp_path / "repository", "diamond", "", DIAMOND)
    (tmp_path / "store").mkdir()
    words = ["--ncs", "--model-repository", str(tmp_path / "repository")]
    with serving(tmp_path, tmp_path / "store", {"ts_open_inference_protocol": "oip"}, words) as served:
        ends: Counter[str] = Counter()
        asyncio.run(load(served, ends))
        print(dict(ends))
        assert sum(ends.values()) - ends["killed"] == REQUESTS and ends["answered"] > REQUESTS / 2 and ends["killed"]
        until(lambda: all(queued(served, name) == 0 for name in (*STEPS, "diamond")))
        until(lambda: all(served.worker_pids(name) for name in STEPS))
        last: Counter[str] = Counter()
        asyncio.run(last_ones(served, last))
        assert last["answered"] == CLIENTS, last


async def last_ones(served: Any, ends: Counter[str]) -> None:
    async with grpc.aio.insecure_channel(served.inference) as channel:
        stub = GRPCInferenceServiceStub(channel)
        for _ in range(CLIENTS):
            await one(stub, 1, random.Random(0), ends)


def queued(served: Any, model: str) -> int:
    return int(served.describe(model)["jobQueueStatus"]["pendingRequests"])
