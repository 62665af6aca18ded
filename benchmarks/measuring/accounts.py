"""CPU time of a process and its descendants, including those that have ended."""

from __future__ import annotations

import psutil


def tree(root: psutil.Process) -> list[psutil.Process]:
    """The process and all its living descendants."""
    try:
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_s(root: psutil.Process) -> float:
    """User and system seconds of the tree. Children that have ended count with the parent that waited for them."""
    return sum(_cpu_s(process) for process in tree(root))


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)
