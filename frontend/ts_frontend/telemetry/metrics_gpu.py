"""How busy NVIDIA's GPUs are, from the driver's own library (NVML): no process is started for it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
