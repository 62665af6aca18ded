"""A request's further inputs, as its handler asks for them while it runs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from ts.protocol.frames import FEED_BYTES, FEED_COST_BYTES, Feed
from ts.runtime.jobs import Job, Ledger

#: So many taken bytes are told to the frontend together, while there are more to take.
GRANT_BYTES = FEED_BYTES // 4


class Feeding:
    """An async iterator: what `read` makes of each Feed, until the last. It is told to the frontend what was taken, and
    at once when more is waited for: from that it knows whether the handler computes or waits for its client."""

    def __init__(self, job: Job, ledger: Ledger, flush: Callable[[], object], read: Callable[[Feed], Any]) -> None:
        self._job, self._ledger, self._flush, self._read = job, ledger, flush, read
        self._waiting: deque[Feed] = deque()
        self._changed = asyncio.Event()
        self._over = False
        self._taken_bytes = FEED_COST_BYTES  # the request itself
        job.on_feed = self._put
        self._ask(FEED_BYTES - FEED_COST_BYTES)

    def _put(self, feed: Feed) -> None:
        self._waiting.append(feed)
        self._over |= feed.last
        self._changed.set()

    def _ask(self, size_bytes: int) -> None:
        self._ledger.ask_for(self._job, size_bytes)
        self._flush()

    def __aiter__(self) -> Feeding:
        return self

    async def __anext__(self) -> Any:
        while True:
            feed = await self._next()
            if feed is None:
                raise StopAsyncIteration
            if feed.inputs:
                return self._read(feed)

    async def _next(self) -> Feed | None:
        while not self._waiting:
            if self._over:
                return None
            self._grant()
            self._changed.clear()
            await self._changed.wait()
        feed = self._waiting.popleft()
        if self._taken_bytes >= GRANT_BYTES:
            self._grant()
        self._taken_bytes += FEED_COST_BYTES + sum(len(part.data) for part in feed.inputs)
        return feed

    def _grant(self) -> None:
        if self._taken_bytes:
            size_bytes, self._taken_bytes = self._taken_bytes, 0
            self._ask(size_bytes)
