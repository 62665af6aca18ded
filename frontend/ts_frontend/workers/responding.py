"""Counts what each request to a model with any number of responses has got, response by response. No I/O."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ts.protocol.frames import Chunk, Failed, Message
from ts_frontend.job import Job
from ts_frontend.workers.plan import Responses

CANCELLED = 499


class Responding:
    """The open requests of one worker: how many responses each has had, and when the last of them came."""

    def __init__(self, counted: Responses) -> None:
        self._counted = counted
        self._open: dict[int, tuple[int, float]] = {}

    def note(self, messages: Sequence[Message], jobs: Mapping[int, tuple[Job, Any]]) -> None:
        """`messages` have come from the worker; `jobs` are those that it has."""
        now_s = time.monotonic()
        for message in messages:
            if not isinstance(message, (Chunk, Failed)) or message.job_id not in jobs:
                continue
            job_id = message.job_id
            index, before_s = self._open.pop(job_id, (0, jobs[job_id][0].sent_at_s))
            self._counted.response(index, _kind(message), now_s - before_s)
            if isinstance(message, Chunk) and not message.last:
                self._open[job_id] = index + 1, now_s


def _kind(message: Chunk | Failed) -> str:
    if isinstance(message, Failed):
        return "cancel" if message.code == CANCELLED else "fail"
    return "success" if len(message.data) else "empty"
