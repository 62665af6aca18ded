"""The limits of queues and workers: tickets, bursts, capacities, requests that fit no message."""

from __future__ import annotations

import asyncio
import io
import logging
import socket
import time

import pytest

from support import GUARD_S, OneBatchWorker, turns
from ts.protocol.decoder import Decoder
from ts.protocol.frames import Cancel, Chunk, Input, Predict, encode_bytes
from ts_frontend.errors import Code, DeadlineExceeded, InvalidArgument, QueueFull, WorkerDied
from ts_frontend.job import Job, JobState, Ledger
from ts_frontend.scheduling.batcher import Policy
from ts_frontend.scheduling.queues import AHEAD_S, JobQueue, TicketQueue
from ts_frontend.workers.in_flight import Connection, InFlight
from ts_frontend.workers.process import ExitStatus, ProcessSpec, WorkerPlan, WorkerProcess
from ts_frontend.workers.resources import CPU
from ts_frontend.workers.worker import Worker, WorkerState


class Taking(OneBatchWorker):
    """A worker that takes one batch and keeps it."""

    def __init__(self) -> None:
        self.running: list[Job] = []
        self.limits: list[float] = []

    def room(self, ahead_s: float = AHEAD_S) -> float:
        self.limits.append(ahead_s)
        return 0 if self.running else 2

    def dispatch(self, jobs: list[Job], now_s: float) -> None:
        for each in jobs:
            each.move(JobState.SENT)
        self.running += jobs


def job(ledger: Ledger, name: str = "data", **more: object) -> Job:
    return Job(ledger, [Input(name, "", b"x")], request_id="r", **more)  # type: ignore[arg-type]


class Looked(JobQueue):
    """Counts how often all waiting jobs are looked at."""

    looks = 0

    def waiting(self) -> list[Job]:
        self.looks += 1
        return super().waiting()


@pytest.mark.pure_form  # it derives from JobQueue
async def test_a_full_queue_refuses_without_a_look_at_every_job() -> None:
    queue, ledger, far_s = Looked(Policy(jobs_max=1000)), Ledger(), time.monotonic() + 1000
    for number in range(1000):
        queue.put(job(ledger, deadline_s=far_s + number))
    for _ in range(100):
        with pytest.raises(QueueFull):
            queue.put(job(ledger))
    assert queue.looks == 0
    queue.expire(far_s)
    assert (queue.looks, len(queue)) == (1, 999)
    queue.expire(far_s + 0.5)
    assert queue.looks == 1
    queue.expire(far_s + 2)
    assert (queue.looks, len(queue)) == (2, 997)


async def test_a_ticket_is_an_idle_worker() -> None:
    queue, ledger = TicketQueue(Policy(jobs_max=100), "all are busy"), Ledger()
    with pytest.raises(QueueFull, match="all are busy"):
        queue.put(job(ledger))
    for _ in range(2):
        queue.attach(Taking())
    queue.put(job(ledger))
    queue.put(job(ledger))
    for _ in range(2):
        with pytest.raises(QueueFull, match="all are busy"):
            queue.put(job(ledger))
        await turns()


@pytest.mark.parametrize(
    ("kind", "limit", "taken", "room"),
    [
        ("generator", 3, 2, 1.0),
        ("async", 3, 3, 0.0),
        ("continuous", 3, 1, 1.5),
        ("continuous", 3, 2, 1.25),
        ("continuous", 3, 3, 0.0),
    ],
)
def test_how_much_more_a_worker_takes(kind: str, limit: int, taken: int, room: float) -> None:
    running, ledger = InFlight(), Ledger()
    running.set_concurrency(kind, limit)
    assert running.room() == 2
    for _ in range(taken):
        each = job(ledger)
        each.move(JobState.QUEUED)
        running.begin([each], None, time.monotonic())
    assert running.room() == room


async def test_a_request_that_fits_no_message_fails_and_its_batch_goes_on_without_it() -> None:
    ours, theirs = socket.socketpair()
    queue, ledger = JobQueue(Policy(batch_size=3)), Ledger()
    worker = Worker(1, WorkerPlan(ProcessSpec("m", {}), {}, 1, 1, 1 << 20), CPU, queue)
    worker._connection = Connection(ours, lambda messages: None, lambda reason: None, 1 << 20)
    worker.state = WorkerState.READY
    jobs = [job(ledger), job(ledger, "n" * 70_000), job(ledger)]
    for each in jobs:
        queue.put(each)
    queue.attach(worker)
    await turns()
    with pytest.raises(InvalidArgument, match="can't be passed to a worker"):
        await jobs[1].result()
    assert [each.state for each in jobs] == [JobState.SENT, JobState.FAILED, JobState.SENT]
    assert not worker.holds(jobs[1])
    sent = Decoder(1 << 20).feed(theirs.recv(1 << 20))
    ids = [item.job_id for message in sent if isinstance(message, Predict) for item in message.items]
    assert ids == [jobs[0].id, jobs[2].id]
    worker._connection.close()
    theirs.close()


def ready_worker(queue: JobQueue, ours: socket.socket) -> Worker:
    worker = Worker(1, WorkerPlan(ProcessSpec("m", {}), {}, 1, 1000, 1 << 20), CPU, queue)
    worker._connection = Connection(ours, worker._received, worker._closed, 1 << 20)
    worker.state = WorkerState.READY
    return worker


async def test_a_deadline_ends_what_runs_and_the_time_to_begin_does_not() -> None:
    ours, theirs = socket.socketpair()
    queue, ledger = JobQueue(Policy(batch_size=2)), Ledger()
    worker = ready_worker(queue, ours)
    now_s = time.monotonic()
    data = [Input("data", "", b"")]
    bound = Job(ledger, data, request_id="r", deadline_s=now_s + 60, ends_s=now_s + 60)
    patient = Job(ledger, data, request_id="r", deadline_s=now_s + 60)  # clientTimeoutInMills is a limit to begin
    for each in (bound, patient):
        queue.put(each)
    queue.attach(worker)
    await turns()
    worker.tick(now_s + 59)
    assert (bound.state, patient.state) == (JobState.SENT, JobState.SENT)
    worker.tick(now_s + 61)
    with pytest.raises(DeadlineExceeded, match="after the request was given to a worker"):
        await bound.result()
    assert (bound.state, patient.state) == (JobState.EXPIRED, JobState.SENT)
    worker.flush()
    told = Decoder(1 << 20).feed(theirs.recv(1 << 20))
    assert [message.job_id for message in told if isinstance(message, Cancel)] == [bound.id]
    theirs.sendall(encode_bytes(Chunk(bound.id, b"late")) + encode_bytes(Chunk(patient.id, b"in time")))
    assert await patient.result() == b"in time"
    assert not worker.busy
    assert worker._connection is not None
    worker._connection.close()
    theirs.close()


async def test_a_worker_whose_end_cannot_be_settled_is_gone_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    ours, theirs = socket.socketpair()
    queue, ledger = JobQueue(Policy()), Ledger()
    worker = ready_worker(queue, ours)
    worker._loaded.set_result(None)
    worker.process = WorkerProcess(1 << 30, "m", ours, io.BytesIO())  # without a descriptor: its progress can't be read
    worker.process.exited.set_result(ExitStatus(-9))
    running = job(ledger)
    queue.put(running)
    queue.attach(worker)
    await turns()
    theirs.close()
    with pytest.raises(WorkerDied, match="killed by SIGKILL") as died:
        await asyncio.wait_for(running.result(), GUARD_S)
    assert died.value.code is Code.UNAVAILABLE
    assert "SIGKILL" in await asyncio.wait_for(worker.ended, GUARD_S)
    assert worker.state is WorkerState.FAILED and not worker.busy
    assert "could not be settled" in caplog.text
