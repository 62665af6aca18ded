"""A model version's cache: answers that are kept, and requests that wait for one run because they ask the same.

Every request has a job of its own, with its own deadline and its own caller: it ends as any other, and a kept answer is
delivered to it at once. A run is a further job, which isn't counted as a request. It ends early only when the last of
its waiting requests has gone.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final, TypeAlias

from ts.protocol.frames import Chunk, Feed, Input, Pairs, size_of
from ts_frontend.caching import tensors
from ts_frontend.caching.answers import Answer, CacheRule, Memory, Shelf
from ts_frontend.caching.questions import Asker, Control, Question, Said
from ts_frontend.caching.remote import RemoteAnswers
from ts_frontend.caching.tensors import Wish
from ts_frontend.errors import DeadlineExceeded, Ending, ServeError
from ts_frontend.job import COLD_HEADER, Job, Whereabouts
from ts_frontend.tasks import watched

log: Final = logging.getLogger(__name__)

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
