"""What a model version's workers are started with, and who they answer to."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ts.protocol.frames import Buffer, Pairs
from ts_frontend.job import Job
from ts_frontend.workers.process import ProcessSpec


class BatchRecorder(Protocol):
    """Who measures batches."""

    def answered(self, jobs: Sequence[Job], waited_s: float, worked_s: float, now_s: float) -> None:
        """A batch is complete: it was on its way or behind another for `waited_s`, then on the worker."""

    def loaded(self, worker_id: int, seconds: float) -> None:
        """A worker has loaded its model, so long after it was created."""


class Responses(Protocol):
    """Who counts the responses of models that give any number of them."""

    def response(self, index: int, kind: str, seconds: float) -> None:
        """A request's response number `index`, from 0, came `seconds` after the one before. `kind`: success, fail,
        empty or cancel."""


class Caller(NamedTuple):
    """Which model asks the server for something, and for whom. `deadline_s`: when nobody waits for it any more
    (`time.monotonic()`); `limit_s`: how long an answer, or the next piece of one, may take; `request_id` and `headers`:
    of the request that it is asked for, if that is known."""

    model: str
    deadline_s: float
    limit_s: float
    request_id: str = ""
    headers: Pairs = ()


class Answers(Protocol):
    """Who answers what models ask of the server."""

    def answer(
        self, what: Mapping[str, Any], data: Buffer, caller: Caller
    ) -> AsyncGenerator[tuple[Buffer, bool], None]:
        """The answer's pieces; True with one says that it is the last. Raises ServeError."""


@dataclass(frozen=True, slots=True, eq=False)
class WorkerPlan:
    """What to start and how to treat it; the same for every worker of a model version.

    `max_concurrency`: requests at a time on a worker that runs several side by side or in one continuous batch;
    `answers`: what its handler may ask; `responses`: counts those of a `decoupled` model, which files
    or handler say it is; `inside`: its worker is a thread of the server, and no worker to be counted.
    """

    spec: ProcessSpec
    load: Mapping[str, Any]
    startup_timeout_s: float
    response_timeout_s: float
    message_bytes_max: int
    workers_max: int | None = None
    max_concurrency: int = 64
    neighbour_grace_s: float = 5.0
    recorder: BatchRecorder | None = None
    answers: Answers | None = None
    responses: Responses | None = None
    decoupled: bool = False
    inside: bool = False
