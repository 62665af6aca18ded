"""Timing of a handler's steps."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

from ts.metrics.metric_type_enum import MetricTypes

P = ParamSpec("P")
R = TypeVar("R")


def _is_profiled(handler: Any) -> bool:
    context = getattr(handler, "context", None)
    section = (getattr(context, "model_yaml_config", None) or {}).get("handler")
    return isinstance(section, dict) and bool(section.get("profile", False))


def _now_s() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(func: Callable[P, R]) -> Callable[P, R]:
    """A handler's method that records `ts_handler_<name>` in ms when model-config.yaml has `handler: {profile: true}`.

    Work on a CUDA device is waited for, so that it counts for the step that asked for it.
    """

    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        handler = cast(Any, args[0])
        if not _is_profiled(handler):
            return func(*args, **kwargs)
        started_s = _now_s()
        result = func(*args, **kwargs)
        elapsed_ms = (_now_s() - started_s) * 1000
        handler.context.metrics.add_metric(
            f"ts_handler_{func.__name__}", round(elapsed_ms, 2), "ms", metric_type=MetricTypes.GAUGE
        )
        return result

    return wrapper
