"""Inference graphs over served models: the requests to their steps, with whole bodies."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ts.protocol.frames import Buffer, Input, Pairs
from ts_frontend.caching.tensors import LENGTH_HEADER
from ts_frontend.errors import DeadlineExceeded, Ending, HandlerFailed, InvalidArgument, ServeError, Unimplemented
from ts_frontend.graphs.graph import Graph, Running, run_through
from ts_frontend.graphs.inference_graph import ENSEMBLE, ROOT, SEQUENCE, SWITCH, InferenceGraph, RoutedStep, Router
from ts_frontend.graphs.tensors import INLINE_BYTES_MAX
from ts_frontend.job import Job
from ts_frontend.models.ensembles import Find, StepGone, step_failed


class Reply(NamedTuple):
    """The answer of a step. `error`: what a failed step's request ended with, its `body` says it in JSON."""

    status: int
    headers: Pairs
    body: Buffer
    error: Ending | None = None

    @property
    def failed(self) -> bool:
        return not 200 <= self.status < 300


class GraphRequests:
    """Answers the requests to an inference graph. `record`: as of `EnsembleRequests`."""

    def __init__(
        self, name: str, graph: InferenceGraph, find: Find, record: Callable[[Job, float, float], None]
    ) -> None:
        self._name, self._graph = name, graph
        self._find = find
        self._record = record

    async def answer(self, running: Running) -> None:
        """Answers one request. Raises ServeError."""
        job = running.job
        given = job.inputs[-1] if job.inputs else Input("body", "", b"")
        if given.content_type.startswith("\0") and given.content_type not in ("\0json", "\0v1"):
            raise Unimplemented("An inference graph is asked over HTTP, without streams")
        begin = Reply(200, (), given.data)
        reply = await self._node(running, ROOT, begin)
        if reply.error is not None:
            raise reply.error.error()
        own = [(key, value) for key, value in reply.headers if key.lower() != "content-length"]
        running.answer(bytes(reply.body), own, reply.status)
        self._record(job, running.waited_s, max(0.0, time.monotonic() - job.queued_at_s - running.waited_s))

    # --- nodes

    async def _node(self, running: Running, name: str, request: Reply) -> Reply:
        node = self._graph.nodes[name]
        if node.kind == SEQUENCE:
            return await self._sequence(running, name, node, request)
        if node.kind == ENSEMBLE:
            return await self._ensemble(running, name, node, request)
        if node.kind == SWITCH:
            value = await _json(request.body, f"node {name}")
            step = next((one for one in node.steps if one.condition and one.condition.holds(value)), None)
            if step is None:
                error = HandlerFailed(404, f"in inference graph {self._name!r}, node {name}: no condition holds")
                return _failed(error)
        else:
            (step,) = random.choices(node.steps, [one.weight for one in node.steps])
        return await self._step(running, name, step, request)

    async def _sequence(self, running: Running, name: str, node: Router, request: Reply) -> Reply:
        reply = request
        for number, step in enumerate(node.steps):
            if step.condition is not None and number and not step.condition.holds(await _json(reply.body, step.name)):
                return reply
            reply = await self._step(running, name, step, reply if step.of_response and number else request)
            if step.hard and reply.failed:
                return reply
        return reply

    async def _ensemble(self, running: Running, name: str, node: Router, request: Reply) -> Reply:
        steps = {step.name: step for step in node.steps}
        apart: dict[str, tuple[str, ...]] = dict.fromkeys(steps, ())

        async def ask(step: str, replies: Mapping[str, Reply]) -> Reply:
            reply = await self._step(running, name, steps[step], request)
            if steps[step].hard and reply.failed:
                raise _HardFailure(reply)
            return reply

        try:
            replies = await run_through(Graph(apart, apart), ask)
        except _HardFailure as failure:
            return failure.reply
        parts = []
        for step in steps:
            await _json(replies[step].body, f"node {name}, step {step}")  # each answer is put in as it is
            parts.append(json.dumps(step).encode() + b":" + bytes(replies[step].body))
        return Reply(200, [("content-type", "application/json")], b"{" + b",".join(parts) + b"}")

    async def _step(self, running: Running, node: str, step: RoutedStep, request: Reply) -> Reply:
        if step.node:
            return await self._node(running, step.node, request)
        try:
            return await self._ask(running, step, request)
        except DeadlineExceeded:
            raise
        except ServeError as error:
            return _failed(step_failed(f"in inference graph {self._name!r}, node {node}, step {step.name}", error))

    async def _ask(self, running: Running, step: RoutedStep, request: Reply) -> Reply:
        job, model = running.job, self._find(step.model, "")
        if model is None:
            raise StepGone(f"model {step.model!r} is not served")
        given, headers = job.inputs[-1], job.request_headers
        if request.body is not given.data:  # an earlier step's answer
            headers = [pair for pair in headers if pair[0].lower() != LENGTH_HEADER]
            headers += [pair for pair in request.headers if pair[0].lower() == LENGTH_HEADER]
        content_type = given.content_type
        if model.adapter or model.is_language_model or content_type.startswith("\0"):
            known = {"v1": "\0v1", "v2": "\0json"}.get(step.protocol)
            content_type = known or (content_type if content_type.startswith("\0") else _form_of(request.body))
        asked = model.submit(
            [*job.inputs[:-1], Input(given.name, content_type, request.body)],
            headers=headers,
            deadline_s=job.deadline_s,
            request_id=job.request_id,
        )
        body = await asked.result()
        if asked.sent_at_s:
            running.waited_s += asked.sent_at_s - asked.queued_at_s
        return Reply(asked.status, asked.headers, body)


class _HardFailure(ServeError):
    """A step of an Ensemble has failed that may not."""

    remedy = StepGone.remedy

    def __init__(self, reply: Reply) -> None:
        super().__init__("a step has failed")
        self.reply = reply


def _failed(error: ServeError) -> Reply:
    body = json.dumps({"error": error.message}).encode()
    return Reply(error.http_status, [("content-type", "application/json")], body, error.ending())


def _form_of(body: Buffer) -> str:
    """The form of a body for a model that takes tensors: the second version of the protocol has `inputs`."""
    return "\0json" if b'"inputs"' in bytes(body[:INLINE_BYTES_MAX]) else "\0v1"


async def _json(body: Buffer, where: str) -> Any:
    try:
        data = bytes(body)
        return json.loads(data) if len(data) <= INLINE_BYTES_MAX else await asyncio.to_thread(json.loads, data)
    except (ValueError, RecursionError):
        raise InvalidArgument(f"{where}: a condition and an Ensemble need JSON") from None
