"""What a model version's workers are started with, and who they answer to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ts_frontend.job import Job
from ts_frontend.workers.started import Spec


class Work(Protocol):
    """Where a worker's batches come from and where unfinished ones go back to."""

    def put_back(self, jobs: list[Job]) -> None: ...

    def wake(self) -> None: ...


class Recorder(Protocol):
    """Who measures batches."""

    def answered(self, jobs: Sequence[Job], waited_s: float, worked_s: float, now_s: float) -> None:
        """A batch is complete: it was on its way or behind another for `waited_s`, then on the worker."""

    def loaded(self, worker_id: int, seconds: float) -> None:
        """A worker has loaded its model, so long after it was created."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What to start and how to treat it; the same for every worker of a model version.

    `max_concurrency`: requests at a time on a worker that runs several side by side or in one continuous batch;
    `inside`: its worker is a thread of the server, and no worker to be counted.
    """

    spec: Spec
    load: Mapping[str, Any]
    startup_timeout_s: float
    response_timeout_s: float
    message_bytes_max: int
    workers_max: int | None = None
    max_concurrency: int = 64
    neighbour_grace_s: float = 5.0
    recorder: Recorder | None = None
    inside: bool = False
