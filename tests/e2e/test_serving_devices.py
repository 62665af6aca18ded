"""Workers on several devices. nvidia-smi is a stand-in; the handlers' device numbers are real."""

from __future__ import annotations

import json
import os
from pathlib import Path

import grpc
import httpx
import pytest

TELLING = """
import json

def handle(data, context):
    properties = context.system_properties
    return [json.dumps([properties["gpu_id"], properties["model_dir"]])] * len(data or [])
"""


def with_gpus(folder: Path, count: int) -> dict[str, str]:
    """An environment in which nvidia-smi lists so many devices."""
    tool = folder / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    lines = "".join(f"{number}\\n" for number in range(count))
    tool.write_text(f"#!/bin/sh\nprintf '{lines}'\n")
    tool.chmod(0o755)
    return {"PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture
def three_gpus(tmp_path: Path) -> dict[str, str]:
    return with_gpus(tmp_path, 3)


def devices(server, model: str, workers: int) -> list[str]:
    description = server.describe(model)
    assert len(description["workers"]) == workers
    assert all(worker["gpu"] for worker in description["workers"])
    return [worker["gpuUsage"] for worker in description["workers"]]


def test_workers_are_placed_by_turns_and_their_handlers_are_told_where(start, write, three_gpus):
    write("any", TELLING)
    write("chosen", TELLING, config="deviceIds: [2, 0]\ndeviceType: gpu\n")
    write("host", TELLING, config="deviceType: cpu\n")
    server = start(env=three_gpus, number_of_gpu=3)
    server.register("any", initial_workers=4)
    server.register("chosen", initial_workers=3)
    assert devices(server, "any", 4) == ["gpuId::1", "gpuId::2", "gpuId::0", "gpuId::1"]
    assert devices(server, "chosen", 3) == ["gpuId::2", "gpuId::0", "gpuId::2"]
    assert server.describe("chosen")["deviceIds"] == [2, 0]
    told = {json.loads(server.predict("chosen", {}))[0] for _ in range(12)}
    assert told == {0, 2}
    server.register("host")
    assert json.loads(server.predict("host", {}))[0] is None
    assert server.describe("host")["deviceType"] == "cpu"


def test_fewer_devices_can_be_used_than_there_are(start, write, three_gpus):
    write("any", TELLING)
    server = start(env=three_gpus, number_of_gpu=1)
    server.register("any", initial_workers=2)
    assert devices(server, "any", 2) == ["gpuId::0", "gpuId::0"]


@pytest.mark.parametrize(
    ("count", "config", "words"),
    [
        (0, "deviceType: gpu\n", "deviceType is 'gpu', and the server has no GPU: its workers run on the CPU"),
        (0, "deviceIds: [1]\n", "deviceIds is [1], and the server has no GPU: its workers run on the CPU"),
        (
            3,
            "deviceIds: [1, 3]\n",
            "deviceIds is [1, 3]: ignored, all GPUs are used: the server has 3, numbered from 0",
        ),
    ],
)
def test_devices_that_are_not_there_are_told_who_registers_the_model(
    start, write, three_gpus, count: int, config: str, words: str
) -> None:
    """In the answer, the description and the log; with TorchServe's sentence, and with the other ignored settings."""
    write("wrong", TELLING, config=config + "batchSize: 0\n")
    server = start(env=three_gpus, number_of_gpu=count)
    answer = httpx.post(f"{server.http_management}/models?url=wrong&initial_workers=1").json()
    assert answer["status"] == 'Model "wrong" Version: 1.0 registered with 1 initial workers'
    number, device = answer["warnings"]
    assert number.startswith("model-config.yaml: batchSize is 0: ignored") and words in device
    assert server.describe("wrong")["warnings"] == answer["warnings"]
    assert server.log.count(words) == 1
    assert server.describe("wrong")["workers"][0]["gpu"] is (count > 0)


SEEING = """
import json
import os

def handle(data, context):
    seen = [context.system_properties["gpu_id"], os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("LOCAL_RANK")]
    return [json.dumps(seen)] * len(data or [])
"""


def test_workers_with_several_devices_see_a_block_of_them_each(start, write, tmp_path):
    write("own", SEEING, config="parallelType: custom\nparallelLevel: 2\n")
    write("listed", SEEING, config="parallelType: custom\nparallelLevel: 2\ndeviceIds: [4, 1, 2]\n")
    server = start(env=with_gpus(tmp_path, 5), number_of_gpu=5)
    server.register("own", initial_workers=1)
    assert json.loads(server.predict("own", {})) == [0, "0,1", None]
    server.scale("own", 2)
    assert {tuple(json.loads(server.predict("own", {}))) for _ in range(20)} <= {(0, "0,1", None), (0, "2,3", None)}
    assert devices(server, "own", 2) == ["gpuId::0", "gpuId::2"]
    server.register("listed")
    assert json.loads(server.predict("listed", {})) == [0, "4,1", None]


@pytest.mark.long
def test_a_rank_of_torchrun_is_told_its_own_device_among_those_it_sees(start, write, tmp_path):
    write("team", SEEING, config="parallelType: pp\ntorchrun:\n  nproc-per-node: 2\ndeviceIds: [3, 2]\n")
    server = start(env=with_gpus(tmp_path, 4), number_of_gpu=4)
    server.register("team")
    assert json.loads(server.predict("team", {})) == [0, "3,2", "0"]


def test_a_model_that_needs_more_devices_than_there_are_is_refused_in_words(start, write, three_gpus):
    write("large", SEEING, config="parallelType: custom\nparallelLevel: 4\n")
    server = start(env=three_gpus, number_of_gpu=3)
    with pytest.raises(grpc.RpcError) as failure:
        server.register("large")
    assert "needs 4 GPUs" in failure.value.details() and "may use 3" in failure.value.details()


#: `torch.cuda` of a GPU that fails in a kernel: every later call to it from the process fails, too.
FAILING_GPU = """
import json
import os
import torch

lost = False


def use(device=None):
    if lost:
        raise RuntimeError("CUDA error: device-side assert triggered\\nFor debugging consider CUDA_LAUNCH_BLOCKING=1")


def compute(data):
    global lost
    words = [json.loads(row.get("data") or row.get("body")) for row in data]
    if "too large" in words:
        raise RuntimeError("CUDA out of memory. Tried to allocate 200.00 GiB.")
    lost = lost or "bad index" in words
    use()
    return [str(os.getpid())] * len(data)


torch.cuda.is_initialized = lambda: True
torch.cuda.current_device = lambda: 0
torch.cuda.device_count = lambda: 1
torch.cuda.synchronize = use
"""
WAYS = {
    "returning": "def handle(data, context):\n    return compute(data) if data else None\n",
    "yielding": "def handle(data, context):\n    yield compute(data)\n",
    "awaiting": "async def handle(data, context):\n    return compute(data)\n",
}


@pytest.fixture(scope="module")
def computing(server_of):
    """A server with a model for each way, whose six processes import torch once."""
    with server_of({way: (f"{FAILING_GPU}\n{code}", "") for way, code in WAYS.items()}, preload_torch="true") as server:
        yield server


@pytest.mark.parametrize(
    "way", [*list(WAYS)[:1], *(pytest.param(way, marks=pytest.mark.long) for way in list(WAYS)[1:])]
)
def test_a_worker_whose_gpu_failed_answers_and_is_replaced(computing, way):
    """A GPU's failure stays until its process ends: a worker that went on would fail each of its requests."""

    def refusal(word: str) -> str:
        with pytest.raises(grpc.RpcError) as failure:
            computing.predict(way, word)
        return str(failure.value.details())

    seen = len(computing.lines)
    before = computing.predict(way, "ok")
    assert "CUDA out of memory" in refusal("too large")
    assert computing.predict(way, "ok") == before
    assert "device-side assert triggered" in refusal("bad index")
    after = computing.predict(way, "ok")
    assert after != before
    reason = computing.describe(way)["lastWorkerFailure"]["reason"]
    assert reason == "Its GPU failed, and can't be used by its process any more (exit code 71)"
    assert any("the worker ends and is replaced" in line for line in computing.lines[seen:])
