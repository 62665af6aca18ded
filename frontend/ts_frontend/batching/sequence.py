"""What one sequence of requests is, and what limits a model's sequences."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Protocol

from ts_frontend.batching.batcher import Waiting


class Sequenced(Waiting, Protocol):
    """A job of a sequence; `sequence_id` "" for one of none. `starts`, `ends`: its caller says so."""

    sequence_id: str
    starts: bool
    ends: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """How a model's sequences are kept. `idle_s` 0: a sequence ends when nothing of it waits or runs. `worker_max`: how
    many a worker holds at a time, the others wait (0: any number). `told_start`: only a request that says so begins
    one."""

    sequences_max: int = 1
    worker_max: int = 0
    told_start: bool = False
    jobs_max: int = 1
    idle_s: float = 0.0
    life_s: float = math.inf
    batch_size: int = 1
    delay_s: float = 0.0
    jobs_alone_max: int = 100
    overlap: bool = False


class NotBegun(Exception):
    """The request goes on with a sequence that isn't there, in a model whose sequences begin when they are told to."""


class Lost(Exception):
    """The sequence is over, and the state that its requests need is gone."""


@dataclass(slots=True, eq=False)
class Sequence:
    """`out`: its requests on the worker. `blocked_by`: the one that the next has to wait for. `runs`: how many the
    worker has taken. `closed`: why it takes no more, "" while it does."""

    id: str
    waiting: OrderedDict[int, Sequenced] = field(default_factory=OrderedDict)
    out: dict[int, Sequenced] = field(default_factory=dict)
    worker: Hashable | None = None
    blocked_by: int | None = None
    runs: int = 0
    closed: str = ""
    lost: bool = False
