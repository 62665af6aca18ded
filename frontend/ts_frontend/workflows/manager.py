"""Managing workflows while the server runs: register, list, describe, unregister."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ts_frontend.config.snapshot import NodeState, WorkflowState
from ts_frontend.errors import ArchiveNotFound, ModelExists, WorkflowExists, WorkflowFailed, WorkflowNotFound
from ts_frontend.models.description import LIST_LIMIT_MAX, page
from ts_frontend.models.extraction import ExtractLimits
from ts_frontend.models.manager import ModelManager, Outcome
from ts_frontend.models.settings import check_name
from ts_frontend.models.startup import kept_in_store, snapshot_failure
from ts_frontend.models.store.http import in_thread
from ts_frontend.models.store.store import Fetched, ModelStore
from ts_frontend.tasks import side_by_side, undone_on_failure
from ts_frontend.workflows.specification import Node, WorkflowArchive, open_workflow
from ts_frontend.workflows.workflow import Fetch, Timeouts, Workflow, add_nodes, models_of, remove_nodes, start_nodes

log = logging.getLogger(__name__)


class WorkflowManager:
    """Manages workflows. `models`: serves the nodes; `model_store`: has the nodes' archives, `workflow_store` those of
    workflows. `on_change`: called after each change that a restart should restore."""

    def __init__(
        self,
        models: ModelManager,
        model_store: ModelStore,
        workflow_store: ModelStore,
        *,
        work_dir: Path,
        extract_limits: ExtractLimits,
        unregister_timeout_s: float,
        on_change: Callable[[], None],
    ) -> None:
        self.models = models
        self.model_store = model_store
        self.workflow_store = workflow_store
        self._work_dir = work_dir
        self._extract_limits = extract_limits
        self._unregister_timeout_s = unregister_timeout_s
        self._on_change = on_change
        self._workflows: dict[str, Workflow] = {}
        self._arriving: set[str] = set()

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
        self._on_change()
        return Outcome(200, f"Workflow {workflow.name} has been registered and scaled successfully.")

    async def add(
        self, fetched: Fetched, name: str | None, timeouts: Timeouts, fetch: Fetch, *, start: bool
    ) -> Workflow:
        """Registers the workflow in `fetched`. `fetch`: finds the nodes' archives; `start`: also starts the workers,
        which the caller does otherwise. A failure leaves nothing behind."""
        async with undone_on_failure() as undo:
            undo.push_async_callback(asyncio.to_thread, self.workflow_store.discard, fetched)
            opening = partial(open_workflow, fetched.path, self._work_dir, self._extract_limits, pin=fetched.pin)
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
        self._on_change()
        return await self.models.tasks.detached(self._unregister(workflow))

    async def _unregister(self, workflow: Workflow) -> Outcome:
        try:
            in_time = await workflow.drain(self._unregister_timeout_s)
            in_time &= await remove_nodes(workflow, self.models, self._unregister_timeout_s if in_time else 0.0)
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

    def list_workflows(self, limit: int = LIST_LIMIT_MAX, next_page_token: int = 0) -> dict[str, Any]:
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
