"""Descriptions of models as text for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ts.protocol.text import printable
from ts_frontend.cli.client import count_ready

#: The settings that are shown only if they are set.
_QUIET = frozenset({None, "", 0})
#: The longest state in a table: `describe` and JSON have the whole text.
STATE_CHARS_MAX = 80
#: The least of a URL that a terminal shows, however narrow.
URL_CHARS_MIN = 8
_LISTED = {"modelName", "modelVersion", "workers", "jobQueueStatus", "lastWorkerFailure", "customizedMetadata"}


def natural(text: str) -> list[tuple[bool, int, str]]:
    """A key for sorting names as people do: m2 before m10, 1.9 before 1.10."""
    return [
        (not part.isdecimal(), int(part) if part.isdecimal() else 0, part.lower())
        for part in re.split(r"([0-9]+)", text)
        if part
    ]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns as wide as their longest cell, two blanks apart."""
    cells = [list(head), *([printable(str(cell)) for cell in row] for row in rows)]
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


def _end(line: str, length: int) -> str:
    """The end of a line, which says more of a URL than its beginning."""
    return line if len(line) <= length else f"…{line[1 - length :]}"


def fits(name: str, pattern: str) -> bool:
    """Whether a name contains `pattern`, ignoring case; with `*` or `?`, whether the whole name matches it."""
    name, pattern = name.lower(), pattern.lower()
    return fnmatchcase(name, pattern) if "*" in pattern or "?" in pattern else pattern in name


def overview(
    descriptions: Iterable[tuple[dict[str, Any], bool]], *, coloured: bool = False, columns: int | None = None
) -> str:
    """One line for each version; the flag marks the default. `coloured`: models that failed are red, those with too few
    workers yellow. `columns`: a terminal's, in which the URLs lose their beginnings."""
    descriptions = list(descriptions)
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
    if not rows:
        return "No model is registered."
    if columns is not None:
        others = table(head[:-1], [row[:-1] for row in rows])
        room = columns - max(map(len, others.split("\n"))) - 2
        rows = [(*row[:-1], _end(row[-1], max(room, URL_CHARS_MIN))) for row in rows]
    first, *lines = table(head, rows).split("\n")
    if coloured:
        first = f"{_BOLD}{first}{_PLAIN}"
        styles = [_style(description) for description, _ in descriptions]
        lines = [f"{style}{line}{_PLAIN}" if style else line for style, line in zip(styles, lines, strict=True)]
    return "\n".join((first, *lines))


_BOLD, _RED, _YELLOW, _PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[33m", "\x1b[0m"


def _style(description: dict[str, Any]) -> str:
    """Red for a model that can't be loaded, yellow for one with too few workers."""
    if description.get("loadFailure") is not None:
        return _RED
    return "" if count_ready(description) >= description["minWorkers"] else _YELLOW


def details(description: dict[str, Any]) -> str:
    queue = description["jobQueueStatus"]
    facts = {
        name: value
        for name, value in description.items()
        if name not in _LISTED and (isinstance(value, (list, dict)) or value not in _QUIET)
    }
    facts["pendingRequests"] = f"{queue['pendingRequests']} (room for {queue['remainingCapacity']})"
    facts["workers"] = workers(description)
    width = max(map(len, facts))
    parts = [f"{description['modelName']} {description['modelVersion']}"]
    parts += [f"  {name.ljust(width)}  {_said(value)}" for name, value in facts.items()]
    if description["workers"]:
        parts += ["", _worker_table(description["workers"])]
    if "lastWorkerFailure" in description:
        parts += ["", failure(description["lastWorkerFailure"])]
    if "customizedMetadata" in description:
        parts += ["", f"  the handler says: {description['customizedMetadata']}"]
    return "\n".join(parts)


def _said(value: object) -> object:
    """A mapping (such as `autoscale`) or a list as one line of text."""
    if isinstance(value, dict):
        return "; ".join(f"{name}: {one}" for name, one in value.items())
    return "; ".join(map(str, value)) if isinstance(value, list) else value


def _worker_table(rows: list[dict[str, Any]]) -> str:
    head = ["WORKER", "STATUS", "PID", "MEMORY", "GPU", "STARTED"]
    cells = [
        [row["id"], row["status"], row["pid"], _mebibytes(row["memoryUsage"]), row["gpuUsage"], row["startTime"]]
        for row in rows
    ]
    if any("node" in row or "waitsFor" in row for row in rows):
        head.append("NODE")
        for cell, row in zip(cells, rows, strict=True):
            cell.append(_node(row))
    return "\n".join(f"  {line}" for line in table(head, cells).splitlines())


def _node(row: dict[str, Any]) -> str:
    """The node of a cluster's worker, or the reason why it has none yet."""
    node = row.get("node")
    if node is None:
        return str(row.get("waitsFor", "-"))
    gpus = f", GPU {','.join(node['gpus'])}" if node.get("gpus") else ""
    return f"{node['address']} ({node['id'][:8]}){gpus}"


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.0f} MiB" if size else "-"


def failure(last: dict[str, Any]) -> str:
    times = last.get("failuresInARow", 1)
    again = f" ({times} times in a row)" if times > 1 else ""
    lines = [
        f"  worker {last.get('workerId', '?')} failed at {last.get('time', '?')}{again}: {last.get('reason', '?')}"
    ]
    printed = last.get("lastLines", [])
    if printed:
        lines += ["  the last lines it printed:", *(f"    {line}" for line in printed)]
    return "\n".join(lines)


def rollout(found: Mapping[str, Any]) -> str:
    """A rollout for people: its state, the requests of both versions, the verdict, and the events."""
    counts = found.get("requests", {})
    lines = [
        f"{found['new']} in place of {found['old']}: {found['state']}, {found['percent']:g} % of the calls",
        *(f"{version}: {one['answered']} answered, {one['failed']} failed" for version, one in counts.items()),
        *(f"copies {result}: {count}" for result, count in found.get("copies", {}).items()),
        f"verdict: {found['verdict']['decision']}: {found['verdict']['reason']}",
        *(f"{event['time']} {event['event']}: {event['reason']}" for event in found["events"]),
    ]
    return "\n".join(lines)
