"""Calls of a Redis that servers share. A call that fails costs its result and a line of the log, never a request."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger(__name__)

#: How long a call may take; after a failure, there is none for PAUSE_S; one line of the log in TOLD_EVERY_S tells it.
TIMEOUT_S: Final = 0.25
PAUSE_S: Final = 1.0
TOLD_EVERY_S: Final = 60.0
CONNECTIONS_MAX: Final = 32


def is_installed() -> bool:
    return importlib.util.find_spec("redis") is not None


class RedisCalls:
    """The calls for one purpose. `trouble`: begins the log's lines about failures, `failures` counts them. Raises
    ValueError for a wrong URL."""

    def __init__(self, url: str, trouble: str) -> None:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        self.client: Redis = Redis.from_url(
            url,
            max_connections=CONNECTIONS_MAX,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
        self._trouble = trouble
        self.failures = 0
        self._resumes_s = self._told_s = 0.0

    async def call(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """The result, None if there is none in time."""
        from redis.exceptions import RedisError

        if time.monotonic() < self._resumes_s:
            return None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await call()
        except (RedisError, OSError, TimeoutError) as error:
            self.failures += 1
            self._resumes_s = time.monotonic() + PAUSE_S
            self.tell(f"{type(error).__name__}: {error}")
            return None

    def tell(self, what: str) -> None:
        now_s = time.monotonic()
        if not self._told_s or now_s - self._told_s >= TOLD_EVERY_S:
            self._told_s = now_s
            log.warning("%s: %s", self._trouble, what)

    async def close(self) -> None:
        await self.client.aclose()
