"""Workflows while the server runs: their archives, their nodes' models and the requests in progress; register, list,
describe, unregister."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ts.protocol.frames import Buffer, Input, Pairs
from ts_frontend.config.snapshot import NodeState, WorkflowState
from ts_frontend.errors import (
    ArchiveNotFound,
    Cancelled,
    Code,
    DeadlineExceeded,
    Draining,
    HandlerFailed,
    ModelExists,
    ModelNotFound,
    NoWorker,
    QueueFull,
    ServeError,
    WorkflowExists,
    WorkflowFailed,
    WorkflowNotFound,
)
from ts_frontend.graphs.graph import Graph, run_through
from ts_frontend.models.archive import Archive, ExtractLimits
from ts_frontend.models.manager import LIST_LIMIT, ModelManager, Outcome, page
from ts_frontend.models.model import Model
from ts_frontend.models.settings import Requested, check_name
from ts_frontend.models.startup import kept_in_store, snapshot_failure
from ts_frontend.models.store.store import Fetched, ModelStore
from ts_frontend.tasks import in_thread, side_by_side, undone_on_failure
from ts_frontend.workflows.specification import Node, WorkflowArchive, open_workflow

log = logging.getLogger(__name__)


class Reply(NamedTuple):
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


@dataclass(eq=False)
class Run:
    """One request's run through the graph. `find`: returns the model of a node's name. `deadline_s`: in
    `time.monotonic()` seconds, for the whole run."""

    graph: Graph
    nodes: Mapping[str, Node]
    find: Callable[[str], Model]
    _: KW_ONLY
    headers: Pairs
    request_id: str | None
    deadline_s: float = math.inf

    async def leaves(self, inputs: Sequence[Input]) -> dict[str, Reply]:
        """The answers of the nodes without children, in the graph's order. Failures end it as in `run_through`."""

        async def ask(name: str, replies: Mapping[str, Reply]) -> Reply:
            return await self._answer(self.nodes[name], self._inputs(name, replies) or inputs)

        replies = await run_through(self.graph, ask)
        return {name: replies[name] for name in self.graph.leaves}

    def _inputs(self, name: str, replies: Mapping[str, Reply]) -> list[Input]:
        parents = self.graph.parents[name]
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
        return time.monotonic() < self.deadline_s

    async def _attempt(self, node: Node, inputs: Sequence[Input]) -> Reply:
        loop = asyncio.get_running_loop()
        left_s = max(0.0, min(node.timeout_ms / 1000, self.deadline_s - time.monotonic()))
        deadline_s = time.monotonic() + left_s
        job = self._model(node).submit(inputs, headers=self.headers, deadline_s=deadline_s, request_id=self.request_id)
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
        if job.status >= 400 and self.graph.leaves != (node.name,):
            raise HandlerFailed(job.status, f"its handler answered with status {job.status}")
        return Reply(job.status, job.headers, body)

    def _model(self, node: Node) -> Model:
        try:
            return self.find(node.name)
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
        self, name: str, fetched: Fetched, archive: WorkflowArchive, timeouts: Timeouts, find: Callable[[str], Model]
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


@dataclass(eq=False)
class WorkflowManager:
    """Manages workflows. `models`: serves the nodes; `model_store`: has the nodes' archives, `workflow_store` those of
    workflows. `on_change`: called after each change that a restart should restore."""

    models: ModelManager
    model_store: ModelStore
    workflow_store: ModelStore
    _: KW_ONLY
    work_dir: Path
    extract_limits: ExtractLimits
    unregister_timeout_s: float
    on_change: Callable[[], None]
    _workflows: dict[str, Workflow] = field(default_factory=dict, init=False)
    _arriving: set[str] = field(default_factory=set, init=False)

    def __iter__(self) -> Iterator[Workflow]:
        return iter([self._workflows[name] for name in sorted(self._workflows)])

    def find(self, name: str) -> Workflow:
        try:
            return self._workflows[name]
        except KeyError:
            raise WorkflowNotFound(f"Workflow not found: {name}") from None

    # --- register

    async def register(
        self,
        url: str,
        *,
        workflow_name: str | None = None,
        response_timeout: int | None = None,
        startup_timeout: int | None = None,
    ) -> Outcome:
        """Registers a workflow, entirely or not at all; it goes on if the caller is cancelled."""
        self.models.check_alone("Workflows")
        return await self.models.tasks.load(
            self._register(url, workflow_name, Timeouts(response_timeout, startup_timeout))
        )

    async def _register(self, url: str, name: str | None, timeouts: Timeouts) -> Outcome:
        try:
            fetched = await self.workflow_store.fetch(url)
        except ArchiveNotFound as error:
            raise WorkflowNotFound(error.message) from error

        def fetch(node: Node) -> Any:
            return self.model_store.fetch(node.url or "")

        workflow = await self.add(fetched, name, timeouts, fetch, start=True)
        self.on_change()
        return Outcome(200, f"Workflow {workflow.name} has been registered and scaled successfully.")

    async def add(
        self, fetched: Fetched, name: str | None, timeouts: Timeouts, fetch: Fetch, *, start: bool
    ) -> Workflow:
        """Registers the workflow in `fetched`. `fetch`: finds the nodes' archives; `start`: also starts the workers,
        which the caller does otherwise. A failure leaves nothing behind."""
        async with undone_on_failure() as undo:
            undo.push_async_callback(asyncio.to_thread, self.workflow_store.discard, fetched)
            opening = partial(open_workflow, fetched.path, self.work_dir, self.extract_limits, pin=fetched.pin)
            archive = await in_thread(opening, WorkflowArchive.remove)
            undo.push_async_callback(asyncio.to_thread, archive.remove)
            return await self._add(fetched, archive, name or archive.name, timeouts, fetch, start)

    async def _add(
        self,
        fetched: Fetched,
        archive: WorkflowArchive,
        name: str | None,
        timeouts: Timeouts,
        fetch: Fetch,
        start: bool,
    ) -> Workflow:
        name = name or fetched.path.stem
        check_name("workflow_name", name)
        if name in self._workflows or name in self._arriving:
            raise WorkflowExists(name)
        workflow = Workflow(name, fetched, archive, timeouts, self.models.registry.find)
        for model in models_of(workflow, self.models):
            raise ModelExists(model.name, model.version)
        for warning in archive.spec.warnings:
            log.warning("Workflow %s: %s", name, warning)
        self._arriving.add(name)
        try:
            await self._add_nodes(workflow, fetch, start)
        finally:
            self._arriving.discard(name)
        self._workflows[name] = workflow
        log.info("Workflow %s added.", name)
        return workflow

    async def _add_nodes(self, workflow: Workflow, fetch: Fetch, start: bool) -> None:
        async with undone_on_failure() as undo:
            undo.push_async_callback(remove_nodes, workflow, self.models, 0.0, own=True)
            await add_nodes(workflow, self.models, fetch)
            if start:
                await start_nodes(workflow, self.models)

    # --- unregister

    async def unregister(self, name: str) -> Outcome:
        """Removes a workflow with its models; its accepted requests are answered first (unregister_model_timeout)."""
        workflow = self.find(name)
        del self._workflows[name]
        self._arriving.add(name)
        self.on_change()
        return await self.models.tasks.detached(self._unregister(workflow))

    async def _unregister(self, workflow: Workflow) -> Outcome:
        try:
            in_time = await workflow.drain(self.unregister_timeout_s)
            in_time &= await remove_nodes(workflow, self.models, self.unregister_timeout_s if in_time else 0.0)
            await asyncio.to_thread(workflow.archive.remove)
            await asyncio.to_thread(self.workflow_store.discard, workflow.fetched)
        finally:
            self._arriving.discard(workflow.name)
        log.info("Workflow %s unregistered.", workflow.name)
        if not in_time:
            raise WorkflowFailed(
                f"Error while unregistering the workflow {workflow.name}. Not all requests were answered in time; "
                "it is unregistered"
            )
        return Outcome(200, f'Workflow "{workflow.name}" unregistered')

    # --- list, describe

    def list_workflows(self, limit: int = LIST_LIMIT, next_page_token: int = 0) -> dict[str, Any]:
        found, more = page(list(self), limit, next_page_token)
        return {
            **more,
            "workflows": [{"workflowName": each.name, "workflowUrl": each.fetched.url} for each in found],
        }

    def describe(self, name: str) -> list[Mapping[str, Any]]:
        workflow = self.find(name)
        spec = workflow.archive.spec
        return [
            {
                "workflowName": workflow.name,
                "workflowUrl": workflow.fetched.url,
                "minWorkers": spec.defaults.min_workers,
                "maxWorkers": spec.defaults.max_workers,
                "batchSize": spec.defaults.batch_size,
                "maxBatchDelay": spec.defaults.max_batch_delay_ms,
                "workflowDag": spec.dag_text,
            }
        ]


def states_of(workflows: WorkflowManager) -> Mapping[str, WorkflowState]:
    return {
        workflow.name: WorkflowState(
            archive=workflow.fetched.path.name,
            url=workflow.fetched.url,
            response_timeout_s=workflow.timeouts.response_s,
            startup_timeout_s=workflow.timeouts.startup_s,
            nodes={
                model.name: NodeState(workflows.models.loader.fetched(model).recorded, model.minimum, model.maximum)
                for model in models_of(workflow, workflows.models)
                if model.workflow
            },
        )
        for workflow in workflows
    }


async def restore_workflows(
    states: Mapping[str, WorkflowState], workflows: WorkflowManager, at_once_max: int
) -> list[str]:
    """Registers the workflows of a snapshot concurrently; the caller starts their workers. Returns a sentence for
    each one that fails: it is set aside, and tried again at the next start."""
    work = [_restored(name, state, workflows) for name, state in states.items()]
    return [failure for failure in await side_by_side(work, at_once_max) if failure]


async def _restored(name: str, state: WorkflowState, workflows: WorkflowManager) -> str:
    """Restores a workflow; returns the sentence for a failure, or ""."""
    try:
        await _restore(name, state, workflows)
    except Exception as error:
        return snapshot_failure(f"Workflow {name}", state.archive, "workflow store", error)
    return ""


async def _restore(name: str, state: WorkflowState, workflows: WorkflowManager) -> None:
    recalled: list[Fetched] = []

    async def fetch(node: Node) -> Fetched:
        url, known = node.url or "", state.nodes.get(f"{name}__{node.name}")
        if known is None:
            return await workflows.model_store.fetch(url)
        recalled.append(await workflows.model_store.recall(url, known.archive))
        return kept_in_store(recalled[-1])

    fetched = await workflows.workflow_store.recall(state.url, state.archive)
    loader = workflows.models.loader
    timeouts = Timeouts(state.response_timeout_s, state.startup_timeout_s)
    workflow = await workflows.add(kept_in_store(fetched), name, timeouts, fetch, start=False)
    workflow.fetched = fetched
    for each in recalled:
        first = next(one for one in models_of(workflow, workflows.models) if loader.fetched(one).path == each.path)
        loader.set_fetched(first, each)
    for model in models_of(workflow, workflows.models):
        known = state.nodes.get(model.name)
        if known is not None:
            model.scale_between(known.min_workers, known.max_workers)
