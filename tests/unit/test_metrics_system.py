"""System metrics: the samples, the output of a command, GPUs through the driver's library."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from ts_frontend.models.metrics import measure_of
from ts_frontend.telemetry.metrics.families import read_definitions
from ts_frontend.telemetry.metrics.registry import DEFAULT_FILE, MetricsRegistry
from ts_frontend.telemetry.metrics.system import (
    SMI,
    GpuLoad,
    GpuReader,
    Gpus,
    SystemMetrics,
    Value,
    command_line,
    command_values,
    sample,
    smi_loads,
)

NAMES = [
    "CPUUtilization",
    "DiskAvailable",
    "DiskUsage",
    "DiskUtilization",
    "MemoryAvailable",
    "MemoryUsed",
    "MemoryUtilization",
]


class FakeDriver:
    """The library of the driver, with two GPUs of which the second is lost. Structures are filled through `byref`."""

    asked = 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:
        self.asked += 1
        return 0 if index.value == 0 else 15

    def nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> int:
        memory._obj.total, memory._obj.used = 80 << 30, 20 << 30
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, device: Any, count: Any, rows: Any) -> int:
        for row, (pid, used) in zip(rows, [(7, 5 << 20), (8, 2 << 30), (9, (1 << 64) - 1)], strict=False):
            row.pid, row.used = pid, used
        count._obj.value = 3
        return 0

    def nvmlDeviceGetUtilizationRates(self, device: Any, busy: Any) -> int:
        busy._obj.gpu = 42
        return 0


def test_gpus_have_their_number() -> None:
    assert sample([GpuLoad(1, 42.0, 20 << 30, 80 << 30)])[len(NAMES) :] == [
        Value("GPUMemoryUtilization", 25.0, ("Host", "1")),
        Value("GPUMemoryUsed", 20480.0, ("Host", "1")),
        Value("GPUUtilization", 42.0, ("Host", "1")),
    ]


def test_the_driver_is_asked_for_each_gpu() -> None:
    reader = GpuReader(2)
    reader._library = FakeDriver()
    assert reader.read() == [GpuLoad(0, 42.0, 20 << 30, 80 << 30)]


def test_the_driver_is_asked_for_the_memory_of_each_process() -> None:
    reader = GpuReader(2)
    reader._library = FakeDriver()
    assert reader.process_bytes() == {7: 5 << 20, 8: 2 << 30}
    assert GpuReader(0).process_bytes() == {}


def test_the_memory_of_workers_on_gpus(caplog: pytest.LogCaptureFixture) -> None:
    """A driver that doesn't know the workers' processes is told about once."""

    async def never(command: Sequence[str]) -> str | None:
        raise AssertionError("nvidia-smi was asked")

    reader = GpuReader(2)
    reader._library = FakeDriver()
    measure = measure_of(Gpus(2, never, reader))

    def pool(pid: int, on_gpus: bool = True) -> Any:
        slot = SimpleNamespace(worker=SimpleNamespace(pids=[pid]))
        resources = SimpleNamespace(holder=None)
        return SimpleNamespace(slots=[slot], resources=resources, on_gpus=on_gpus, ready_count=1, name="m_1.0")

    assert [one.gpus for one in measure([pool(7), pool(7, on_gpus=False), pool(8)])] == [5 << 20, 0, 2 << 30]
    assert reader._library.asked == 2, "each GPU once for all models"
    assert [one.gpus for one in measure([pool(7, on_gpus=False)])] == [0]
    assert reader._library.asked == 2, "and none for models on the CPU"
    assert not caplog.records
    (here,) = measure([pool(os.getpid())])
    assert here.host > 1 << 20 and here.gpus == 0
    measure([pool(os.getpid())])
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "modelGpuMemory" in caplog.text and "m_1.0" in caplog.text and "7, 8" in caplog.text


async def test_nvidia_smi_is_asked_where_the_library_is_missing() -> None:
    class Without(GpuReader):
        def _open(self) -> Any:
            return False

    asked: list[Sequence[str]] = []

    async def run(command: Sequence[str]) -> str | None:
        asked.append(command)
        return "0, 42, 20480, 81920\n1, [N/A], [N/A], 81920\n2, 1, 1, 1\n"

    gpus = Gpus(2, run, Without(2))
    assert gpus.stale and not gpus.loads
    for found in await asyncio.gather(gpus.fresh(), gpus.fresh()):
        assert found == [GpuLoad(0, 42.0, 20 << 30, 80 << 30)]
    assert asked == [SMI] and not gpus.stale
    assert smi_loads("", 2) == []


def test_what_a_command_prints() -> None:
    output = "CPUUtilization.Percent:1.5|#Level:Host|#hostname:vm,1\nnoise\n\n9000:1\nMemoryUsed.MB:1|#|#hostname:v,1\n"
    assert command_values(output) == [Value("CPUUtilization", 1.5, ("Host",))]
    assert command_line("/py", "ts/metrics/metric_collector.py --gpu 0") == [
        "/py",
        "ts/metrics/metric_collector.py",
        "--gpu",
        "0",
    ]


def test_a_command_gets_the_pids(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[str] = []
    outputs = ["CPUUtilization.Percent:1.5|#Level:Host|#hostname:vm,1", None]

    async def command(pids: str) -> str | None:
        asked.append(pids)
        return outputs.pop(0)

    async def no_tool(_: Sequence[str]) -> str | None:
        return None

    metrics = MetricsRegistry(read_definitions(DEFAULT_FILE), "prometheus", "vm")
    system = SystemMetrics(metrics, 60, Gpus(0, no_tool), command=command, pids=lambda: [7, 8])
    asyncio.run(system.once())
    with caplog.at_level(logging.WARNING):
        asyncio.run(system.once())
    assert asked == ["7,8", "7,8"]
    assert 'CPUUtilization{Level="Host",Hostname="vm",} 1.5\n' in metrics.text()
    assert "system_metrics_cmd failed" in caplog.text
