"""What the doors that predict ask of the served models."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from ts.protocol.frames import Buffer, Input, Pairs


class Answer(Protocol):
    """A request on its way (`ts_frontend.job.Job`)."""

    status: int
    headers: Pairs
    sequence_id: str

    @property
    def done(self) -> bool: ...
    async def result(self) -> Buffer: ...
    async def pieces(self) -> list[Buffer]: ...
    def chunks(self) -> AsyncIterator[list[Buffer]]: ...
    def cancel(self) -> None: ...


class Served(Protocol):
    """A model version that takes requests (`ts_frontend.models.model.Model`)."""

    name: str

    def submit(
        self,
        inputs: Sequence[Input],
        *,
        headers: Pairs = (),
        deadline_s: float = math.inf,
        request_id: str | None = None,
        stream: bool,
        alone: bool = False,
        counted: bool = True,
        version_named: bool = False,
    ) -> Answer: ...


class Models(Protocol):
    """Where models are found by name (`ts_frontend.models.registry.Registry`)."""

    def find(self, name: str, version: str | None = None) -> Served: ...
