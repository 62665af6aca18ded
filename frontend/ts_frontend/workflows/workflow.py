"""A registered workflow: its archive, its nodes' models, and the requests on their way through it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ts.protocol.frames import Input, Pairs
from ts_frontend.errors import Draining
from ts_frontend.models.store import Fetched
from ts_frontend.workflows.archive import WorkflowArchive
from ts_frontend.workflows.run import Reply, Run, Served


class Timeouts(NamedTuple):
    """What the register call asked for, in seconds, for all models; None is unset."""

    response_s: int | None = None
    startup_s: int | None = None


class Workflow:
    """`find` gives a model by its name."""

    def __init__(
        self,
        name: str,
        fetched: Fetched,
        archive: WorkflowArchive,
        timeouts: Timeouts,
        find: Callable[[str], Served],
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
        """What a node's model is called among the models."""
        return f"{self.name}__{node}"

    def node_model(self, node: str) -> Served:
        return self._find(self.model_name(node))

    async def predict(self, inputs: Sequence[Input], *, headers: Pairs, request_id: str | None) -> dict[str, Reply]:
        """The answers of the last nodes. Raises NodeFailed, Draining; a caller who is cancelled cancels all of it."""
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
        """Takes nothing new and waits for what is on its way; False when time was up."""
        self._leaving = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except (asyncio.TimeoutError, TimeoutError):  # one and the same from Python 3.11 on
            return False
        return True
