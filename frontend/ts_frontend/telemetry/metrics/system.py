"""CPU, memory, disk and GPU of the machine, sampled in a thread every `metric_time_interval` seconds."""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

import psutil

from ts_frontend.telemetry.metrics.gpus import GpuLoad, Gpus
from ts_frontend.telemetry.metrics.registry import MetricsRegistry
from ts_frontend.telemetry.metrics.text import parse_record

log = logging.getLogger(__name__)

MEGABYTE, GIGABYTE = 1 << 20, 1 << 30
DISK = "/"

#: Takes the pids of the workers, returns the metrics command's output (None: it failed).
RunCommand = Callable[[str], Awaitable["str | None"]]


class Value(NamedTuple):
    """One value; `labels` without the host."""

    name: str
    value: float
    labels: tuple[str, ...]


def sample(gpus: Iterable[GpuLoad] = ()) -> list[Value]:
    """The machine as it is now, with the loads of its GPUs; the CPU since the last call (0 the first time)."""
    memory, disk = psutil.virtual_memory(), psutil.disk_usage(DISK)
    values = {
        "CPUUtilization": psutil.cpu_percent(),
        "DiskAvailable": disk.free / GIGABYTE,
        "DiskUsage": disk.used / GIGABYTE,
        "DiskUtilization": disk.percent,
        "MemoryAvailable": memory.available / MEGABYTE,
        "MemoryUsed": memory.used / MEGABYTE,
        "MemoryUtilization": memory.percent,
    }
    found = [Value(name, value, ("Host",)) for name, value in values.items()]
    for gpu in gpus:
        labels = ("Host", str(gpu.index))
        found.append(Value("GPUMemoryUtilization", round(100 * gpu.used_bytes / gpu.total_bytes, 2), labels))
        found.append(Value("GPUMemoryUsed", gpu.used_bytes / MEGABYTE, labels))
        found.append(Value("GPUUtilization", gpu.busy_percent, labels))
    return found


def command_values(output: str) -> list[Value]:
    """The metrics a command printed, one a line, up to an empty line; lines that aren't metrics don't count."""
    found = []
    for line in output.splitlines():
        if not line.strip():
            break
        record = parse_record(line.strip())
        if record is not None:
            found.append(Value(record.name, record.value, tuple(record.labels.values())))
    return found


class SystemMetrics:
    """Samples for as long as `run` runs. `command`: runs a metrics command instead of measuring the system here."""

    def __init__(
        self,
        registry: MetricsRegistry,
        interval_s: float,
        gpus: Gpus,
        *,
        command: RunCommand | None = None,
        pids: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        self._registry = registry
        self._interval_s = interval_s
        self._gpus = gpus
        self._command = command
        self._pids = pids

    async def run(self) -> None:
        """Samples until it is cancelled."""
        while True:
            try:
                await self.once()
            except Exception:
                log.exception("System metrics couldn't be taken")
            await asyncio.sleep(self._interval_s)

    async def once(self) -> None:
        """One sample, recorded."""
        for one in await self._values():
            self._registry.server_value(one.name, one.value, *one.labels)

    async def _values(self) -> list[Value]:
        if self._command is None:
            return await asyncio.to_thread(sample, await self._gpus.fresh())
        output = await self._command(",".join(map(str, self._pids())))
        if output is None:
            log.warning("system_metrics_cmd failed, or took too long")
            return []
        return command_values(output)


def command_line(python: str, command: str) -> list[str]:
    """`system_metrics_cmd` as it is run: by the workers' Python, as TorchServe does."""
    return [python, *shlex.split(command)]
