"""Graphs over served models: the checks of an ensemble's tensors, the readiness of graphs, and the requests to their
steps: with tensors (ensembles), and with whole bodies (inference graphs)."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from ts.protocol.frames import Buffer, Input, Pairs
from ts_frontend.caching.tensors import LENGTH_HEADER
from ts_frontend.errors import Code, DeadlineExceeded, Ending, HandlerFailed, InvalidArgument, ServeError, Unimplemented
from ts_frontend.graphs import tensors as messages
from ts_frontend.graphs.graph import NO_GRAPH, Ensemble, Graph, Running, Step, run_through
from ts_frontend.graphs.inference_graph import ENSEMBLE, ROOT, SEQUENCE, SWITCH, InferenceGraph, RoutedStep, Router
from ts_frontend.graphs.tensors import INLINE_BYTES_MAX, Answer, Request, Tensor
from ts_frontend.job import Job
from ts_frontend.models.model import Model
from ts_frontend.models.settings import Signature, TensorSpec
from ts_frontend.scheduling.stream import chunks

#: The sets of outputs whose part of the graph is kept.
PARTS_MAX = 64
#: Finds a model by its name and version, "" for the default one; None if it isn't served.
Find = Callable[[str, str], Model | None]


class StepGone(ServeError):
    """The model of a step isn't served."""

    remedy = "Load the model of the step that the message names."
    code, http_status, type_name = Code.UNAVAILABLE, 503, "ServiceUnavailableException"


class StepFailed(ServeError):
    """A step of a graph failed. The status is that of its cause."""

    remedy = "See the cause after the step's name: it is an error of that step's model."


def step_failed(step: str, cause: ServeError) -> ServeError:
    """The error of a request whose step has failed."""
    text = f"{step}: {cause.message}"
    if isinstance(cause, HandlerFailed):
        return HandlerFailed(cause.http_status, text, cause.traceback, by_handler=cause.by_handler)
    failed = StepFailed(text)
    failed.code, failed.http_status, failed.type_name = cause.code, cause.http_status, cause.type_name
    failed.retry_after_s = cause.retry_after_s
    return failed


# --- checks


def checked_signature(
    graph: Ensemble | InferenceGraph, signature: Signature, name: str, find: Find, *, starting: bool
) -> Signature:
    """A graph's signature, decoupled if one of an ensemble's models is. Raises InvalidArgument for steps that don't fit
    together, naming the step and the tensor. `starting`: models that aren't served yet may still come."""
    what = f"{graph.what} {name!r}"
    for step, model, version in graph.models:
        found = find(model, version)
        if model == name or (found is not None and name in models_below(found, find)):
            raise InvalidArgument(f"{what}: {step} leads back to the {graph.what} itself")
        if found is None and not starting:
            named = f" version {version}" if version else ""
            raise InvalidArgument(f"{what}: {step}: model {model!r}{named} is not served")
    return signature if isinstance(graph, InferenceGraph) else _checked_tensors(graph, signature, name, find)


def _checked_tensors(ensemble: Ensemble, signature: Signature, name: str, find: Find) -> Signature:
    decoupled = ""
    for step in ensemble.steps.values():
        if (model := find(step.model, step.version)) is None:
            continue
        _check_step(ensemble, name, step, model)
        if model.signature.decoupled and decoupled:
            raise InvalidArgument(
                f"ensemble {name!r}: {decoupled} and {step.name} have decoupled models, and only one step may"
            )
        decoupled = step.name if model.signature.decoupled else decoupled
    for tensor, uses in _uses(ensemble, signature, find).items():
        (first, made), *others = uses
        for second, taken in others:
            if made.datatype != taken.datatype or not _agree(made.shape, taken.shape):
                raise InvalidArgument(
                    f"ensemble {name!r}: tensor {tensor!r}: {first} has {_shown(made)}, {second} has {_shown(taken)}"
                )
    return replace(signature, decoupled=signature.decoupled or bool(decoupled))


def models_below(model: Model, find: Find) -> set[str]:
    """The names of all models that an ensemble's requests come to; none for another model."""
    found: set[str] = set()
    left = [model]
    while left:
        for name, version in left.pop().steps:
            below = find(name, version)
            if name not in found and below is not None:
                left.append(below)
            found.add(name)
    return found


def trouble_of(graph: Ensemble | InferenceGraph, find: Find) -> str:
    """Why a graph isn't ready, "" if it is."""
    for step, name, version in graph.models:
        model = find(name, version)
        if model is None or not model.ready:
            return f"{step}: model {name!r} is not {'served' if model is None else 'ready'}"
    return ""


def _check_step(ensemble: Ensemble, name: str, step: Step, model: Model) -> None:
    label = f"ensemble {name!r}: {step.name}"
    if model.stateful:
        raise InvalidArgument(f"{label}: model {step.model!r} has sequences, which ensembles don't pass on")
    most = int((model.archive.adapter_settings.get("config") or {}).get("max_batch_size") or 0)
    if ensemble.batch_max and 0 < most < ensemble.batch_max:
        raise InvalidArgument(
            f"{label}: max_batch_size of the ensemble is {ensemble.batch_max}, that of model {step.model!r} is {most}"
        )
    if not model.signature.declared:
        return
    for kind, mapped, specs in (
        ("input", step.inputs, model.signature.inputs),
        ("output", step.outputs, model.signature.outputs),
    ):
        names = [spec.name for spec in specs]
        for one in mapped:
            if one not in names:
                raise InvalidArgument(
                    f"{label}: model {step.model!r} has no {kind} {one!r}; there are: {', '.join(names) or 'none'}"
                )
    for spec in model.signature.inputs:
        if not spec.optional and spec.name not in step.inputs:
            raise InvalidArgument(f"{label}: input_map lacks input {spec.name!r} of model {step.model!r}")


def _uses(ensemble: Ensemble, signature: Signature, find: Find) -> dict[str, list[tuple[str, TensorSpec]]]:
    """Everything that is said of each tensor, with who says it: its maker first."""
    found: dict[str, list[tuple[str, TensorSpec]]] = {}
    for spec in signature.inputs:
        found.setdefault(spec.name, []).append(("the ensemble", spec))
    models = {step.name: find(step.model, step.version) for step in ensemble.steps.values()}
    for of_output in (True, False):
        for step in ensemble.steps.values():
            if (model := models[step.name]) is None:
                continue
            mapped = step.outputs if of_output else step.inputs
            for spec in model.signature.outputs if of_output else model.signature.inputs:
                if spec.name in mapped:
                    where = f"{'output' if of_output else 'input'} {spec.name!r} of {step.name}"
                    found.setdefault(mapped[spec.name], []).append((where, spec))
    for spec in signature.outputs:
        found.setdefault(spec.name, []).append(("the ensemble", spec))
    return found


def _agree(one: Sequence[int], other: Sequence[int]) -> bool:
    return len(one) == len(other) and all(
        -1 in (size, wanted) or size == wanted for size, wanted in zip(one, other, strict=True)
    )


def _shown(spec: TensorSpec) -> str:
    return f"{spec.datatype} {list(spec.shape)}"


# --- requests


class Part(NamedTuple):
    """What a request for some of the outputs needs. `decoupled`: its decoupled step, which the graph is without, as it
    is without those that need this one: they are in `after`, and run for each of its answers."""

    graph: Graph
    decoupled: Step | None
    after: Graph
    models: Mapping[str, Model]


class EnsembleRequests:
    """Answers the requests to an ensemble. `record` gets each answered job, with the seconds that its steps waited and
    worked."""

    def __init__(
        self,
        name: str,
        version: str,
        ensemble: Ensemble,
        signature: Signature,
        find: Find,
        record: Callable[[Job, float, float], None],
    ) -> None:
        self._name, self._version = name, version
        self._ensemble = ensemble
        self._inputs = {spec.name: spec for spec in signature.inputs}
        self._declared = {spec.name: (spec.datatype, not spec.optional) for spec in signature.inputs}
        self._find = find
        self._record = record
        self._graphs: dict[frozenset[str], Graph] = {}
        self._accepted: set[tuple[str, bytes]] = set()

    async def answer(self, running: Running) -> None:
        """Answers one request. Raises ServeError."""
        job = running.job
        reading = partial(messages.read_request, job.inputs, job.request_headers, self._declared)
        request = await asyncio.to_thread(reading) if messages.is_long(job.inputs) else reading()
        self._check(request.tensors)
        part = self._part(request)
        tensors = await self._run(running, request, part, part.graph, request.tensors)
        if part.decoupled is not None:
            await self._pass_on(running, request, part, part.decoupled, tensors)
        else:
            await self._answer(running, request, tensors)
        now_s = time.monotonic()
        self._record(job, running.waited_s, max(0.0, now_s - job.queued_at_s - running.waited_s))

    async def _run(
        self, running: Running, request: Request, part: Part, graph: Graph, given: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """All tensors after the steps of `graph` have run."""
        tensors = dict(given)

        async def ask(name: str, answers: Mapping[str, Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
            available = dict(given)
            for parent in graph.parents[name]:
                available |= answers[parent]
            return await self._ask(running, request, part, name, available)

        for made in (await run_through(graph, ask)).values():
            tensors |= made
        return tensors

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises InvalidArgument unless the inputs are those of the ensemble."""
        for name, tensor in tensors.items():
            if (name, tensor.head) in self._accepted:
                continue
            spec = self._inputs.get(name)
            if spec is None:
                raise InvalidArgument(f"unexpected input {name!r}; the ensemble takes: {', '.join(self._inputs)}")
            datatype, shape = messages.declared(tensor.head)
            if datatype != spec.datatype:
                raise InvalidArgument(f"input {name!r} is of {datatype}; the ensemble takes {spec.datatype}")
            most = self._ensemble.batch_max
            if most and shape and shape[0] > most:
                raise InvalidArgument(f"input {name!r} is a batch of {shape[0]}; max_batch_size is {most}")
            if -1 in shape or not _agree(shape, spec.shape):
                raise InvalidArgument(f"input {name!r} has shape {list(shape)}; the ensemble takes {list(spec.shape)}")
            if len(self._accepted) < messages.HEADS_MAX and len(tensor.head) <= messages.HEAD_BYTES_MAX:
                self._accepted.add((name, tensor.head))
        for name, spec in self._inputs.items():
            if name not in tensors and not spec.optional:
                raise InvalidArgument(f"input {name!r} is missing; the ensemble takes: {', '.join(self._inputs)}")

    def _part(self, request: Request) -> Part:
        ensemble = self._ensemble
        for name in request.asked:
            if name not in ensemble.outputs:
                raise InvalidArgument(
                    f"unexpected inference output {name!r}; the ensemble gives: {', '.join(ensemble.outputs)}"
                )
        wanted = frozenset(request.asked or ensemble.outputs)
        graph = self._graphs.get(wanted)
        if graph is None:
            graph = ensemble.graph.up_to({ensemble.makers[name] for name in wanted})
            if len(self._graphs) < PARTS_MAX:
                self._graphs[wanted] = graph
        models, decoupled = {}, None
        for name in graph.parents:
            step = ensemble.steps[name]
            model = self._find(step.model, step.version)
            if model is None:
                raise self._failed(name, StepGone(f"model {step.model!r} is not served"))
            models[name] = model
            if model.signature.decoupled:
                decoupled = step
        after = graph.below(decoupled.name) if decoupled is not None else NO_GRAPH
        if decoupled is not None:
            graph = graph.without({decoupled.name, *after.parents})
        return Part(graph, decoupled, after, models)

    async def _ask(
        self, running: Running, request: Request, part: Part, name: str, available: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        step, model = self._ensemble.steps[name], part.models[name]
        try:
            job = self._submit(running, request, part, step, available)
            pieces = await job.pieces()
            if job.sent_at_s:
                running.waited_s += job.sent_at_s - job.queued_at_s
            if len(pieces) != 1:
                raise InvalidArgument(f"model {model.name!r} gave {len(pieces)} answers where a step has one")
            return self._made(step, pieces[0]).tensors
        except DeadlineExceeded:
            raise
        except ServeError as error:
            raise self._failed(name, error) from None

    def _failed(self, step: str, error: ServeError) -> ServeError:
        return step_failed(f"in ensemble {self._name!r}, {step}", error)

    def _submit(
        self, running: Running, request: Request, part: Part, step: Step, available: Mapping[str, Tensor]
    ) -> Job:
        model, job, stream = part.models[step.name], running.job, step is part.decoupled
        given = []
        for name, tensor in step.inputs.items():
            if tensor in available:
                given.append((name, available[tensor]))
            elif _is_required(model, name):
                maker = self._ensemble.makers.get(tensor)
                who = f"{maker} hasn't made" if maker else "the request doesn't have"
                raise InvalidArgument(f"its input {name!r} is tensor {tensor!r}, which {who}")
        inputs = messages.step_inputs(model.name, request, given, self._asked(step, request, part), stream=stream)
        return model.submit(
            inputs,
            headers=job.request_headers,
            deadline_s=job.deadline_s,
            request_id=job.request_id,
            stream=stream,
            version_named=bool(step.version),
        )

    def _asked(self, step: Step, request: Request, part: Part) -> Iterator[tuple[str, bytes]]:
        """The outputs to ask for. The client's wishes for one, such as a region of shared memory, go with it."""
        for name, tensor in step.outputs.items():
            wish = request.asked.get(tensor, b"")
            if wish and any(tensor in self._ensemble.steps[user].inputs.values() for user in part.models):
                raise InvalidArgument(
                    f"output {tensor!r} is the input of a further step: it can't be asked for with parameters"
                )
            yield name, wish

    def _made(self, step: Step, data: Buffer) -> Answer:
        """A step's answer, its tensors by their names in the ensemble."""
        found = messages.read_answer(data)
        mapped = {step.outputs[name]: tensor for name, tensor in found.tensors.items() if name in step.outputs}
        return found._replace(tensors=mapped)

    # --- the client's answer

    def _written(self, request: Request, found: Answer) -> bytes:
        return messages.written(self._name, self._version, request, found.tensors, found.parameters)

    async def _answer(self, running: Running, request: Request, tensors: Mapping[str, Tensor]) -> None:
        wanted: Collection[str] = request.asked or self._ensemble.outputs
        missing = [name for name in wanted if name not in tensors]
        if missing:
            maker = self._ensemble.makers[missing[0]]
            raise StepFailed(f"in ensemble {self._name!r}, {maker} has not made output {missing[0]!r}")
        whole = self._written(request, Answer({name: tensors[name] for name in wanted}, b""))
        writing = partial(messages.in_form, whole, request)
        if messages.is_rewritten(request) and len(whole) > messages.INLINE_BYTES_MAX:
            body, headers = await asyncio.to_thread(writing)
        else:
            body, headers = writing()
        running.answer(body, headers)

    async def _pass_on(
        self, running: Running, request: Request, part: Part, step: Step, tensors: Mapping[str, Tensor]
    ) -> None:
        """Passes the answers of a decoupled step on as they come, each after the steps that need it have run."""
        try:
            job = self._submit(running, request, part, step, tensors)
        except ServeError as error:
            raise self._failed(step.name, error) from None
        async with aclosing(self._pieces(step, job)) as pieces:
            async for piece in pieces:
                before, inner = messages.split_streamed(piece, request)
                if inner is None:
                    await running.send(*messages.joined_streamed(before, None, request))
                    continue
                found = self._made(step, inner)
                if found.tensors:  # the mark of the end has none
                    given = {**tensors, **found.tensors}
                    made = await self._run(running, request, part, part.after, given)
                    wanted: Collection[str] = request.asked or self._ensemble.outputs
                    found = found._replace(tensors={name: made[name] for name in wanted if name in made})
                await running.send(*messages.joined_streamed(before, self._written(request, found), request))
        running.waited_s += job.sent_at_s - job.queued_at_s
        running.answer(b"")

    async def _pieces(self, step: Step, job: Job) -> AsyncGenerator[Buffer, None]:
        try:
            async with aclosing(chunks(job)) as lists:
                async for ready in lists:
                    for piece in ready:
                        if len(piece):
                            yield piece
        except DeadlineExceeded:
            raise
        except ServeError as error:
            raise self._failed(step.name, error) from None


def _is_required(model: Model, name: str) -> bool:
    return any(spec.name == name and not spec.optional for spec in model.signature.inputs)


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
