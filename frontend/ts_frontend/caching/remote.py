"""Answers that are kept in Redis, for several servers with the same models. Its failures cost a miss, never a request.

Whoever may write to that Redis may give answers: a value is checked for what chance can do to it, not for its author.
"""

from __future__ import annotations

import hashlib
import json
from typing import Final

from ts_frontend.caching.answers import Answer
from ts_frontend.redis_calls import RedisCalls

#: The largest answer, and how long one is kept without a `ttl`: answers of models that are gone must go, too.
ANSWER_BYTES_MAX: Final = 8 * 1024 * 1024
TTL_S: Final = 86_400.0
#: Begins a value. The last digit changes with the layout.
MAGIC: Final = b"torchrelay answer 1\n"
_PREFIX: Final = b"torchrelay:"
_SUM_BYTES: Final = 32


class RemoteAnswers:
    """`refused`: values that were none of ours, or broken."""

    def __init__(self, url: str) -> None:
        self._calls = RedisCalls(url, "Redis (response_cache_redis) gives no answers, and requests run")
        self.refused = 0

    async def get(self, digest: bytes) -> Answer | None:
        key = _PREFIX + digest
        # A range, so that a large value of somebody else isn't read.
        found = await self._calls.call(lambda: self._calls.client.getrange(key, 0, ANSWER_BYTES_MAX))
        if not found:
            return None
        answer = unpacked(digest, bytes(found))
        if answer is None:
            self.refused += 1
            self._calls.tell("a value of the cache isn't one of this version, or is broken")
        return answer

    async def put(self, digest: bytes, answer: Answer, ttl_s: float) -> None:
        value = packed(digest, answer)
        if len(value) <= ANSWER_BYTES_MAX:
            lifetime_ms = max(1, int((ttl_s or TTL_S) * 1000))
            await self._calls.call(lambda: self._calls.client.set(_PREFIX + digest, value, px=lifetime_ms))

    async def close(self) -> None:
        await self._calls.close()


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
