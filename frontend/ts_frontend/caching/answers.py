"""The answers of all models that are kept in memory: the least recently used ones go first."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

from ts.protocol.frames import Buffer, Pairs

#: An answer that takes more than this part of the cache isn't kept.
SHARE: Final = 4
#: What an answer takes besides its bytes: its key, and the objects around both.
ENTRY_BYTES: Final = 512


class Answer(NamedTuple):
    """The answer of a handler: its pieces, which are one unless it streams. That to a tensor request is in the common
    form."""

    pieces: Sequence[Buffer]
    headers: Pairs = ()
    status: int = 200

    @property
    def size_bytes(self) -> int:
        texts = sum(len(name) + len(value) for name, value in self.headers)
        return sum(map(len, self.pieces)) + texts + ENTRY_BYTES


class CacheRule(NamedTuple):
    """A model's settings. `size_bytes`: for its answers, 0 for no limit but the server's; `ttl_s`: after it an answer
    isn't used any more, 0 for none; `headers`: those that take part in the key, in lower case."""

    size_bytes: int = 0
    ttl_s: float = 0.0
    headers: frozenset[str] = frozenset()


class Kept(NamedTuple):
    """`until_s`: `time.monotonic()` seconds, None for always."""

    answer: Answer
    size_bytes: int
    until_s: float | None


class Memory:
    """`size_bytes`: for the answers of all models together."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.used_bytes = 0
        self._order: OrderedDict[tuple[Shelf, bytes], None] = OrderedDict()

    def touch(self, shelf: Shelf, digest: bytes) -> None:
        self._order[shelf, digest] = None
        self._order.move_to_end((shelf, digest))

    def forget(self, shelf: Shelf, digest: bytes) -> None:
        del self._order[shelf, digest]

    def shrink(self) -> None:
        while self.used_bytes > self.size_bytes:
            shelf, digest = next(iter(self._order))
            shelf.evict(digest)


class Shelf:
    """The answers of one load of a model version, by the digests of their questions."""

    def __init__(self, memory: Memory, rule: CacheRule) -> None:
        self._memory, self._ttl_s = memory, rule.ttl_s
        self._size_bytes = min(rule.size_bytes or memory.size_bytes, memory.size_bytes)
        self._kept: OrderedDict[bytes, Kept] = OrderedDict()
        self.used_bytes = self.evicted = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, digest: bytes) -> Answer | None:
        found = self._kept.get(digest)
        if found is None:
            return None
        if found.until_s is not None and found.until_s <= time.monotonic():
            self.drop(digest)
            return None
        self._kept.move_to_end(digest)
        self._memory.touch(self, digest)
        return found.answer

    def keep(self, digest: bytes, answer: Answer) -> None:
        """Keeps the answer in place of an older one to the same question; one that is too large isn't kept."""
        self.drop(digest)
        size = answer.size_bytes
        if size * SHARE > self._size_bytes:
            return
        # A copy: the answer may be a view of a larger message.
        own = answer._replace(pieces=[bytes(piece) for piece in answer.pieces])
        self._kept[digest] = Kept(own, size, time.monotonic() + self._ttl_s if self._ttl_s else None)
        self._memory.touch(self, digest)
        self.used_bytes += size
        self._memory.used_bytes += size
        while self.used_bytes > self._size_bytes:
            self.evict(next(iter(self._kept)))
        self._memory.shrink()

    def evict(self, digest: bytes) -> None:
        self.evicted += 1
        self.drop(digest)

    def drop(self, digest: bytes) -> None:
        found = self._kept.pop(digest, None)
        if found is not None:
            self.used_bytes -= found.size_bytes
            self._memory.used_bytes -= found.size_bytes
            self._memory.forget(self, digest)

    def clear(self) -> None:
        for digest in list(self._kept):
            self.drop(digest)
