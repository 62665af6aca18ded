"""A job whose caller sends further inputs while it runs."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from ts.protocol.frames import FEED_BYTES, FEED_COST_BYTES, Feed, Input
from ts_frontend.job import Job, State

#: Bytes that wait here for the handler to take them; the caller waits with more.
WAITING_BYTES_MAX = 256 * 1024


class FedJob(Job):
    """Its further inputs wait with it until the worker that runs it has room for them: its handler takes them one after
    another. Runs again elsewhere only while no worker has been sent any."""

    __slots__ = ("_allowed_bytes", "_closed", "_fed", "_idle_s", "_space", "_waiting", "_waiting_bytes")

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._waiting: deque[Feed] = deque()
        self._waiting_bytes = self._allowed_bytes = 0
        self._space: asyncio.Future[None] | None = None
        self._closed = self._fed = False
        self._idle_s = math.inf

    async def feed(self, inputs: Sequence[Input], last: bool = False) -> None:
        """Hands `inputs` on; waits while too many wait already. What comes after the job's end is dropped."""
        while self._waiting_bytes >= WAITING_BYTES_MAX and not self.done:
            self._space = self.ledger.future()
            await self._space
        if not self.done:
            feed = Feed(self.id, inputs, last)
            self._closed |= last
            self._waiting.append(feed)
            self._waiting_bytes += _cost(feed)
            self._send()

    def allow(self, size_bytes: int) -> None:
        self._allowed_bytes += size_bytes
        self._send()

    def _send(self) -> None:
        while self._waiting and self._allowed_bytes > 0 and self.state is State.SENT and self.owner is not None:
            feed = self._waiting.popleft()
            self._waiting_bytes -= _cost(feed)
            self._allowed_bytes -= _cost(feed)
            self._fed = True
            self.owner.feed(self, feed)
        # Once the worker has given back all it was allowed, its handler waits for the next.
        idle = self._allowed_bytes >= FEED_BYTES and not self._closed
        self._idle_s = time.monotonic() if idle else math.inf
        if self._waiting_bytes < WAITING_BYTES_MAX:
            self._make_space()

    def _make_space(self) -> None:
        space, self._space = self._space, None
        if space is not None and not space.done():
            space.set_result(None)

    def move(self, state: State) -> None:
        super().move(state)
        if state is State.QUEUED:
            self._allowed_bytes = 0  # the next worker has to ask itself
            self._idle_s = math.inf
        elif self.done:
            self._waiting.clear()
            self._make_space()

    def held_up(self, now_s: float) -> float:
        return max(super().held_up(now_s), now_s - self._idle_s)

    @property
    def repeatable(self) -> bool:
        return super().repeatable and not self._fed


def _cost(feed: Feed) -> int:
    return FEED_COST_BYTES + sum(len(part.data) for part in feed.inputs)
