"""A registered workflow: its archive, its nodes' models, and the requests in progress."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ts.protocol.frames import Buffer, Input, Pairs
from ts_frontend.errors import (
    Cancelled,
    Code,
    DeadlineExceeded,
    Draining,
    HandlerFailed,
    ModelNotFound,
    NoWorker,
    QueueFull,
    ServeError,
    WorkflowFailed,
)
from ts_frontend.graphs.graph import Graph, run_through
from ts_frontend.models.archive import Archive
from ts_frontend.models.manager import ModelManager
from ts_frontend.models.model import Model
from ts_frontend.models.settings import Requested
from ts_frontend.models.store.store import Fetched
from ts_frontend.workflows.specification import Node, WorkflowArchive

log = logging.getLogger(__name__)


class Reply(NamedTuple):
    """A node's answer."""

    status: int
    headers: Pairs
    body: Buffer


class NodeFailed(ServeError):
    """A node of a workflow failed. The status is that of its cause; 500 for an exception of the handler."""

    remedy = "Fix the node's handler that the message names."

    def __init__(self, node: str, cause: ServeError, attempts: int) -> None:
        text = f"Error executing {node}"
        if isinstance(cause, HandlerFailed) and cause.by_handler:
            super().__init__(f"{text}: {cause.message}")
            return
        tries = f" ({attempts} attempts)" if attempts > 1 else ""
        super().__init__(f"{text}: {cause.message}{tries}")
        self.code, self.http_status, self.type_name = cause.code, cause.http_status, cause.type_name
        self.retry_after_s = cause.retry_after_s


class NodeGone(ServeError):
    """A node's model was unregistered separately."""

    remedy = "Register the workflow again: the model of a node was unregistered."
    code, http_status, type_name = Code.UNAVAILABLE, 503, "ServiceUnavailableException"


class Run:
    """One request's run through the graph. `find`: returns the model of a node's name. `deadline_s`: in
    `time.monotonic()` seconds, for the whole run."""

    def __init__(
        self,
        graph: Graph,
        nodes: Mapping[str, Node],
        find: Callable[[str], Model],
        *,
        headers: Pairs,
        request_id: str | None,
        deadline_s: float = math.inf,
    ) -> None:
        self._graph = graph
        self._nodes = nodes
        self._find = find
        self._headers = headers
        self._request_id = request_id
        self._deadline_s = deadline_s

    async def leaves(self, inputs: Sequence[Input]) -> dict[str, Reply]:
        """The answers of the nodes without children, in the graph's order. Failures end it as in `run_through`."""

        async def ask(name: str, replies: Mapping[str, Reply]) -> Reply:
            return await self._answer(self._nodes[name], self._inputs(name, replies) or inputs)

        replies = await run_through(self._graph, ask)
        return {name: replies[name] for name in self._graph.leaves}

    def _inputs(self, name: str, replies: Mapping[str, Reply]) -> list[Input]:
        parents = self._graph.parents[name]
        names = parents if len(parents) > 1 else ("body",) * len(parents)
        return [Input(key, "", replies[parent].body) for key, parent in zip(names, parents, strict=True)]

    # --- one node

    async def _answer(self, node: Node, inputs: Sequence[Input]) -> Reply:
        attempt = 0
        while True:
            attempt += 1
            try:
                return await self._attempt(node, inputs)
            except ServeError as error:
                if attempt > node.retry_attempts or not self._may_pass(error):
                    log.warning("Workflow node %s failed, attempt %d: %s", node.name, attempt, error.message)
                    raise NodeFailed(node.name, error, attempt) from error
                log.info("Workflow node %s is tried again after attempt %d: %s", node.name, attempt, error.message)

    def _may_pass(self, error: ServeError) -> bool:
        """Whether another attempt may succeed: not for an invalid request, or without a model for it."""
        if isinstance(error, (NodeGone, NoWorker, QueueFull, Draining)) or 400 <= error.http_status < 500:
            return False
        return time.monotonic() < self._deadline_s

    async def _attempt(self, node: Node, inputs: Sequence[Input]) -> Reply:
        loop = asyncio.get_running_loop()
        left_s = max(0.0, min(node.timeout_ms / 1000, self._deadline_s - time.monotonic()))
        deadline_s = time.monotonic() + left_s
        job = self._model(node).submit(
            inputs, headers=self._headers, deadline_s=deadline_s, request_id=self._request_id
        )
        late = False

        def expire() -> None:
            nonlocal late
            late = True
            job.cancel()

        timer = loop.call_later(left_s, expire)
        try:
            body = await job.result()
        except (Cancelled, DeadlineExceeded):
            if late or time.monotonic() >= deadline_s:
                raise DeadlineExceeded(f"no answer within {node.timeout_ms} ms (timeout-ms)") from None
            raise
        finally:
            timer.cancel()
        if job.status >= 400 and self._graph.leaves != (node.name,):
            raise HandlerFailed(job.status, f"its handler answered with status {job.status}")
        return Reply(job.status, job.headers, body)

    def _model(self, node: Node) -> Model:
        try:
            return self._find(node.name)
        except ModelNotFound as error:
            raise NodeGone(
                f"{error.message}; it was unregistered. Unregister the workflow and register it again."
            ) from None


class Timeouts(NamedTuple):
    """The register call's timeouts for all models, in seconds; None is unset."""

    response_s: int | None = None
    startup_s: int | None = None


class Workflow:
    """A registered workflow. `find` returns a model by its name."""

    def __init__(
        self,
        name: str,
        fetched: Fetched,
        archive: WorkflowArchive,
        timeouts: Timeouts,
        find: Callable[[str], Model],
    ) -> None:
        self.name = name
        self.fetched = fetched
        self.archive = archive
        self.timeouts = timeouts
        self._find = find
        self._runs = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._leaving = False

    def model_name(self, node: str) -> str:
        return f"{self.name}__{node}"

    def node_model(self, node: str) -> Model:
        return self._find(self.model_name(node))

    async def predict(self, inputs: Sequence[Input], *, headers: Pairs, request_id: str | None) -> dict[str, Reply]:
        """The answers of the last nodes. Raises NodeFailed, Draining; a cancelled caller cancels all requests."""
        if self._leaving:
            raise Draining(f'Workflow "{self.name}" is being unregistered')
        spec = self.archive.spec
        self._runs += 1
        self._idle.clear()
        try:
            run = Run(spec.graph, spec.nodes, self.node_model, headers=headers, request_id=request_id)
            return await run.leaves(inputs)
        finally:
            self._runs -= 1
            if not self._runs:
                self._idle.set()

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for those in progress; False after `timeout_s`."""
        self._leaving = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True


FUNCTION_VERSION = "1.0"
Fetch = Callable[[Node], Awaitable[Fetched]]


async def add_nodes(workflow: Workflow, models: ModelManager, fetch: Fetch) -> None:
    """Registers every node's model, without workers yet. Raises WorkflowFailed if some fail; the others stay
    registered.

    `fetch` finds a node's archive. Nodes of the same URL share one fetched archive.
    """
    sharing: dict[str | None, list[Node]] = {}
    for node in workflow.archive.spec.nodes.values():
        sharing.setdefault(node.url, []).append(node)
    functions = [_add_function(workflow, node, models) for node in sharing.pop(None, [])]
    archives = [_add_archives(workflow, nodes, models, fetch) for nodes in sharing.values()]
    await _all(workflow, [*functions, *archives])


async def start_nodes(workflow: Workflow, models: ModelManager) -> None:
    """Starts the workers of all nodes. Raises WorkflowFailed."""
    await _all(workflow, [_start(model, models) for model in models_of(workflow, models)])


async def remove_nodes(workflow: Workflow, models: ModelManager, drain_s: float, *, own: bool = False) -> bool:
    """Removes all models registered under the names of the nodes, including versions registered by hand, or only its
    `own` ones. Returns False if not all accepted requests were answered within `drain_s`."""
    leaving = [model for model in models_of(workflow, models) if model.workflow or not own]
    return all(await asyncio.gather(*(models.retire(model, drain_s) for model in leaving)))


def models_of(workflow: Workflow, models: ModelManager) -> list[Model]:
    names = {workflow.model_name(node) for node in workflow.archive.spec.nodes}
    return [model for model in models.registry if model.name in names]


async def _all(workflow: Workflow, work: Sequence[Awaitable[None]]) -> None:
    """Runs all `work` concurrently. Raises WorkflowFailed, which names all failures and has the status of the first."""
    results = await asyncio.gather(*work, return_exceptions=True)
    failures = [result for result in results if isinstance(result, ServeError)]
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, ServeError):
            raise result
    if failures:
        texts = ", ".join(failure.message for failure in failures)
        failed = WorkflowFailed(f"Workflow {workflow.name} has failed to register. Failures: [{texts}]")
        failed.http_status, failed.code = failures[0].http_status, failures[0].code
        raise failed


def _node_error(name: str, error: ServeError) -> ServeError:
    failed = WorkflowFailed(f"Workflow Node {name} failed to register. Details: {error.message}")
    failed.http_status, failed.code = error.http_status, error.code
    return failed


async def _add_archives(workflow: Workflow, nodes: Sequence[Node], models: ModelManager, fetch: Fetch) -> None:
    """Registers the nodes of one URL: the first one owns a downloaded archive and deletes it with its model."""
    fetched: Fetched | None = None
    for node in nodes:
        name = workflow.model_name(node.name)
        try:
            if fetched is None:
                fetched = await fetch(node)
                own = fetched
            else:
                own = replace(fetched, downloaded=False)
            model = await models.add(await models.build(own, _requested(workflow, node), loaded_at_startup=False))
        except ServeError as error:
            raise _node_error(name, error) from error
        model.workflow = workflow.name


async def _add_function(workflow: Workflow, node: Node, models: ModelManager) -> None:
    """Registers a function of the handler file as a model without URL, with the workflow's files."""
    archive = workflow.archive
    files = Archive(
        archive.dir,
        name=workflow.model_name(node.name),
        version=FUNCTION_VERSION,
        manifest={"model": {"modelName": workflow.model_name(node.name), "modelVersion": FUNCTION_VERSION}},
        handler=f"{archive.handler}:{node.name}",
    )
    fetched = Fetched(workflow.fetched.path, "", downloaded=False)
    try:
        model = await models.add(
            await models.build(fetched, _requested(workflow, node), files, loaded_at_startup=False)
        )
    except ServeError as error:
        raise _node_error(files.name or node.name, error) from error
    model.workflow = workflow.name


def _requested(workflow: Workflow, node: Node) -> Requested:
    """The node's settings as a register call's; max-workers is the number of workers, as in TorchServe."""
    return Requested(
        model_name=workflow.model_name(node.name),
        batch_size=node.batch_size,
        max_batch_delay_ms=node.max_batch_delay_ms if node.max_batch_delay_set else None,
        initial_workers=node.max_workers,
        response_timeout_s=workflow.timeouts.response_s,
        startup_timeout_s=workflow.timeouts.startup_s,
    )


async def _start(model: Model, models: ModelManager) -> None:
    try:
        await models.start_workers(model)
    except ServeError as error:
        raise _node_error(model.name, error) from error
