"""Where the time of a request goes: its parts, the worker's stopwatch, the header and the trailer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from streams import Http2Client
from support import JobOwner
from ts.protocol.decoder import Decoder
from ts.protocol.frames import Input, Item, Measure, Message, Predict, Times
from ts.runtime.jobs import Ledger as WorkerLedger
from ts.runtime.jobs import SilentLedger
from ts.runtime.main import MEASURED_MAX, Stopwatch
from ts_frontend.grpc.call import Call, identified
from ts_frontend.http.app import Cors, HttpApp
from ts_frontend.http.request import BodyLimits, HttpAnswer
from ts_frontend.http.routing import Guard, Hosts, RouteTable
from ts_frontend.job import Job, Ledger, RequestIds, Whereabouts
from ts_frontend.telemetry.timing import JOBS_TOLD_MAX, Asking, JobTimes, RequestTimes

INPUT = [Input("data", "", b"x")]


class Placing(JobOwner):
    """A worker that jobs are sent to."""

    def __init__(self, place: Whereabouts) -> None:
        super().__init__()
        self.place = place

    def measure(self, job: Job) -> Whereabouts:
        return self.place


def sent(
    *, ready_at_s: float = 0.0, free_since_s: float | None = None, batches: bool = False, size: int = 1
) -> JobTimes:
    """The times of a job that was queued at 100 s and sent at 110 s."""
    times = JobTimes("m 1.0", batches)
    job = Job(Ledger(), INPUT, request_id="r", timing=times)
    worker = Placing(Whereabouts(9000, size, ready_at_s, free_since_s))
    job.queued_at_s = 100.0
    job.enqueue(worker)
    job.send(worker, 110.0)
    return times


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ({}, (10.0, 0.0, 0.0)),
        ({"ready_at_s": 104.0}, (6.0, 0.0, 4.0)),
        ({"free_since_s": 103.0, "batches": True}, (3.0, 7.0, 0.0)),
        ({"free_since_s": 50.0, "batches": True}, (0.0, 10.0, 0.0)),
        ({"free_since_s": 103.0}, (10.0, 0.0, 0.0)),  # it waits for nobody
        ({"ready_at_s": 104.0, "free_since_s": 104.0, "batches": True}, (0.0, 6.0, 4.0)),
        ({"ready_at_s": 120.0}, (0.0, 0.0, 10.0)),
    ],
)
def test_the_time_in_the_queue_has_three_parts(place: Any, expected: tuple[float, float, float]) -> None:
    parts = sent(**place).parts()
    assert parts is not None and parts[:3] == pytest.approx(expected)
    assert parts.handler_s is None, "no worker has told anything yet"


def test_the_workers_times_follow() -> None:
    times = sent(size=3)
    times.measured(Times(1, 111.0, 115.0, 115.5), 116.0)
    parts = times.parts()
    assert parts is not None
    assert (parts.transfer_s, parts.handler_s, parts.encode_s) == pytest.approx((1.5, 4.0, 0.5))
    assert times.entries() == [
        "queue;dur=10000.000",
        "batch-wait;dur=0.000",
        'batch;desc="3"',
        "transfer;dur=1500.000",
        "handler;dur=4000.000",
        "encode;dur=500.000",
        'worker;desc="9000"',
        "cold-start;dur=0.000",
    ]


def test_of_many_jobs_the_latest_are_told_with_their_models() -> None:
    times = RequestTimes(told=True)
    for number in range(JOBS_TOLD_MAX + 3):
        times.add(f"m{number} 1.0", False)
    assert times.text().count("model;desc=") == JOBS_TOLD_MAX
    assert 'desc="m3 1.0"' in times.text() and 'desc="m2 1.0"' not in times.text()


async def _times_of_tasks() -> list[bool]:
    asking = Asking()

    async def asked() -> bool:
        asking.begin(RequestTimes(told=True))
        found = await asyncio.create_task(job())  # tasks made for it are timed, too
        asking.end()
        return found and asking.job("m", False) is None

    async def job() -> bool:
        return asking.job("m", False) is not None

    return list(await asyncio.gather(job(), asked(), job()))


def test_only_the_request_that_asks_is_timed() -> None:
    assert asyncio.run(_times_of_tasks()) == [False, True, False]


def test_a_grpc_call_asks_by_metadata() -> None:
    asks, other = Call("/a/b", [("x-torchrelay-timing", "1")]), Call("/a/b", [("x-torchrelay-timing", "0")])
    for call in (asks, other):
        identified(call, RequestIds())
    assert not asks.adds_nothing and asks.last_metadata()[-1][0] == "server-timing"
    assert other.adds_nothing and other.last_metadata() == []


def test_a_call_that_only_the_log_asks_about_tells_its_client_nothing() -> None:
    call = Call("/a/b")
    call.time_jobs(told=False)
    assert call.times is not None and call.last_metadata() == []


# --- the worker


class Runner:
    def __init__(self, entry: Callable[[Any, Any], Any]) -> None:
        self.entry: Any = entry


class Context:
    def __init__(self, ledger: WorkerLedger) -> None:
        self._batch = ledger.queue[-1]


def told(ledger: WorkerLedger) -> list[Message]:
    data = b"".join(ledger.outbox.buffers())
    return Decoder(1 << 20).feed(data)


def measured(ledger: WorkerLedger, entry: Callable[[Any, Any], Any], *, awaits: bool = False) -> Runner:
    """A worker that has request 7, which somebody asks about, and request 8, in one batch."""
    runner = Runner(entry)
    ledger.on_measure = Stopwatch(ledger, runner, awaits=awaits).measure
    ledger.receive(Measure(7))
    ledger.receive(Predict(1, [Item(number, "r", 1e18, (), INPUT) for number in (7, 8)]))
    return runner


def test_a_stream_ends_with_its_last_piece() -> None:
    ledger = WorkerLedger(1000, 1000)
    runner = measured(ledger, lambda rows, context: (piece for piece in [b"a"]))
    runner.entry([{}, {}], Context(ledger))
    job = ledger.queue[-1].jobs[0]
    ledger.give(job, b"a", False)
    assert [type(one).__name__ for one in told(ledger)] == ["Chunk"]
    ledger.give(job, b"b", True)
    found = [one for one in told(ledger) if isinstance(one, Times)]
    assert found and found[0].ended_s == found[0].given_s


def test_an_async_handler_ends_when_it_was_awaited() -> None:
    ledger = WorkerLedger(1000, 1000)
    woken: list[float] = []

    async def handle(rows: Any, context: Any) -> list[bytes]:
        await asyncio.sleep(0)
        woken.append(time.monotonic())
        return [b"a", b"b"]

    runner = measured(ledger, handle, awaits=True)

    async def run() -> None:
        ledger.give(ledger.queue[-1].jobs[0], (await runner.entry([{}, {}], Context(ledger)))[0], True)

    asyncio.run(run())
    found = [one for one in told(ledger) if isinstance(one, Times)]
    assert found[0].begun_s <= woken[0] <= found[0].ended_s


def test_requests_that_never_come_are_forgotten() -> None:
    ledger = SilentLedger(1000, 1000)
    stopwatch = Stopwatch(ledger, Runner(print), awaits=False)
    for number in range(MEASURED_MAX + 10):
        stopwatch.measure(number)
    assert len(stopwatch._laps) == MEASURED_MAX


# --- HTTP


async def streamed() -> AsyncIterator[Sequence[bytes]]:
    yield [b"a"]


async def test_a_stream_has_a_trailer_too() -> None:
    limits, guard = BodyLimits(1, 1), Guard(Hosts(""))
    app = HttpApp(RouteTable((), ()), str, guard=guard, log=None, cors=Cors(), limits=limits)
    client = Http2Client()
    stream = client.request(headers=[(b"te", b"trailers")])
    await app._send(stream, HttpAnswer(200, (), streamed()), RequestTimes(told=True))
    answer = client.answer(stream)
    assert answer.ended and answer.body == b"a" and answer.headers[b"server-timing"].startswith(b"total;dur=")
    assert answer.headers[b"trailer"] == b"server-timing"
    assert answer.trailers[b"server-timing"].startswith(b"total;dur=")
