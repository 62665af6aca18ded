"""Micro-batching: the steps of a batch's parts overlap."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Any, Protocol, cast

STEPS = ("preprocess", "inference", "postprocess")


class Steps(Protocol):
    """What a BaseHandler has."""

    context: Any

    def preprocess(self, data: Any) -> Any: ...

    def inference(self, data: Any) -> Any: ...

    def postprocess(self, data: Any) -> Any: ...

    def explain_handle(self, data_preprocess: Any, raw_data: Any) -> Any: ...

    def describe_handle(self) -> Any: ...


def _after(step: Callable[[Any], Any], before: Future[Any]) -> Any:
    return step(before.result())


class MicroBatching:
    """In place of a handler's `handle`: `self.handle = MicroBatching(self, micro_batch_size=4)`.

    A batch is cut in parts of `micro_batch_size`, which go through preprocess, inference and postprocess one after the
    other; each step has its own `parallelism[step]` threads (1 when not given), so that one part is preprocessed while
    another is in the model. Answers keep the requests' order.
    """

    def __init__(
        self, parent_handler: Steps, micro_batch_size: int = 1, parallelism: Mapping[str, int] | None = None
    ) -> None:
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size must be at least 1, not {micro_batch_size}")
        threads = dict(parallelism or {})
        unknown = threads.keys() - set(STEPS)
        if unknown:
            raise ValueError(f"parallelism of {', '.join(sorted(unknown))}: the steps are {', '.join(STEPS)}")
        self.parent_handler = parent_handler
        self.micro_batch_size = micro_batch_size
        self.parallelism = {step: threads.get(step) or 1 for step in STEPS}
        self._pools = [ThreadPoolExecutor(count, f"micro-batch-{step}") for step, count in self.parallelism.items()]

    def __call__(self, data: Sequence[Any], context: Any) -> Sequence[Any]:
        """One answer per row of `data`. The first part's error, if any, is raised after all parts have ended."""
        started_s = time.perf_counter()
        self.parent_handler.context = context
        output = self._answer(data, context)
        elapsed_ms = (time.perf_counter() - started_s) * 1000
        context.metrics.add_time("HandlerTime", round(elapsed_ms, 2), None, "ms")
        return output

    def _answer(self, data: Sequence[Any], context: Any) -> Sequence[Any]:
        handler = self.parent_handler
        if context.get_request_header(0, "describe") == "True":
            return [handler.describe_handle()]
        if context.get_request_header(0, "explain") == "True":
            return cast(Sequence[Any], handler.explain_handle(handler.preprocess(data), data))
        size = self.micro_batch_size
        return list(chain.from_iterable(self._run([data[at : at + size] for at in range(0, len(data), size)])))

    handle = __call__

    def _run(self, parts: Sequence[Sequence[Any]]) -> list[Any]:
        first, *rest = self._pools
        running = [first.submit(self.parent_handler.preprocess, part) for part in parts]
        for pool, name in zip(rest, STEPS[1:], strict=True):
            step = getattr(self.parent_handler, name)
            running = [pool.submit(_after, step, before) for before in running]
        failures = [future.exception() for future in running]
        for failure in failures:
            if failure is not None:
                raise failure
        return [future.result() for future in running]

    def shutdown(self) -> None:
        """End the threads."""
        for pool in self._pools:
            pool.shutdown()
