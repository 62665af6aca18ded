"""Workers on several devices. The devices are a stand-in for nvidia-smi; what the handlers are told is real."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

TELLING = """
import json

def handle(data, context):
    properties = context.system_properties
    return [json.dumps([properties["gpu_id"], properties["model_dir"]])] * len(data or [])
"""


@pytest.fixture
def three_gpus(tmp_path: Path) -> dict[str, str]:
    """An environment in which nvidia-smi lists three devices."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nprintf '0\\n1\\n2\\n'\n")
    tool.chmod(0o755)
    return {"PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}"}


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
