"""The console's numbers, its collector, its files, and the answer at `/`."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest

from support import until_async
from ts.protocol.frames import Chunk
from ts_frontend.console.collector import (
    COLUMNS,
    READERS_MAX,
    Collector,
    ModelWatch,
    Pace,
    TooManyReaders,
    model_state,
    worker_log,
)
from ts_frontend.console.site import KINDS, Site
from ts_frontend.errors import Draining
from ts_frontend.http.console import prefers_html
from ts_frontend.job import Job, JobState, Ledger
from ts_frontend.models.health import Health
from ts_frontend.models.model import CountedBatches, OpenAIHandler, Registry
from ts_frontend.models.settings import ModelSettings, Signature, TensorSpec
from ts_frontend.telemetry.metrics.families import read_definitions
from ts_frontend.telemetry.metrics.registry import (
    DEFAULT_FILE,
    FIRST_TOKEN,
    GENERATED_TOKENS,
    PROMPT_TOKENS,
    MetricsRegistry,
)
from ts_frontend.telemetry.metrics.requests import LatencyCounts, quantiles_s
from ts_frontend.telemetry.metrics.system import GpuReader, Gpus
from ts_frontend.workers.memory import WorkerMemory
from ts_frontend.workers.process import Failure
from ts_frontend.workers.resources import CPU
from ts_frontend.workers.worker import WorkerState

METRICS = MetricsRegistry(read_definitions(DEFAULT_FILE), "log", "vm")
run_test = asyncio.run  # a collector lingers after its last reader


class PlayedWorker:
    """A worker whose memory and lines are given."""

    def __init__(self, lines: tuple[str, ...] = ()) -> None:
        self.pid, self.started_at, self.state, self.reads = 7, 5.0, WorkerState.READY, 0
        self.node: dict[str, str] = {}
        self.lines = lines

    @property
    def memory_bytes(self) -> int:
        self.reads += 1
        return 1000 + self.reads

    def tail(self) -> list[str]:
        return list(self.lines)


class PlayedSlot:
    def __init__(self, worker: PlayedWorker | None) -> None:
        self.id, self.worker, self.device, self.gave_up, self.failures = 9000, worker, CPU, False, 0
        self.waits_for = ""


class PlayedPool:
    def __init__(self, *slots: PlayedSlot) -> None:
        self.slots = list(slots)
        self.load_failure = self.last_replacement = None
        self.last_failure: Failure | None = None


class Played:
    """A model without processes: its requests are answered by `answer`."""

    def __init__(self, name: str = "m") -> None:
        self.name, self.version, self.url, self.created_s = name, "1.0", "m.mar", 7.0
        self.ledger, self.settings, self.signature = Ledger(), ModelSettings(), Signature()
        self.pool = PlayedPool(PlayedSlot(PlayedWorker(("a line",))))
        self.workflow = self.adapter = ""
        self.minimum = self.maximum = 1
        self.takes_tensors = self.streams = self.failing = self.loading = self.loaded_at_startup = False
        self.scaler = self.resident = self.openai = None
        self.tokens: dict[str, tuple[float, int]] = {}
        self.ready = True
        self.metrics = METRICS.model(name, "1.0")
        self.counted = CountedBatches(self.metrics.batches)
        self.observed: list[LatencyCounts | None] = []

    def observe(self, latencies: LatencyCounts | None) -> None:
        self.observed.append(latencies)
        self.metrics.observe(latencies)

    @property
    def statistics(self) -> Any:
        return self.counted.read(self.ledger)

    def sent(self) -> Job:
        job = Job(self.ledger, [], request_id="r", recorder=self.metrics.requests(False).answered, stream=True)
        job.move(JobState.QUEUED)
        job.move(JobState.SENT)
        return job

    def answer(self, size: int = 1) -> None:
        jobs = [self.sent() for _ in range(size)]
        for job in jobs:
            job.deliver(Chunk(job.id, b"x", last=True))
        self.counted.answered(jobs, 0.0, 0.004, 0.0)


def served(*models: Any) -> Registry:
    registry = Registry()
    for model in models:
        registry.add(model)
    return registry


# --- numbers


def test_quantiles_lie_in_their_buckets() -> None:
    counts = LatencyCounts()
    for number in range(1, 1001):
        counts.add(number / 1000)
    found = quantiles_s(counts.counts, (0.5, 0.95, 0.99, 1.0))
    assert found is not None
    for value, exact in zip(found, (0.5, 0.95, 0.99, 1.0), strict=True):
        assert exact / 1.13 <= value <= exact * 1.13
    assert found == sorted(found)
    assert quantiles_s([0] * len(counts.counts), (0.5,)) is None


def test_a_row_has_the_numbers_of_now_and_of_the_last_seconds() -> None:
    model = Played()
    model.observe(None)
    watch = ModelWatch(model)  # type: ignore[arg-type]
    model.observe(watch.latencies)
    assert watch.row(10.0)[0][:3] == [0, 0, 0]
    model.answer(size=3)
    open_job = model.sent()
    open_job.deliver(Chunk(open_job.id, b"12345", last=False))
    row, batches = watch.row(10.5)
    found = dict(zip(COLUMNS, row, strict=True))
    assert (found["answered_per_s"], found["batch_size"], found["running"]) == (6, 3, 1)
    assert (found["streams"], found["stream_bytes_per_s"]) == (1, 10)
    assert found["p99_ms"] is not None and batches == {3: 2.0}
    open_job.deliver(Chunk(open_job.id, b"67", last=False))
    assert dict(zip(COLUMNS, watch.row(11.0)[0], strict=True))["stream_bytes_per_s"] == 4
    assert dict(zip(COLUMNS, watch.row(99.0)[0], strict=True))["answered_per_s"] == 0  # long ago


def test_a_model_that_classifies_texts_has_no_chat() -> None:
    """It speaks OpenAI's API for another call, and declares its output."""

    spec = (TensorSpec("text", "BYTES", (-1,)),)

    def chats(signature: Signature, speaks: bool = True) -> bool:
        model: Any = Played()
        model.signature, model.openai = signature, OpenAIHandler(speaks, (), None)
        return bool(model_state(model, True, lambda worker: 0)["chats"])

    assert chats(Signature()) and chats(Signature("language_model", spec, spec))
    assert not chats(Signature("language_model", (), spec)) and not chats(Signature(), speaks=False)


def test_a_language_models_tokens_of_the_last_seconds() -> None:
    model = Played()
    watch = ModelWatch(model)  # type: ignore[arg-type]
    assert COLUMNS[-3:] == ("prompt_tokens_per_s", "generated_tokens_per_s", "first_token_ms")
    assert watch.row(9.5)[0][-3:] == watch.row(10.0)[0][-3:] == [0, 0, None]
    model.tokens = {PROMPT_TOKENS: (10.0, 1), GENERATED_TOKENS: (5.0, 1), FIRST_TOKEN: (0.5, 1)}
    assert watch.row(10.5)[0][-3:] == [20, 10, 500]
    model.tokens = {PROMPT_TOKENS: (40.0, 2), GENERATED_TOKENS: (25.0, 4), FIRST_TOKEN: (0.8, 3)}
    assert watch.row(12.0)[0][-3:] == [20, 12.5, 267]
    watch.row(90.0)
    assert watch.row(99.0)[0][-3:] == [0, 0, None]


def test_memory_is_read_of_a_few_workers_at_a_time_by_turns() -> None:
    workers: list[Any] = [PlayedWorker() for _ in range(5)]
    memory = WorkerMemory(reads_max=2)
    for _ in range(5):
        memory.look(workers)
    assert [worker.reads for worker in workers] == [2, 2, 2, 2, 2]
    assert memory.of(workers[0]) > 1000
    memory.look(workers[1:])
    assert memory.of(workers[0]) == 0


def test_a_workers_lines() -> None:
    model: Any = Played()
    assert worker_log(model, "9000") == {"workerId": "9000", "pid": 7, "lines": ["a line"]}
    assert worker_log(model, "9001") is None and worker_log(model, "../9000") is None


# --- the collector

QUICK = Pace(sample_s=0.01, state_s=0.02, linger_s=0.05)


class WithoutDriver(GpuReader):
    """On a machine without the driver's library."""

    def _open(self) -> Any:
        return False


async def no_command(_: Sequence[str]) -> str | None:
    return None


def collector(
    registry: Registry, health: Health | None = None, pace: Pace = QUICK, gpus: Gpus | None = None
) -> Collector:
    health = health or Health(registry, frozenset())
    return Collector(registry, health, lambda: {"name": "torchrelay"}, gpus or Gpus(0, no_command), pace)


def parsed(events: list[bytes]) -> list[tuple[str, Any]]:
    found = []
    for block in b"".join(events).decode().split("\n\n"):
        if block.startswith("event: "):
            name, data = block.split("\n")
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


async def told(events: AsyncGenerator[list[bytes], None], name: str, count: int = 1) -> list[Any]:
    """The next events of that name."""
    found: list[Any] = []
    async for ready in events:
        found += [value for kind, value in parsed(ready) if kind == name]
        if len(found) >= count:
            return found
    raise AssertionError(f"the events ended before {count} of {name}")


async def test_samples_have_the_gpus_load_where_there_are_gpus() -> None:
    async def listed(command: Sequence[str]) -> str | None:
        return "0, 42, 20480, 81920\n1, [N/A], 0, 81920\n"

    gpus = Gpus(2, listed, WithoutDriver(2))
    watch = collector(served(Played("a")), gpus=gpus)
    events = watch.events()
    while not (found := (await told(events, "sample"))[-1]["machine"]["gpus"]):
        pass
    assert found == [{"index": 0, "busy_percent": 42.0, "used_bytes": 20 << 30, "total_bytes": 80 << 30}]
    await events.aclose()


async def test_readers_are_told_of_models_and_of_each_change() -> None:
    registry = served(Played("b"), Played("a"))
    events = collector(registry).events()
    ((_, history),) = parsed(await anext(events))
    assert history["columns"] == list(COLUMNS) and history["samples"] == []
    (state,) = await told(events, "state")
    assert [model["key"] for model in state["models"]] == ["a/1.0", "b/1.0"]
    assert state["server"] == {"name": "torchrelay", "ready": True, "draining": False}
    assert state["models"][0]["workers"][0]["memoryBytes"] > 1000
    added: Any = Played("c")
    added.pool.last_failure = Failure(1.5, 9001, "killed by SIGKILL", 2, ["line"] * 30)
    registry.add(added)
    while len((state := (await told(events, "state"))[0])["models"]) < 3:
        pass
    death = state["models"][2]["lastFailure"]
    assert death["reason"] == "killed by SIGKILL" and len(death["lastLines"]) == 20
    await events.aclose()


async def test_one_collector_works_for_all_and_only_while_somebody_reads() -> None:
    model: Any = Played()
    one = collector(served(model))
    assert not one.working and model.observed == []
    first, second = one.events(), one.events()
    await anext(first)
    await told(first, "sample", 2)
    watch = model.observed[0]
    await anext(second)
    assert (await told(second, "state"))[0]["models"]  # at once, without waiting for a change
    model.answer()
    await told(second, "sample", 2)
    assert model.observed == [watch] and sum(watch.counts) == 1
    await first.aclose()
    assert one.working
    await second.aclose()
    await until_async(lambda: not one.working, "the collector has ended")
    assert model.observed == [watch, None]
    again = one.events()
    await anext(again)
    assert (await told(again, "sample"))[0]["models"] == {}  # nothing is kept of before
    await again.aclose()
    await until_async(lambda: not one.working, "the collector has ended")


async def test_a_model_that_is_gone_is_no_longer_watched() -> None:
    model: Any = Played()
    registry = served(model)
    events = collector(registry).events()
    await anext(events)
    await told(events, "sample")
    registry.remove("m")
    while (await told(events, "state"))[0]["models"]:
        pass
    await told(events, "sample", 2)
    assert model.observed[-1] is None
    await events.aclose()


async def test_events_end_with_the_server_and_after_their_time() -> None:
    registry = served(Played())
    health = Health(registry, frozenset())
    one = collector(registry, health)
    events = one.events()
    await anext(events)
    health.drain()
    async for _ in events:
        pass
    with pytest.raises(Draining):
        await anext(one.events())
    short = collector(registry, pace=Pace(sample_s=0.01, read_s_max=0.05, linger_s=0.0)).events()
    async for _ in short:
        pass


async def test_readers_have_a_limit() -> None:
    one = collector(served(Played()))
    readers = [one.events() for _ in range(READERS_MAX)]
    for reader in readers:
        await anext(reader)
    with pytest.raises(TooManyReaders) as refused:
        await anext(one.events())
    assert refused.value.http_status == 503 and refused.value.retry_after_s
    await readers.pop().aclose()
    await anext(one.events())


# --- files, and `/`


def test_every_file_that_a_page_names_is_there_and_nothing_comes_from_elsewhere(root: Path) -> None:
    folder = root / "frontend/ts_frontend/console/site"
    site = Site()
    names = {path.name for path in folder.iterdir()}
    assert all(site.file(name) for name in names) and {Path(name).suffix for name in names} <= KINDS.keys()
    assert site.file("../__init__.py") is None and site.file("") is None
    for name in names - {"uPlot.min.js", "uPlot.min.css", "uPlot.LICENSE.txt"}:
        text = (folder / name).read_text()
        outside = [word for word in text.split() if "://" in word and "w3.org" not in word and "localhost" not in word]
        assert not outside, (name, outside)
        assert "innerHTML" not in text and "eval(" not in text and " style=" not in text, name
    page = (folder / "index.html").read_text()
    assert "<script>" not in page and "onclick" not in page
    for name in re.findall(r'"/console/([^"]+)"', page):
        assert site.file(name), name


@pytest.mark.parametrize(
    ("accept", "html"),
    [
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", True),
        ("TEXT/HTML;q=0.9", True),
        ("", False),
        ("*/*", False),
        ("application/json", False),
        ("application/json, text/html", False),
        ("text/html, application/json", True),
    ],
)
def test_people_get_a_page_and_programs_json(accept: str, html: bool) -> None:
    assert prefers_html(accept) is html
