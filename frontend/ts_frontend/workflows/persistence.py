"""Workflows survive a restart: what a snapshot holds of them, and how they are registered again."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ts_frontend.errors import ServeError
from ts_frontend.models.persistence import RestoreFailed
from ts_frontend.models.snapshot import NodeState, WorkflowState
from ts_frontend.workflows.administration import WorkflowAdministration
from ts_frontend.workflows.nodes import models_of
from ts_frontend.workflows.spec import Node
from ts_frontend.workflows.workflow import Timeouts

log = logging.getLogger(__name__)


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


async def restore_workflows(states: Mapping[str, WorkflowState], workflows: WorkflowAdministration) -> None:
    """Registers every workflow of a snapshot; their workers are started by somebody else. RestoreFailed when one can't
    be."""
    for name, state in states.items():
        try:
            await _restore(name, state, workflows)
        except ServeError as error:
            raise RestoreFailed(
                f"Workflow {name} of the snapshot can't be loaded: {error.message}. "
                f"Put {state.archive} back into the workflow store, or start with --ncs to forget the snapshot."
            ) from error


async def _restore(name: str, state: WorkflowState, workflows: WorkflowAdministration) -> None:
    def fetch(node: Node) -> Any:
        url, known = node.url or "", state.nodes.get(f"{name}__{node.name}")
        return workflows.model_store.fetch(url) if known is None else workflows.model_store.recall(url, known.archive)

    fetched = await workflows.workflow_store.recall(state.url, state.archive)
    timeouts = Timeouts(state.response_timeout_s, state.startup_timeout_s)
    workflow = await workflows.add(fetched, name, timeouts, fetch, start=False)
    for model in models_of(workflow, workflows.models):
        known = state.nodes.get(model.name)
        if known is not None:
            model.minimum, model.maximum = known.min_workers, known.max_workers
