"""CPU, memory, disk and GPU of the machine, sampled in a thread every `metric_time_interval` seconds."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import shlex
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import psutil

from ts_frontend.telemetry.metrics.registry import MetricsRegistry
from ts_frontend.telemetry.metrics.text import parse_record

log = logging.getLogger(__name__)

LIBRARY = "libnvidia-ml.so.1"


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """`busy_percent`: the share of time in which something ran on it."""

    index: int
    busy_percent: float
    used_bytes: int
    total_bytes: int


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    """nvmlMemory_t, bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class GpuReader:
    """Reads the first `count` GPUs; none where the library or the driver isn't there, or a GPU gives no answer."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._library: Any = None

    def read(self) -> list[GpuLoad]:
        """Blocks for some milliseconds, the first time longer."""
        if self._count and self._library is None:
            self._library = self._open()
        return list(self._loads()) if self._library else []

    def _open(self) -> Any:
        try:
            library = ctypes.CDLL(LIBRARY)
        except OSError:
            return False
        return library if library.nvmlInit_v2() == 0 else False

    def _loads(self) -> Iterator[GpuLoad]:
        library = self._library
        for index in range(self._count):
            device, busy, memory = ctypes.c_void_p(), _Utilization(), _Memory()
            if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)):
                continue
            if library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
                continue
            library.nvmlDeviceGetUtilizationRates(device, ctypes.byref(busy))
            yield GpuLoad(index, float(busy.gpu), memory.used, memory.total)


MEGABYTE, GIGABYTE = 1 << 20, 1 << 30
DISK = "/"

#: Takes the pids of the workers, returns the metrics command's output (None: it failed).
RunCommand = Callable[[str], Awaitable["str | None"]]


class Value(NamedTuple):
    """One value; `labels` without the host."""

    name: str
    value: float
    labels: tuple[str, ...]


def sample(gpus: GpuReader) -> list[Value]:
    """The machine as it is now; the CPU since the last call (0 the first time)."""
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
    for gpu in gpus.read():
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
        gpu_count: int,
        *,
        command: RunCommand | None = None,
        pids: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        self._registry = registry
        self._interval_s = interval_s
        self._gpus = GpuReader(gpu_count)
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
            return await asyncio.to_thread(sample, self._gpus)
        output = await self._command(",".join(map(str, self._pids())))
        if output is None:
            log.warning("system_metrics_cmd failed, or took too long")
            return []
        return command_values(output)


def command_line(python: str, command: str) -> list[str]:
    """`system_metrics_cmd` as it is run: by the workers' Python, as TorchServe does."""
    return [python, *shlex.split(command)]
