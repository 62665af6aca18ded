"""Micro-batching: the steps of a batch's parts overlap."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from itertools import chain
from queue import SimpleQueue
from typing import Any, NamedTuple, cast

from ts.handler_utils.utils import is_asked

STEPS = ("preprocess", "inference", "postprocess")
#: The pause between two checks whether a thread of a step has ended.
JOIN_S = 0.01


class _Part(NamedTuple):
    """A part of a batch in progress: its position, the result of the last step, and the future of its result."""

    place: int
    value: Any
    outcome: Future[Any]


def _work(
    name: str, handler: Any, taken: SimpleQueue[_Part | None], after: SimpleQueue[_Part | None] | None, own: Any
) -> None:
    """Runs a step in its thread, until it takes None. `after`: the next step's queue, `own` is local to threads."""
    while (part := taken.get()) is not None:
        own.micro_batch_idx = part.place
        try:
            value = getattr(handler, name)(part.value)
        except BaseException as error:  # it is raised where the batch is awaited
            part.outcome.set_exception(error)
            continue
        if after is None:
            part.outcome.set_result(value)
        else:
            after.put(part._replace(value=value))


class MicroBatching:
    """In place of a handler's `handle`: `self.handle = MicroBatching(self, micro_batch_size=4)`.

    A batch is cut in parts of `micro_batch_size`, which go through preprocess, inference and postprocess one after the
    other; each step has its own `parallelism[step]` threads (default 1), so that one part is preprocessed while another
    is in the model. Answers keep the requests' order.
    """

    def __init__(
        self, parent_handler: Any, micro_batch_size: int = 1, parallelism: Mapping[str, int] | None = None
    ) -> None:
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size must be at least 1, not {micro_batch_size}")
        self.parent_handler = self.handler = parent_handler
        self.micro_batch_size = micro_batch_size
        self.thread_groups: dict[str, list[threading.Thread]] = {step: [] for step in STEPS}
        self.thread_local_data = threading.local()
        self._queues: dict[str, SimpleQueue[_Part | None]] = {step: SimpleQueue() for step in STEPS}
        self._parallelism = dict.fromkeys(STEPS, 1)
        self.parallelism = dict(parallelism or {})

    @property
    def parallelism(self) -> dict[str, int]:
        """Threads by step."""
        return dict(self._parallelism)

    @parallelism.setter
    def parallelism(self, parallelism: Mapping[str, int]) -> None:
        """Sets the numbers of threads of the given steps. Raises ValueError for unknown steps."""
        unknown = parallelism.keys() - set(STEPS)
        if unknown:
            raise ValueError(f"parallelism of {', '.join(sorted(unknown))}: the steps are {', '.join(STEPS)}")
        self._parallelism.update({step: count or 1 for step, count in parallelism.items()})
        for number, step in enumerate(STEPS):
            following = self._queues[STEPS[number + 1]] if number + 1 < len(STEPS) else None
            self._set_threads(step, self._parallelism[step], following)

    def _set_threads(self, step: str, count: int, following: SimpleQueue[_Part | None] | None) -> None:
        """Sets the number of a step's threads. A surplus thread, any of them, ends after its current part."""
        group, taken = self.thread_groups[step], self._queues[step]
        surplus = len(group) - count
        for _ in range(surplus):
            taken.put(None)
        while len(group) > count:
            group[:] = [thread for thread in group if thread.is_alive()]
            if len(group) > count:
                group[0].join(JOIN_S)
        for _ in range(count - len(group)):
            thread = threading.Thread(
                target=_work,
                args=(step, self.handler, taken, following, self.thread_local_data),
                name=f"micro-batch-{step}",
                daemon=True,
            )
            thread.start()
            group.append(thread)

    def get_micro_batch_idx(self) -> int | None:
        """In a step, the index of its part of the batch, from 0; elsewhere None."""
        index: int | None = getattr(self.thread_local_data, "micro_batch_idx", None)
        return index

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
        if is_asked(context, "describe"):
            return [handler.describe_handle()]
        if is_asked(context, "explain"):
            return cast(Sequence[Any], handler.explain_handle(handler.preprocess(data), data))
        return self._in_parts(data)

    def _in_parts(self, data: Sequence[Any]) -> Sequence[Any]:
        size = self.micro_batch_size
        parts = [_Part(index, data[at : at + size], Future()) for index, at in enumerate(range(0, len(data), size))]
        for part in parts:
            self._queues[STEPS[0]].put(part)
        failures = [part.outcome.exception() for part in parts]
        for failure in failures:
            if failure is not None:
                raise failure
        return list(chain.from_iterable(part.outcome.result() for part in parts))

    def handle(self, data: Sequence[Any], context: Any = None) -> Sequence[Any]:
        """Without a `context`, the answers without metrics; with one, the same as a call."""
        return self._in_parts(data) if context is None else self(data, context)

    def shutdown(self) -> None:
        for step, group in self.thread_groups.items():
            for _ in group:
                self._queues[step].put(None)
        for group in self.thread_groups.values():
            while group:
                group.pop().join()
