"""The models behind a workflow's nodes: registered together, or not at all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from ts_frontend.errors import ServeError, WorkflowFailed
from ts_frontend.models.archive import Archive
from ts_frontend.models.manager import ModelManager
from ts_frontend.models.model import Model
from ts_frontend.models.settings import Requested
from ts_frontend.models.store.store import Fetched
from ts_frontend.workflows.specification import Node
from ts_frontend.workflows.workflow import Workflow

log = logging.getLogger(__name__)

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
    """All model versions under the names of the nodes."""
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
    """The node's settings as those of a register call; max-workers is the number of workers started, as in
    TorchServe."""
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
