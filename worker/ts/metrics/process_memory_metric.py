"""The memory of processes, as TorchServe's scripts measure it."""

from __future__ import annotations

import logging
from typing import TextIO

import psutil


def get_cpu_usage(pid: int | str) -> int:
    """The resident memory of a process in bytes; 0 for one that can't be read."""
    try:
        return int(psutil.Process(int(pid)).memory_info().rss)
    except psutil.Error as error:
        logging.error("The memory of process %s can't be read: %s", pid, error)
        return 0


def check_process_mem_usage(stdin: TextIO) -> None:
    """Log `PID:BYTES` for each process that the next line of `stdin` names, separated by commas."""
    for pid in filter(None, stdin.readline().strip().split(",")):
        logging.info("%s:%d", pid, get_cpu_usage(pid))
