"""CPU, memory, disk and GPU of the machine, sampled in a thread every `metric_time_interval` seconds; the GPUs' load
from the driver's library, or from nvidia-smi where a process can't load that."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import shlex
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import psutil

from ts_frontend.telemetry.metrics.registry import MetricsRegistry
from ts_frontend.telemetry.metrics.requests import parse_record

log = logging.getLogger(__name__)


LIBRARY = "libnvidia-ml.so.1"


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """The load of one GPU. `busy_percent`: the share of time in which a kernel ran."""

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


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t, of the functions that end in _v3."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


#: NVML's value for a process whose memory it doesn't know.
_UNKNOWN_BYTES = (1 << 64) - 1
#: Processes read on one GPU; more are left out.
PROCESSES_MAX = 1024


class GpuReader:
    """Reads the first `count` GPUs; none without the library or the driver, or if a GPU doesn't answer."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._library: Any = None

    def read(self) -> list[GpuLoad]:
        """Blocks for some milliseconds, the first time longer."""
        return list(self._loads()) if self._opened() else []

    def process_bytes(self) -> dict[int, int]:
        """The memory of each process on the GPUs, by its id; empty if the driver has none. Blocks for milliseconds."""
        library = self._opened()
        found: dict[int, int] = {}
        for index in range(self._count if library else 0):
            device, count = ctypes.c_void_p(), ctypes.c_uint(PROCESSES_MAX)
            rows = (_Process * PROCESSES_MAX)()
            if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)):
                continue
            if library.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), rows):
                continue
            for row in rows[: count.value]:
                if row.used != _UNKNOWN_BYTES:
                    found[row.pid] = found.get(row.pid, 0) + row.used
        return found

    @property
    def missing(self) -> bool:
        """Whether the library could not be loaded."""
        return self._library is False

    def _opened(self) -> Any:
        """The library, loaded the first time that it is needed; False or None without it."""
        if self._count and self._library is None:
            self._library = self._open()
        return self._library

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


#: Prints what `smi_loads` reads.
SMI = ("nvidia-smi", "--query-gpu=index,utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits")
#: The age at which the loads are read again.
FRESH_S = 1.0
#: The pause before nvidia-smi is run again after it reported nothing.
SMI_AGAIN_S = 60.0
MIB = 1 << 20


def smi_loads(output: str, count: int) -> list[GpuLoad]:
    """The first `count` GPUs in the output of SMI; lines without numbers (`[N/A]`) are skipped."""
    found = []
    for line in output.splitlines():
        try:
            index, busy, used, total = (int(part) for part in line.split(","))
        except ValueError:
            continue
        if index < count and total:
            found.append(GpuLoad(index, float(busy), used * MIB, total * MIB))
    return found


class Gpus:
    """The first `count` GPUs, read on demand and kept for FRESH_S. `run`: returns a command's output or None."""

    def __init__(
        self, count: int, run: Callable[[Sequence[str]], Awaitable[str | None]], reader: GpuReader | None = None
    ) -> None:
        self.count = count
        self.loads: Sequence[GpuLoad] = ()
        self._run = run
        self._reader = reader or GpuReader(count)
        self._reading = asyncio.Lock()
        self._next_s = 0.0

    def process_bytes(self) -> dict[int, int]:
        """`GpuReader.process_bytes`."""
        return self._reader.process_bytes()

    @property
    def stale(self) -> bool:
        """Whether `fresh` would read them again."""
        return self.count > 0 and time.monotonic() >= self._next_s and not self._reading.locked()

    async def fresh(self) -> Sequence[GpuLoad]:
        """Returns the loads, at most FRESH_S old unless they can't be read."""
        if self.count:
            async with self._reading:
                if time.monotonic() >= self._next_s:
                    self.loads = await self._read()
        return self.loads

    async def _read(self) -> Sequence[GpuLoad]:
        loads: Sequence[GpuLoad] = await asyncio.to_thread(self._reader.read)
        if self._reader.missing:
            loads = smi_loads(await self._run(SMI) or "", self.count)
        self._next_s = time.monotonic() + (FRESH_S if loads or not self._reader.missing else SMI_AGAIN_S)
        return loads


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


@dataclass(eq=False)
class SystemMetrics:
    """Samples for as long as `run` runs. `command`: runs a metrics command instead of measuring the system here."""

    registry: MetricsRegistry
    interval_s: float
    gpus: Gpus
    _: KW_ONLY
    command: RunCommand | None = None
    pids: Callable[[], Iterable[int]] = tuple

    async def run(self) -> None:
        """Samples until it is cancelled."""
        while True:
            try:
                await self.once()
            except Exception:
                log.exception("System metrics couldn't be taken")
            await asyncio.sleep(self.interval_s)

    async def once(self) -> None:
        for one in await self._values():
            self.registry.server_value(one.name, one.value, *one.labels)

    async def _values(self) -> list[Value]:
        if self.command is None:
            return await asyncio.to_thread(sample, await self.gpus.fresh())
        output = await self.command(",".join(map(str, self.pids())))
        if output is None:
            log.warning("system_metrics_cmd failed, or took too long")
            return []
        return command_values(output)


def command_line(python: str, command: str) -> list[str]:
    """`system_metrics_cmd` as it is run: by the workers' Python, as TorchServe does."""
    return [python, *shlex.split(command)]
