"""The machine's metrics as records, for a `system_metrics_cmd` of one's own. The server measures them itself."""

from __future__ import annotations

from types import ModuleType

import psutil

from ts.metrics.dimension import Dimension
from ts.metrics.metric import Metric

MEGABYTE, GIGABYTE = 1 << 20, 1 << 30


def _add(name: str, value: float, unit: str) -> None:
    """Write a record, without the prefix: the server reads them so from a `system_metrics_cmd`."""
    print(Metric(name, value, unit, (Dimension("Level", "Host"),)), flush=True)


def cpu_utilization() -> None:
    _add("CPUUtilization", psutil.cpu_percent(), "percent")


def memory_used() -> None:
    _add("MemoryUsed", psutil.virtual_memory().used / MEGABYTE, "MB")


def memory_available() -> None:
    _add("MemoryAvailable", psutil.virtual_memory().available / MEGABYTE, "MB")


def memory_utilization() -> None:
    _add("MemoryUtilization", psutil.virtual_memory().percent, "percent")


def disk_used() -> None:
    _add("DiskUsage", psutil.disk_usage("/").used / GIGABYTE, "GB")


def disk_available() -> None:
    _add("DiskAvailable", psutil.disk_usage("/").free / GIGABYTE, "GB")


def disk_utilization() -> None:
    _add("DiskUtilization", psutil.disk_usage("/").percent, "percent")


MEASURED = (
    *(cpu_utilization, memory_used, memory_available, memory_utilization),
    *(disk_used, disk_available, disk_utilization),
)


def collect_all(mod: ModuleType | None = None, num_of_gpu: int = 0) -> None:
    """Measure everything. GPUs are measured by the server."""
    for measure in MEASURED:
        measure()
