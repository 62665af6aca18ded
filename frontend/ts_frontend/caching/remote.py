"""Answers that are kept in Redis, for several servers with the same models. Its failures cost a miss, never a request.

Whoever may write to that Redis may give answers: a value is checked for what chance can do to it, not for its author.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import logging
import time
from typing import TYPE_CHECKING, Any, Final

from ts_frontend.caching.answers import Answer

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger(__name__)

#: How long a call may take; after a failure, there is none for PAUSE_S; one line of the log in TOLD_EVERY_S tells it.
TIMEOUT_S: Final = 0.25
PAUSE_S: Final = 1.0
TOLD_EVERY_S: Final = 60.0
CONNECTIONS_MAX: Final = 32
#: The largest answer, and how long one is kept without a `ttl`: answers of models that are gone must go, too.
ANSWER_BYTES_MAX: Final = 8 * 1024 * 1024
TTL_S: Final = 86_400.0
#: Begins a value. The last digit changes with the layout.
MAGIC: Final = b"torchrelay answer 1\n"
_PREFIX: Final = b"torchrelay:"
_SUM_BYTES: Final = 32


class RemoteAnswers:
    """`failures`: calls that failed; `refused`: values that were none of ours, or broken."""

    def __init__(self, url: str) -> None:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        self._client: Redis = Redis.from_url(
            url,
            max_connections=CONNECTIONS_MAX,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
        self.failures = self.refused = 0
        self._resumes_s = self._told_s = 0.0

    async def get(self, digest: bytes) -> Answer | None:
        key = _PREFIX + digest
        # A range, so that a large value of somebody else isn't read.
        found = await self._call(lambda: self._client.getrange(key, 0, ANSWER_BYTES_MAX))
        if not found:
            return None
        answer = unpacked(digest, bytes(found))
        if answer is None:
            self.refused += 1
            self._tell("a value of the cache isn't one of this version, or is broken")
        return answer

    async def put(self, digest: bytes, answer: Answer, ttl_s: float) -> None:
        value = packed(digest, answer)
        if len(value) <= ANSWER_BYTES_MAX:
            lifetime_ms = max(1, int((ttl_s or TTL_S) * 1000))
            await self._call(lambda: self._client.set(_PREFIX + digest, value, px=lifetime_ms))

    async def _call(self, call: Any) -> Any:
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
            self._tell(f"{type(error).__name__}: {error}")
            return None

    def _tell(self, what: str) -> None:
        now_s = time.monotonic()
        if not self._told_s or now_s - self._told_s >= TOLD_EVERY_S:
            self._told_s = now_s
            log.warning("Redis (response_cache_redis) gives no answers, and requests run: %s", what)

    async def close(self) -> None:
        await self._client.aclose()


def packed(digest: bytes, answer: Answer) -> bytes:
    """An answer as a value: MAGIC, the SHA-256 of its key and of the rest, and the rest: a line of JSON, the bytes."""
    head = json.dumps({"headers": [list(pair) for pair in answer.headers], "empty": not answer.pieces}).encode()
    rest = b"".join((head, b"\n", *answer.pieces))
    return b"".join((MAGIC, hashlib.sha256(digest + rest).digest(), rest))


def unpacked(digest: bytes, value: bytes) -> Answer | None:
    """The answer in a value, None if it isn't one to this question."""
    at = len(MAGIC) + _SUM_BYTES
    rest = value[at:]
    if not value.startswith(MAGIC) or hashlib.sha256(digest + rest).digest() != value[len(MAGIC) : at]:
        return None
    head, _, data = rest.partition(b"\n")
    try:
        found = json.loads(head)
        headers = [(str(name), str(text)) for name, text in found["headers"]]
        return Answer([] if found["empty"] else [data], headers)
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def is_installed() -> bool:
    return importlib.util.find_spec("redis") is not None
