"""Prints the time of a function."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def timeit(func: Callable[P, R]) -> Callable[P, R]:
    """A function that prints the seconds, and the seconds of CPU, of each call."""

    @functools.wraps(func)
    def timed(*args: P.args, **kwargs: P.kwargs) -> R:
        begun_s, cpu_s = time.perf_counter(), time.process_time()
        try:
            return func(*args, **kwargs)
        finally:
            took_s, took_cpu_s = time.perf_counter() - begun_s, time.process_time() - cpu_s
            print(f"{func.__name__} took {took_s:.4f} s, {took_cpu_s:.4f} s of CPU")

    return timed
