"""The servers that divide the limits of clients: each tells a Redis that it is there, and counts the others."""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Final

from ts_frontend.limits.limits import Limits
from ts_frontend.redis_calls import RedisCalls

log = logging.getLogger(__name__)

#: Seconds between two signs of life, and after the last one until a server counts as gone.
BEAT_S: Final = 1.0
GONE_S: Final = 5.0
_KEY: Final = "torchrelay:limits:servers"
#: Notes a server by Redis' own clock, forgets those that are gone, and returns how many there are.
_BEAT: Final = """
local at = redis.call('TIME')
local now = tonumber(at[1]) + tonumber(at[2]) / 1000000
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - tonumber(ARGV[2]))
redis.call('EXPIRE', KEYS[1], 60)
return redis.call('ZCARD', KEYS[1])
"""


class Fleet:
    """Divides `limits` by the number of servers in a Redis. While it gives none, the limits are those of this server
    alone. Raises ValueError for a wrong URL."""

    def __init__(self, limits: Limits, url: str) -> None:
        self._limits = limits
        self._calls = RedisCalls(url, "Redis (limits_redis) counts no servers, and limits are those of this server")
        self._id = secrets.token_hex(8)

    async def watch(self) -> None:
        """Counts the servers, until it is cancelled."""
        while True:
            await self.beat()
            await asyncio.sleep(BEAT_S)

    async def beat(self) -> None:
        client = self._calls.client
        found = await self._calls.call(lambda: client.eval(_BEAT, 1, _KEY, self._id, str(GONE_S)))
        servers = max(1, int(found or 1))
        if servers != self._limits.servers:
            log.info("Servers that divide the limits of clients: %d", servers)
            self._limits.servers = servers
            self._limits.change()

    async def close(self) -> None:
        await self._calls.call(lambda: self._calls.client.zrem(_KEY, self._id))
        await self._calls.close()
