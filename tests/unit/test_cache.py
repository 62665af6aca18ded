"""Requests that wait for one run, the answers that are kept, and their memory. The jobs are the server's own."""

from __future__ import annotations

import gc
import math
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import until_async
from ts.protocol.frames import Chunk, Input, Pairs
from ts_frontend.caching.cache import (
    ENTRY_BYTES,
    INLINE_BYTES_MAX,
    Answer,
    Asker,
    CacheRule,
    Caches,
    Memory,
    ModelCache,
    Shelf,
    packed,
    unpacked,
)
from ts_frontend.errors import DeadlineExceeded, HandlerFailed, QueueFull
from ts_frontend.job import COLD_HEADER, Job, JobState, Ledger
from ts_frontend.scheduling.batcher import Policy
from ts_frontend.scheduling.queues import JobQueue

MIB = 1 << 20


class Model:
    """A cache of a model whose runs the test answers."""

    def __init__(self, cache: ModelCache | None = None) -> None:
        self.cache = cache or Caches(MIB).of(Asker("m", "1", frozenset()), CacheRule())
        self.ledger = Ledger()
        self.queue = JobQueue(Policy(batch_size=1, delay_s=0, lone_waits=False, jobs_max=100))
        self.runs: list[Job] = []

    def run(self, inputs: Sequence[Input], headers: Pairs) -> Job:
        job = Job(self.ledger, inputs, "run", headers)
        self.queue.put(job)
        self.runs.append(job)
        return job

    def ask(self, data: bytes = b"x", headers: Pairs = (), deadline_s: float = math.inf) -> Job:
        job = Job(self.ledger, (), "asker", deadline_s=deadline_s)
        inputs = [Input("body", "", data)]
        said = self.cache.takes(inputs, headers)
        assert said is not None
        return self.cache.answer(job, said, inputs, headers, self.run)

    async def running(self, count: int) -> Job:
        await until_async(lambda: len(self.runs) == count)
        return self.runs[-1]

    def answer(self, job: Job, data: bytes = b"y", *, status: int = 200, headers: Pairs = ()) -> None:
        self.queue.release(job)
        job.send(None, time.monotonic())
        job.deliver(Chunk(job.id, data, True, status, "", headers))


def word(job: Job) -> str:
    return dict(job.headers)["x-cache"]


async def asked_and_answered(model: Model, data: bytes = b"x", **answer: Any) -> Job:
    job = model.ask(data)
    model.answer(await model.running(len(model.runs) + 1), **answer)
    await job.result()
    return job


async def test_the_second_request_gets_the_first_ones_answer() -> None:
    model = Model()
    headers = [("kind", "a"), (COLD_HEADER, "7")]
    first = await asked_and_answered(model, headers=headers)
    second = model.ask()
    assert second.state is JobState.ANSWERED, "at once"
    assert bytes(await second.result()) == b"y" == bytes(await first.result())
    assert (word(first), word(second)) == ("MISS", "HIT")
    assert dict(second.headers) == {"kind": "a", "x-cache": "HIT"}
    assert (model.cache.hits, model.cache.misses, len(model.runs)) == (1, 1, 1)
    assert word(await asked_and_answered(model, b"other")) == "MISS"


async def test_a_thousand_at_once_run_once() -> None:
    model = Model()
    jobs = [model.ask() for _ in range(1000)]
    model.answer(await model.running(1))
    assert {bytes(await job.result()) for job in jobs} == {b"y"}
    assert [word(job) for job in jobs] == ["MISS"] + ["HIT"] * 999
    assert not model.ledger.live


async def test_who_leaves_ends_the_run_only_as_the_last() -> None:
    model = Model()
    jobs = [model.ask() for _ in range(3)]
    run = await model.running(1)
    jobs[0].cancel()
    jobs[1].cancel()
    assert not run.done
    jobs[2].cancel()
    await until_async(lambda: run.done)
    assert run.state is JobState.CANCELLED
    assert not model.ledger.live and not model.cache.flights
    later = model.ask()
    model.answer(await model.running(2), b"new")
    assert bytes(await later.result()) == b"new"


async def test_each_waits_until_its_own_deadline() -> None:
    model = Model()
    late = model.ask(deadline_s=time.monotonic())
    patient = model.ask()
    run = await model.running(1)
    assert run.deadline_s == math.inf
    with pytest.raises(DeadlineExceeded):
        await late.result()
    assert late.state is JobState.EXPIRED and not run.done
    model.answer(run)
    assert bytes(await patient.result()) == b"y"


async def test_a_refused_run_fails_its_requests() -> None:
    model = Model()
    model.queue.policy = replace(model.queue.policy, jobs_max=1)
    model.ask(b"first")
    await model.running(1)
    with pytest.raises(QueueFull):
        await model.ask(b"second").result()
    model.runs[0].cancel()


async def test_an_answer_of_several_pieces_goes_whole_to_all_and_closes_the_cache() -> None:
    model = Model()
    jobs = [model.ask(), model.ask()]
    run = await model.running(1)
    model.queue.release(run)
    run.send(None, time.monotonic())
    run.deliver(Chunk(run.id, b"1", False))
    run.deliver(Chunk(run.id, b"2", True))
    assert [bytes(await job.result()) for job in jobs] == [b"12", b"12"]
    assert model.cache.takes([Input("body", "", b"x")], ()) is None


async def test_a_large_request_is_read_beside_the_loop() -> None:
    model = Model()
    large = b"x" * (INLINE_BYTES_MAX + 1)
    gone = model.ask(large)
    gone.cancel()
    first = model.ask(large)
    model.answer(await model.running(1))
    assert bytes(await first.result()) == b"y"
    again = model.ask(large)
    assert bytes(await again.result()) == b"y" and word(again) == "HIT"


async def test_a_closed_cache_keeps_nothing_of_a_run_that_ends_later() -> None:
    model = Model()
    job = model.ask()
    run = await model.running(1)
    model.cache.close()
    model.answer(run)
    assert bytes(await job.result()) == b"y"
    assert not len(model.cache.shelf)


async def test_nothing_is_left_for_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        seen = [weakref.ref(flight) for flight in await flights()]
        await until_async(lambda: not any(one() for one in seen), "a flight is still alive")
    finally:
        gc.enable()


async def flights() -> list[Any]:
    """Flights that were answered, failed, left, and left before they began."""
    model = Model()
    found: list[Any] = []
    for end in ("answer", "fail", "leave", "at once"):
        job = model.ask(end.encode(), deadline_s=time.monotonic() + 1000)
        found += model.cache.flights.values()
        if end == "at once":
            job.cancel()
            break
        run = await model.running(len(model.runs) + 1)
        if end == "answer":
            model.answer(run)
        elif end == "fail":
            run.fail(HandlerFailed(500, "broken"))
        else:
            job.cancel()
        await until_async(lambda job=job: job.done)  # type: ignore[misc]
    await until_async(lambda: not model.ledger.live)
    return found


# --- memory


def answer(size: int) -> Answer:
    return Answer([bytes(size)])


def test_the_least_used_goes_first_and_a_large_one_is_not_kept() -> None:
    shelf = Shelf(Memory(8 * (ENTRY_BYTES + 100)), CacheRule())
    for key in range(8):
        shelf.keep(bytes([key]), answer(100))
    assert shelf.find(b"\0") is not None
    shelf.keep(b"new", answer(100))
    assert shelf.find(b"\1") is None and shelf.find(b"\0") is not None and shelf.evicted == 1
    shelf.keep(b"large", answer(2 * (ENTRY_BYTES + 100)))
    assert shelf.find(b"large") is None and len(shelf) == 8


async def test_an_answer_lasts_for_its_ttl() -> None:
    shelf = Shelf(Memory(MIB), CacheRule(ttl_s=0.01))
    shelf.keep(b"k", answer(1))
    begun_s = time.monotonic()
    await until_async(lambda: shelf.find(b"k") is None)
    assert time.monotonic() - begun_s >= 0.009
    assert shelf.used_bytes == 0
    lasting = Shelf(Memory(MIB), CacheRule(ttl_s=1e6))
    lasting.keep(b"k", answer(1))
    assert lasting.find(b"k") is not None


steps = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5), st.integers(0, 900), st.booleans()), max_size=60)


@given(steps, st.integers(0, 12_000), st.integers(0, 12_000))
def test_memory_is_bounded_and_answers_are_those_that_were_kept(
    steps: list[tuple[int, int, int, bool]], size: int, own: int
) -> None:
    memory = Memory(size)
    shelves = [Shelf(memory, CacheRule()), Shelf(memory, CacheRule(size_bytes=own))]
    latest: dict[tuple[int, int], Answer] = {}
    for number, key, length, keeps in steps:
        if keeps:
            latest[number, key] = answer(length)
            shelves[number].keep(bytes([key]), latest[number, key])
        found = shelves[number].find(bytes([key]))
        assert found is None or found == latest[number, key]
        assert memory.used_bytes == sum(shelf.used_bytes for shelf in shelves) <= size
        assert not own or shelves[1].used_bytes <= own
    for shelf in shelves:
        shelf.clear()
    assert memory.used_bytes == 0


# --- values of Redis

VALUES = [Answer([b"y"], [("a", "b")]), Answer([], []), Answer([b"\n\n"], [])]


@pytest.mark.parametrize("kept", VALUES)
def test_a_value_gives_its_answer_only_under_its_key(kept: Answer) -> None:
    value = packed(b"k", kept)
    assert unpacked(b"k", value) == kept
    assert unpacked(b"other", value) is None


@given(st.sampled_from(VALUES), st.data())
def test_a_broken_value_is_none(kept: Answer, data: st.DataObject) -> None:
    value = bytearray(packed(b"k", kept))
    at = data.draw(st.integers(0, len(value) - 1))
    assert unpacked(b"k", bytes(value[:at])) is None
    value[at] ^= data.draw(st.integers(1, 255))
    assert unpacked(b"k", bytes(value)) is None
