"""The cache of answers: the answers of all models that are kept in memory, of which the least recently used ones go
first, or in Redis, for several servers with the same models; the question that a request asks: what its answer depends
on, decoded, and its digest, the key of the answer; and a model version's cache: answers that are kept, and requests
that wait for one run because they ask the same.

Every request has a job of its own, with its own deadline and its own caller: it ends as any other, and a kept answer is
delivered to it at once. A run is a further job, which isn't counted as a request. It ends early only when the last of
its waiting requests has gone. Failures of Redis cost a miss, never a request. Whoever may write to that Redis may give
answers: a value is checked for what chance can do to it, not for its author.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from ts.protocol import forms
from ts.protocol.frames import Buffer, Chunk, Feed, Input, PackedPairs, Pairs, size_of
from ts_frontend.caching import tensors
from ts_frontend.caching.tensors import JSON_BYTES_MAX, LENGTH_HEADER, Unusual, Wish
from ts_frontend.errors import DeadlineExceeded, Ending, ServeError
from ts_frontend.job import COLD_HEADER, Job, Whereabouts
from ts_frontend.redis_calls import RedisCalls
from ts_frontend.tasks import watched

if TYPE_CHECKING:
    from hashlib import _Hash

log: Final = logging.getLogger(__name__)

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


#: Larger requests run without the cache.
REQUEST_BYTES_MAX: Final = 16 * 1024 * 1024
_TENSORS: Final = "\0grpc"
_JSON_TENSORS: Final = "\0json"
#: Headers that the server adds for the handler, with the values of a plain prediction.
_PLAIN: Final = {"explain": "False", "url_path": ""}
_SIZE: Final = struct.Struct("<Q")
#: Clients repeat their headers: what blocks of them say is remembered, of ones up to this size.
_BLOCK_BYTES_MAX: Final = 1024
_REMEMBERED: Final = 1024


class Question(NamedTuple):
    """`inputs` and `headers`: of the run that answers it; `wish`: how its client wants an answer in the common form of
    tensors (None: as it comes)."""

    digest: bytes
    inputs: Sequence[Input]
    headers: Pairs
    wish: Wish | None


class Control(NamedTuple):
    """What a request's `cache-control` allows: an answer that is kept already, and to keep its own."""

    reads: bool = True
    keeps: bool = True


class Said(NamedTuple):
    """What a request's headers say. `named`: the names and values of those that take part in the key; `length`: of the
    JSON at the beginning of its body, "" for all of it."""

    control: Control
    named: Sequence[str]
    length: str


class Asker(NamedTuple):
    """Reads the questions to a model version. `headers`: those that take part, in lower case; `decodes`: the handler
    gets JSON as values; `dialects`: tensor requests of all dialects are alike to it; `mark`: differs for models that
    may answer differently."""

    model: str
    version: str
    headers: frozenset[str]
    decodes: bool = True
    dialects: bool = True
    mark: bytes = b""

    def takes(self, inputs: Sequence[Input]) -> bool:
        """Whether the cache has to do with such a request, by its dialect and its size."""
        marked = [part.content_type for part in inputs if part.content_type[:1] == "\0"]
        known = not marked or marked in ([_TENSORS], [_JSON_TENSORS])
        return known and size_of(inputs) <= REQUEST_BYTES_MAX

    def said(self, headers: Pairs) -> Said:
        if type(headers) is PackedPairs and len(headers.block) <= _BLOCK_BYTES_MAX:
            return _said_by(headers.block, self.headers)
        return _said(headers, self.headers)

    def question(self, inputs: Sequence[Input], headers: Pairs, said: Said) -> Question:
        named, length = said.named, said.length
        wish: Wish | None = None
        parts: list[bytes | bytearray | memoryview] = []
        if inputs and inputs[0].content_type[:1] == "\0":
            inputs, wish = self._tensors(inputs[0], length)
            if wish is None and inputs[0].content_type == _JSON_TENSORS:
                named = (*named, LENGTH_HEADER, length)
            parts += (inputs[0].content_type.encode(), inputs[0].data)
        else:
            for part in self._separated(inputs):
                parts += (_encoded(part.name), self._type(part), self._content(part))
        found = _begun(self.mark, self.model, self.version).copy()
        found.update(_SIZE.pack(len(named)))
        for one in (*map(_encoded, named), *parts):
            found.update(_SIZE.pack(len(one)))  # so that no two lists of parts are the same bytes
            found.update(one)
        return Question(found.digest(), inputs, headers, wish)

    def _tensors(self, part: Input, length: str) -> tuple[Sequence[Input], Wish | None]:
        """The request in the common form; an unusual one stays as it is."""
        try:
            if not self.dialects:
                raise Unusual
            if part.content_type == _TENSORS:
                data, wish = tensors.of_message(part.data, self.model, self.version)
            else:
                data, wish = tensors.of_json(part.data, length, self.model, self.version)
        except Unusual:
            return [part], None
        return [Input("", _TENSORS, data)], wish

    @staticmethod
    def _separated(inputs: Sequence[Input]) -> Iterator[Input]:
        """The inputs, a form as its fields: each client separates them in another way."""
        for part in inputs:
            if part.content_type and forms.is_form(part.content_type):
                try:
                    yield from (Input(*one) for one in forms.parts(part.content_type, bytes(part.data)))
                    continue
                except forms.MalformedForm:
                    pass  # the handler gets its bytes
            yield part

    @staticmethod
    def _type(part: Input) -> bytes:
        """The content type. Bytes may have none: gRPC's never have one."""
        found = part.content_type
        return b"" if found == "application/octet-stream" else _encoded(found)

    def _content(self, part: Input) -> bytes | bytearray | memoryview:
        """JSON without its blanks, if the handler gets it as values; other content as it is."""
        base = part.content_type.partition(";")[0].strip()
        if self.decodes and base == "application/json" and len(part.data) <= JSON_BYTES_MAX:
            try:
                return json.dumps(json.loads(str(part.data, "utf-8")), separators=(",", ":")).encode()
            except (ValueError, RecursionError):
                pass  # the handler gets its bytes
        return part.data


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@lru_cache(maxsize=256)
def _begun(mark: bytes, model: str, version: str) -> _Hash:
    """The digest of what all questions to a model version begin with."""
    found = hashlib.sha256(mark)
    for text in map(_encoded, (model, version)):
        found.update(_SIZE.pack(len(text)) + text)
    return found


@lru_cache(maxsize=_REMEMBERED)
def _said_by(block: bytes, names: frozenset[str]) -> Said:
    return _said(PackedPairs(block), names)


def _said(headers: Pairs, names: frozenset[str]) -> Said:
    """`names`: of the headers that take part in the key, in lower case."""
    named: list[str] = []
    length = ""
    words: list[str] = []
    for name, value in headers:
        lower = name.lower()
        if lower in names or (lower in _PLAIN and value != _PLAIN[lower]):
            named += (lower, value)
        elif lower == LENGTH_HEADER:
            length = value
        if lower == "cache-control":
            words += value.split(",")
    said = {word.strip().lower() for word in words}
    keeps = "no-store" not in said
    return Said(Control(keeps and said.isdisjoint(("no-cache", "max-age=0")), keeps), tuple(named), length)


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


#: The header, and the metadata, that tells whether a request has run.
CACHE_HEADER: Final = "x-cache"
HIT: Final = "HIT"
MISS: Final = "MISS"
#: Larger requests are read, and larger answers written in another form, in a thread.
INLINE_BYTES_MAX: Final = 256 * 1024
#: Why a model's answers can't be kept.
DECOUPLED: Final = "it is decoupled: a request has any number of answers"
LANGUAGE: Final = "it is a language model, whose answers are drawn or streamed"
UNWRITTEN: Final = "The answer could not be written"
#: The forms of one answer that are kept while it is delivered to those that waited for it.
WRITTEN_MAX: Final = 8
#: Gets the inputs and headers of a question, and runs it.
Run: TypeAlias = Callable[[Sequence[Input], Pairs], Job]


class NoOwner:
    """The owner of a job that no queue and no worker has."""

    def release(self, job: Job) -> None:
        """Does nothing: nobody computes for the job."""

    def grant(self, job: Job, size_bytes: int) -> None:
        """Does nothing: an answer comes whole."""

    def feed(self, job: Job, feed: Feed) -> None:
        """Does nothing: only a whole request has a question."""

    def measure(self, job: Job) -> Whereabouts:
        raise AssertionError(f"job {job.id} runs on no worker of its own")


_NOBODY: Final = NoOwner()


class Caches:
    """Makes the caches of models, whose answers in memory take at most `size_bytes` together."""

    def __init__(self, size_bytes: int, remote: RemoteAnswers | None = None) -> None:
        self.memory = Memory(size_bytes)
        self.remote = remote

    @property
    def keep(self) -> bool:
        """Whether there is a place for answers."""
        return self.memory.size_bytes > 0 or self.remote is not None

    def of(self, asker: Asker, rule: CacheRule) -> ModelCache:
        return ModelCache(asker, Shelf(self.memory, rule), rule.ttl_s, self.remote)

    async def close(self) -> None:
        if self.remote is not None:
            await self.remote.close()


class ModelCache:
    """`remote`: also keeps the answers outside of the server, None for none. `hit_s` and `miss_s`: the sums of the
    seconds that it took until kept answers were delivered, and until runs began."""

    def __init__(self, asker: Asker, shelf: Shelf, ttl_s: float, remote: RemoteAnswers | None = None) -> None:
        self._asker = asker
        self.shelf = shelf
        self.ttl_s = ttl_s
        self.remote = remote
        self.hits = self.misses = 0
        self.hit_s = self.miss_s = 0.0
        self.flights: dict[bytes, _Flight] = {}
        self._open = True

    def close(self) -> None:
        """Drops the answers; later requests run."""
        self._open = False
        self.shelf.clear()

    def refusal(self, info: Mapping[str, Any], decoupled: bool) -> str:
        """Why the model's answers can't be kept, by what its worker says of the handler; closes the cache then."""
        why = ""
        if decoupled:
            why = DECOUPLED
        elif info.get("handler_kind") == "generator" or info.get("takes_streams"):
            why = "its handler streams"
        elif (info.get("openai") or {}).get("speaks"):
            why = LANGUAGE
        if not why:
            return ""
        self.close()
        return f"cache has no effect: {why}"

    def keep(self, digest: bytes, answer: Answer) -> bool:
        """Whether the answer may be kept; memory has it then, if it isn't too large."""
        if len(answer.pieces) > 1:
            self._streams()
        told = any(name.lower() == "cache-control" and "no-store" in value.lower() for name, value in answer.headers)
        if not self._open or told or answer.status != 200:
            return False
        self.shelf.keep(digest, answer)
        return True

    def _streams(self) -> None:
        """A run has given several pieces."""
        if self._open:
            self.close()
            log.warning("Model %s %s: its handler streams, so that its answers aren't kept", *self._asker[:2])

    def takes(self, inputs: Sequence[Input], headers: Pairs) -> Said | None:
        """What the headers of a request say; None for one that it has nothing to do with."""
        if not self._open or not self._asker.takes(inputs):
            return None
        said = self._asker.said(headers)
        return said if said.control.keeps else None

    def answer(self, job: Job, said: Said, inputs: Sequence[Input], headers: Pairs, run: Run) -> Job:
        """Answers a new job, at once if it can."""
        job.queued_at_s = time.monotonic()
        job.enqueue(_NOBODY)
        job.send(None, job.queued_at_s)
        if size_of(inputs) <= INLINE_BYTES_MAX:
            self._ask(job, said.control, self._asker.question(inputs, headers, said), run)
        else:
            watched(self._ask_later(job, said, inputs, headers, run), "Reading a request for the cache")
        return job

    async def _ask_later(self, job: Job, said: Said, inputs: Sequence[Input], headers: Pairs, run: Run) -> None:
        try:
            question = await asyncio.to_thread(self._asker.question, inputs, headers, said)
            if not job.done:
                self._ask(job, said.control, question, run)
        except BaseException:
            job.fail(ServeError("The request could not be read for the cache"))
            raise

    def _ask(self, job: Job, control: Control, question: Question, run: Run) -> None:
        kept = self.shelf.find(question.digest) if control.reads else None
        if kept is not None:
            self.give(job, question.wish, kept, HIT)
            self.hit_s += time.monotonic() - job.queued_at_s
            return
        flight = self.flights.get(question.digest) if control.reads else None
        if flight is None:
            flight = _Flight(self, question, control, partial(run, question.inputs, question.headers))
            self.flights[question.digest] = flight
            self.miss_s += time.monotonic() - job.queued_at_s
        flight.join(job, question.wish)

    def give(
        self, job: Job, wish: Wish | None, answer: Answer, word: str, write: Callable[[Wish], Answer] | None = None
    ) -> None:
        """Delivers an answer in the form that the request's client wants, which `write` makes, None for `_written`."""
        if job.done:
            return
        if word == HIT:
            self.hits += 1
        else:
            self.misses += 1
        if wish is not None and not wish.is_plain and answer.size_bytes > INLINE_BYTES_MAX:
            later = _deliver_later(job, write or partial(_written, answer), wish, word)
            watched(later, "Writing an answer of the cache")
            return
        try:
            _deliver(job, answer if wish is None else (write or partial(_written, answer))(wish), word)
        except Exception:  # the others still get theirs
            log.exception("An answer of the cache could not be written")
            job.fail(ServeError(UNWRITTEN))


def _written(answer: Answer, wish: Wish) -> Answer:
    found = [tensors.written(piece, wish) for piece in answer.pieces]
    more = found[0][1] if found else ()
    return answer._replace(pieces=[data for data, _ in found], headers=(*answer.headers, *more))


async def _deliver_later(job: Job, write: Callable[[Wish], Answer], wish: Wish, word: str) -> None:
    try:
        _deliver(job, await asyncio.to_thread(write, wish), word)
    finally:
        job.fail(ServeError(UNWRITTEN))  # it is done by now unless that failed


def _deliver(job: Job, answer: Answer, word: str) -> None:
    headers = (*answer.headers, (CACHE_HEADER, word))
    pieces = answer.pieces or [b""]
    now_s = time.monotonic()
    for number, piece in enumerate(pieces, 1):
        job.deliver(Chunk(job.id, piece, number == len(pieces), answer.status, "", headers), now_s)


class _Flight(NoOwner):
    """A question that is being answered, and the jobs that wait for it. It owns them; its own job runs the handler."""

    def __init__(self, cache: ModelCache, question: Question, control: Control, run: Callable[[], Job]) -> None:
        self._cache, self._question, self._control, self._run = cache, question, control, run
        self._waiting: dict[Job, tuple[Wish | None, asyncio.TimerHandle | None]] = {}
        self._word = MISS  # of the first job's answer
        self._sent_at_s = 0.0
        self._task: asyncio.Task[None] | None = watched(self._fly(), "A run of the cache")

    def join(self, job: Job, wish: Wish | None) -> None:
        job.owner = self
        timer = None
        if job.deadline_s != math.inf:
            delay_s = max(0.0, job.deadline_s - time.monotonic())
            timer = asyncio.get_running_loop().call_later(delay_s, self._expire, job)
        self._waiting[job] = wish, timer

    def release(self, job: Job) -> None:
        """A caller has gone, or its deadline has passed. The last one ends the run."""
        _, timer = self._waiting.pop(job, (None, None))
        if timer is not None:
            timer.cancel()
        if not self._waiting and self._task is not None:
            self._land()
            self._task.cancel()
            self._task = None  # it keeps its end with the frames, which refer to this flight

    def _expire(self, job: Job) -> None:
        waited_ms = (time.monotonic() - job.queued_at_s) * 1000
        job.expire(DeadlineExceeded(f"Deadline passed after {waited_ms:.0f} ms, before the model had answered"))
        self.release(job)

    def _land(self) -> None:
        if self._cache.flights.get(self._question.digest) is self:
            del self._cache.flights[self._question.digest]

    async def _fly(self) -> None:
        failed: Ending | None = None
        answer: Answer | None = None
        try:
            answer = await self._answer()
        except ServeError as error:
            failed = error.ending()
        finally:
            self._land()
            waiting, self._waiting = self._waiting, {}
            for job, (_, timer) in waiting.items():
                if timer is not None:
                    timer.cancel()
                if answer is None:
                    job.fail(failed.error() if failed is not None else ServeError("The answer was lost"))
        if answer is not None:
            await self._give(waiting, answer)

    async def _answer(self) -> Answer:
        remote, digest = self._cache.remote, self._question.digest
        if remote is not None and self._control.reads:
            found = await remote.get(digest)
            if found is not None:
                self._word = HIT
                return found
        job = self._run()
        pieces = await job.pieces()
        self._sent_at_s = job.sent_at_s
        return Answer(pieces, [pair for pair in job.headers if pair[0] != COLD_HEADER], job.status)

    async def _give(self, waiting: Mapping[Job, tuple[Wish | None, Any]], answer: Answer) -> None:
        cache, digest, new = self._cache, self._question.digest, self._word == MISS
        keeps = cache.keep(digest, answer)
        write = lru_cache(WRITTEN_MAX)(partial(_written, answer))
        for job, (wish, _) in waiting.items():
            job.owner, job.sent_at_s = None, max(job.queued_at_s, self._sent_at_s)
            cache.give(job, wish, answer, self._word, write)
            self._word = HIT
        if new and keeps and cache.remote is not None:
            await cache.remote.put(digest, answer, cache.ttl_s)
