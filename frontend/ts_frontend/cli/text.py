"""Descriptions of models as text for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ts_frontend.cli.client import count_ready

#: Settings worth a line only when they are in use.
_QUIET = frozenset({None, "", 0})
#: Of a state in a table: the whole of it is in `describe` and in JSON.
STATE_CHARS_MAX = 80
_LISTED = {"modelName", "modelVersion", "workers", "jobQueueStatus", "lastWorkerFailure", "customizedMetadata"}


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns as wide as their longest cell, two blanks apart."""
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def workers(description: dict[str, Any]) -> str:
    """`2 of 3 ready`."""
    return f"{count_ready(description)} of {max(description['minWorkers'], len(description['workers']))} ready"


def state(description: dict[str, Any]) -> str:
    """`2 of 3 ready`, or why the model can't be loaded."""
    failure = description.get("loadFailure")
    return workers(description) if failure is None else f"failed: {failure}"


def _short(line: str) -> str:
    line = " ".join(line.split())
    return line if len(line) <= STATE_CHARS_MAX else f"{line[: STATE_CHARS_MAX - 3]}..."


def overview(descriptions: Iterable[tuple[dict[str, Any], bool]]) -> str:
    """One line for each version; the flag marks the default one."""
    head = ("MODEL", "VERSION", "DEFAULT", "WORKERS", "WAITING", "URL")
    rows = [
        (
            description["modelName"],
            description["modelVersion"],
            "yes" if default else "",
            _short(state(description)),
            description["jobQueueStatus"]["pendingRequests"],
            description["modelUrl"],
        )
        for description, default in descriptions
    ]
    return table(head, rows) if rows else "No model is registered."


def details(description: dict[str, Any]) -> str:
    """Everything about one version."""
    queue = description["jobQueueStatus"]
    facts = {
        name: value
        for name, value in description.items()
        if name not in _LISTED and (isinstance(value, list) or value not in _QUIET)
    }
    facts["pendingRequests"] = f"{queue['pendingRequests']} (room for {queue['remainingCapacity']})"
    facts["workers"] = workers(description)
    width = max(map(len, facts))
    parts = [f"{description['modelName']} {description['modelVersion']}"]
    parts += [f"  {name.ljust(width)}  {value}" for name, value in facts.items()]
    if description["workers"]:
        parts += ["", _worker_table(description["workers"])]
    if "lastWorkerFailure" in description:
        parts += ["", failure(description["lastWorkerFailure"])]
    if "customizedMetadata" in description:
        parts += ["", f"  the handler says: {description['customizedMetadata']}"]
    return "\n".join(parts)


def _worker_table(rows: list[dict[str, Any]]) -> str:
    head = ("WORKER", "STATUS", "PID", "MEMORY", "GPU", "STARTED")
    cells = [
        (row["id"], row["status"], row["pid"], _mebibytes(row["memoryUsage"]), row["gpuUsage"], row["startTime"])
        for row in rows
    ]
    return "\n".join(f"  {line}" for line in table(head, cells).splitlines())


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.0f} MiB" if size else "-"


def failure(last: dict[str, Any]) -> str:
    """Why a worker ended, with the last lines it printed."""
    times = last.get("failuresInARow", 1)
    again = f" ({times} times in a row)" if times > 1 else ""
    lines = [
        f"  worker {last.get('workerId', '?')} failed at {last.get('time', '?')}{again}: {last.get('reason', '?')}"
    ]
    printed = last.get("lastLines", [])
    if printed:
        lines += ["  the last lines it printed:", *(f"    {line}" for line in printed)]
    return "\n".join(lines)
