"""The machine's metrics as records, for a `system_metrics_cmd` of one's own. The server measures them itself."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import psutil

from ts.metrics.dimension import Dimension
from ts.metrics.metric import Metric

MEGABYTE, GIGABYTE = 1 << 20, 1 << 30


def _measuring(name: str, unit: str, value: Callable[[], float]) -> Callable[[], None]:
    """A function that writes a record, without the prefix: the server reads them so from a `system_metrics_cmd`."""

    def measure() -> None:
        print(Metric(name, value(), unit, (Dimension("Level", "Host"),)), flush=True)

    return measure


cpu_utilization = _measuring("CPUUtilization", "percent", lambda: psutil.cpu_percent())
memory_used = _measuring("MemoryUsed", "MB", lambda: psutil.virtual_memory().used / MEGABYTE)
memory_available = _measuring("MemoryAvailable", "MB", lambda: psutil.virtual_memory().available / MEGABYTE)
memory_utilization = _measuring("MemoryUtilization", "percent", lambda: psutil.virtual_memory().percent)
disk_used = _measuring("DiskUsage", "GB", lambda: psutil.disk_usage("/").used / GIGABYTE)
disk_available = _measuring("DiskAvailable", "GB", lambda: psutil.disk_usage("/").free / GIGABYTE)
disk_utilization = _measuring("DiskUtilization", "percent", lambda: psutil.disk_usage("/").percent)

MEASURED = (
    *(cpu_utilization, memory_used, memory_available, memory_utilization),
    *(disk_used, disk_available, disk_utilization),
)


def collect_all(mod: ModuleType | None = None, num_of_gpu: int = 0) -> None:
    """Measure everything. GPUs are measured by the server."""
    for measure in MEASURED:
        measure()
