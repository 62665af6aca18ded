"""The queue of a model whose requests have priorities or a limited time to wait."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

from ts.protocol.frames import Input, Pairs
from ts_frontend.batching.batcher import Policy
from ts_frontend.batching.job_queue import JobQueue, expired
from ts_frontend.batching.ranks import RankedBatcher, Ranking
from ts_frontend.job import Job, Ledger

#: Headers of a request: its level, and microseconds that it may wait.
PRIORITY, TIMEOUT_US = "ts_request_priority", "ts_request_queue_timeout_us"


class RankedJob(Job):
    """A request with a level (see `ranks.Ranked`)."""

    __slots__ = ("late", "level", "until_s", "wish_s")

    def __init__(self, level: int, wish_s: float, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.level, self.wish_s = level, wish_s
        self.until_s, self.late = 0.0, False


class RankedJobs:
    """Makes a model's jobs: what their headers don't say, or don't say as numbers, is as the model has it."""

    def __init__(self, ranking: Ranking) -> None:
        self._ranking = ranking

    def __call__(self, ledger: Ledger, inputs: Sequence[Input], *, headers: Pairs = (), **more: Any) -> RankedJob:
        found = {name.lower(): value for name, value in headers}
        level = self._ranking.level(_number(found.get(PRIORITY)))
        wish_s = _number(found.get(TIMEOUT_US)) / 1e6
        return RankedJob(level, wish_s, ledger, inputs, headers=headers, **more)


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() and len(text) < 20 else 0


class RankedQueue(JobQueue):
    def __init__(self, policy: Policy, ranking: Ranking) -> None:
        self._ranked = RankedBatcher(policy, ranking)
        super().__init__(policy, self._ranked)

    def expire(self, now_s: float) -> None:
        super().expire(now_s)
        for job in cast("list[Job]", self._ranked.settle(now_s)):
            expired(job, now_s)

    def _dispatch(self) -> None:
        self.expire(time.monotonic())
        super()._dispatch()
