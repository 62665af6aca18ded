"""Workflows survive a restart: what a snapshot holds of them, and how they are registered again."""

from __future__ import annotations

from collections.abc import Mapping

from ts_frontend.models.persistence import aside, left_there
from ts_frontend.models.snapshot import NodeState, WorkflowState
from ts_frontend.models.store import Fetched
from ts_frontend.tasks import side_by_side
from ts_frontend.workflows.administration import WorkflowAdministration
from ts_frontend.workflows.nodes import models_of
from ts_frontend.workflows.spec import Node
from ts_frontend.workflows.workflow import Timeouts


def states_of(workflows: WorkflowAdministration) -> Mapping[str, WorkflowState]:
    """All workflows as a snapshot holds them."""
    return {
        workflow.name: WorkflowState(
            archive=workflow.fetched.path.name,
            url=workflow.fetched.url,
            response_timeout_s=workflow.timeouts.response_s,
            startup_timeout_s=workflow.timeouts.startup_s,
            nodes={
                model.name: NodeState(
                    workflows.models.installation.fetched(model).recorded, model.minimum, model.maximum
                )
                for model in models_of(workflow, workflows.models)
                if model.workflow
            },
        )
        for workflow in workflows
    }


async def restore_workflows(
    states: Mapping[str, WorkflowState], workflows: WorkflowAdministration, at_once_max: int
) -> list[str]:
    """Registers every workflow of a snapshot, side by side; their workers are started by somebody else. A sentence for
    each that can't be: it is set aside, and tried again by the next start."""
    work = [_restored(name, state, workflows) for name, state in states.items()]
    return [failure for failure in await side_by_side(work, at_once_max) if failure]


async def _restored(name: str, state: WorkflowState, workflows: WorkflowAdministration) -> str:
    """Why it couldn't be, or ""."""
    try:
        await _restore(name, state, workflows)
    except Exception as error:
        return aside(f"Workflow {name}", state.archive, "workflow store", error)
    return ""


async def _restore(name: str, state: WorkflowState, workflows: WorkflowAdministration) -> None:
    recalled: list[Fetched] = []

    async def fetch(node: Node) -> Fetched:
        url, known = node.url or "", state.nodes.get(f"{name}__{node.name}")
        if known is None:
            return await workflows.model_store.fetch(url)
        recalled.append(await workflows.model_store.recall(url, known.archive))
        return left_there(recalled[-1])

    fetched = await workflows.workflow_store.recall(state.url, state.archive)
    installation = workflows.models.installation
    timeouts = Timeouts(state.response_timeout_s, state.startup_timeout_s)
    workflow = await workflows.add(left_there(fetched), name, timeouts, fetch, start=False)
    workflow.fetched = fetched
    for each in recalled:
        first = next(
            one for one in models_of(workflow, workflows.models) if installation.fetched(one).path == each.path
        )
        installation.own(first, each)
    for model in models_of(workflow, workflows.models):
        known = state.nodes.get(model.name)
        if known is not None:
            model.minimum, model.maximum = known.min_workers, known.max_workers
