"""One request's way through a graph: order, data, retries, timeouts, failures and cancels."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from support import GUARD_S
from ts.protocol.frames import Input
from ts_frontend.errors import (
    Cancelled,
    DeadlineExceeded,
    HandlerFailed,
    ModelNotFound,
    ServeError,
)
from ts_frontend.graphs.graph import make_graph
from ts_frontend.workflows.manager import NodeFailed, Reply, Run
from ts_frontend.workflows.specification import Node

HEADERS = (("x-a", "1"),)


class FakeJob:
    def __init__(self, answer: Awaitable[bytes], status: int = 200) -> None:
        self.status, self.headers = status, ()
        self._task = asyncio.ensure_future(answer)
        self.cancelled = False

    async def result(self) -> bytes:
        try:
            return await asyncio.shield(self._task)
        except asyncio.CancelledError:
            if self.cancelled:
                raise Cancelled("cancelled") from None
            self.cancel()
            raise

    def cancel(self) -> None:
        self.cancelled = True
        self._task.cancel()


class Models:
    """Models by node; `behave[node]` answers a call, `log` has all of them."""

    def __init__(self, **behave: Callable[..., Awaitable[bytes]]) -> None:
        self.behave = behave
        self.log: list[tuple[str, dict[str, bytes], Any, float]] = []
        self.jobs: list[tuple[str, FakeJob]] = []
        self.statuses: dict[str, int] = {}
        self.gone: set[str] = set()
        self.refusals: dict[str, ServeError] = {}

    def find(self, name: str) -> Any:
        if name in self.gone:
            raise ModelNotFound(f"w__{name}")
        models = self

        class Served:
            def submit(
                self, inputs: Sequence[Input], *, headers: Any, deadline_s: float, request_id: str | None
            ) -> FakeJob:
                models.log.append((name, {i.name: bytes(i.data) for i in inputs}, (headers, request_id), deadline_s))
                if name in models.refusals:
                    raise models.refusals[name]
                answer = models.behave.get(name, answers(name.upper().encode()))
                job = FakeJob(answer(), models.statuses.get(name, 200))
                models.jobs.append((name, job))
                return job

        return Served()

    def calls(self, name: str) -> int:
        return sum(entry[0] == name for entry in self.log)


def answers(body: bytes) -> Callable[[], Awaitable[bytes]]:
    async def answer() -> bytes:
        return body

    return answer


def fails(*errors: ServeError) -> Callable[[], Awaitable[bytes]]:
    """Fails with each of these in turn, then answers."""
    left = list(errors)

    async def answer() -> bytes:
        if left:
            raise left.pop(0)
        return b"at last"

    return answer


async def never() -> bytes:
    await asyncio.Event().wait()
    raise AssertionError


def node(name: str, retries: int = 0, timeout_ms: int = 60_000) -> Node:
    return Node(name, f"{name}.mar", 1, 1, 1, 0, False, retries, timeout_ms)


def run(
    models: Models, edges: dict[str, list[str]], *, retries: int = 0, timeout_ms: int = 60_000, **more: Any
) -> dict[str, Reply]:
    graph = make_graph(edges)
    nodes = {name: node(name, retries, timeout_ms) for name in graph.children}

    async def main() -> dict[str, Reply]:
        way = Run(graph, nodes, models.find, headers=HEADERS, request_id="r", **more)
        replies = await asyncio.wait_for(way.leaves([Input("body", "text/plain", b"x")]), GUARD_S)
        assert len(asyncio.all_tasks()) == 1
        return replies

    return asyncio.run(main())


UNEXPECTED = HandlerFailed(503, "Prediction failed", by_handler=True)


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_a_node_is_tried_again_as_often_as_it_may(retries: int) -> None:
    models = Models(a=fails(*[UNEXPECTED] * 3))
    if retries < 3:
        with pytest.raises(NodeFailed):
            run(models, {"a": []}, retries=retries)
    else:
        assert run(models, {"a": []}, retries=retries)["a"].body == b"at last"
    assert models.calls("a") == retries + 1


def test_each_attempt_has_its_own_time() -> None:
    models = Models(a=never)
    before = time.monotonic()
    with pytest.raises(NodeFailed, match=r"no answer within 20 ms \(timeout-ms\) \(3 attempts\)") as failed:
        run(models, {"a": []}, retries=2, timeout_ms=20)
    assert failed.value.http_status == 504
    assert time.monotonic() - before >= 0.055
    deadlines = [entry[3] for entry in models.log]
    assert deadlines == sorted(deadlines) and len(set(deadlines)) == 3
    assert all(job.cancelled for _, job in models.jobs)


def test_the_deadline_of_all_is_that_of_each_and_ends_the_attempts() -> None:
    models = Models(b=never)
    deadline_s = time.monotonic() + 0.05
    with pytest.raises(NodeFailed) as failed:
        run(models, {"a": ["b"]}, retries=100, deadline_s=deadline_s)
    assert failed.value.http_status == 504
    assert models.calls("b") <= 2
    assert all(entry[3] <= deadline_s + 0.001 for entry in models.log) and deadline_s < math.inf


def test_a_job_that_expired_by_itself_says_why() -> None:
    with pytest.raises(NodeFailed, match="Error executing a: client is out of time"):
        run(Models(a=fails(DeadlineExceeded("client is out of time"))), {"a": []})


def test_a_model_that_was_unregistered_by_hand() -> None:
    models = Models()
    models.gone.add("b")
    with pytest.raises(NodeFailed, match="Error executing b: Model not found: w__b; it was unregistered") as failed:
        run(models, {"a": ["b"]}, retries=3)
    assert failed.value.http_status == 503
