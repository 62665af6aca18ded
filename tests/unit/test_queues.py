"""What queues accept, and how much a worker takes: tickets, bursts, capacities, requests that fit no message."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from ts.protocol.decoder import Decoder
from ts.protocol.frames import Input, Predict
from ts_frontend.batching.batcher import Policy
from ts_frontend.batching.job_queue import JobQueue, TicketQueue
from ts_frontend.errors import DeadlineExceeded, InvalidArgument, QueueFull
from ts_frontend.job import Job, Ledger, State
from ts_frontend.workers.connection import Connection
from ts_frontend.workers.devices import CPU
from ts_frontend.workers.life import Life
from ts_frontend.workers.plan import Plan
from ts_frontend.workers.running import Running
from ts_frontend.workers.started import Spec
from ts_frontend.workers.worker import Worker


class Taking:
    """A worker that takes one batch and keeps it."""

    def __init__(self) -> None:
        self.taken: list[Job] = []

    def room(self) -> float:
        return 0 if self.taken else 2

    def take(self, jobs: list[Job]) -> None:
        for each in jobs:
            each.move(State.SENT)
        self.taken += jobs

    def flush(self) -> None:
        pass

    def holds(self, job: Job) -> bool:
        return job in self.taken


def job(ledger: Ledger, name: str = "data", **more: object) -> Job:
    return Job(ledger, [Input(name, "", b"x")], request_id="r", **more)  # type: ignore[arg-type]


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_what_idle_workers_will_take_needs_no_room_in_the_queue() -> None:
    async def scenario() -> None:
        queue, ledger, workers = JobQueue(Policy(jobs_max=2)), Ledger(), [Taking(), Taking()]
        for worker in workers:
            queue.attach(worker)
        await turns()
        for _ in range(4):  # in one turn of the loop
            queue.put(job(ledger))
        with pytest.raises(QueueFull):
            queue.put(job(ledger))
        await turns()
        assert [len(worker.taken) for worker in workers] == [1, 1]
        assert len(queue) == 2

    asyncio.run(scenario())


def test_what_has_expired_takes_no_room_and_is_answered() -> None:
    async def scenario() -> None:
        queue, ledger = JobQueue(Policy(jobs_max=2)), Ledger()
        late, later = job(ledger, deadline_s=time.monotonic() - 1), job(ledger, deadline_s=time.monotonic() + 60)
        queue.put(late)
        queue.put(later)
        queue.put(job(ledger))
        with pytest.raises(DeadlineExceeded, match="never ran"):
            await late.result()
        queue.expire(time.monotonic() + 61)
        assert (later.state, len(queue)) == (State.EXPIRED, 1)

    asyncio.run(scenario())


def test_a_ticket_is_an_idle_worker() -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())


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
    running, ledger = Running(), Ledger()
    running.settle_manner(kind, limit)
    assert running.room() == 2
    for _ in range(taken):
        each = job(ledger)
        each.move(State.QUEUED)
        running.begin([each], time.monotonic())
    assert running.room() == room


def test_a_request_that_fits_no_message_fails_and_its_batch_goes_on_without_it() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        queue, ledger = JobQueue(Policy(batch_size=3)), Ledger()
        worker = Worker(1, Plan(Spec("m", {}), {}, 1, 1, 1 << 20), CPU, queue)
        worker._connection = Connection(ours, lambda messages: None, lambda reason: None, 1 << 20)
        worker.life = Life.READY
        jobs = [job(ledger), job(ledger, "n" * 70_000), job(ledger)]
        for each in jobs:
            queue.put(each)
        queue.attach(worker)
        await turns()
        with pytest.raises(InvalidArgument, match="can't be passed to a worker"):
            await jobs[1].result()
        assert [each.state for each in jobs] == [State.SENT, State.FAILED, State.SENT]
        assert not worker.holds(jobs[1])
        sent = Decoder(1 << 20).feed(theirs.recv(1 << 20))
        ids = [item.job_id for message in sent if isinstance(message, Predict) for item in message.items]
        assert ids == [jobs[0].id, jobs[2].id]
        worker._connection.close()
        theirs.close()

    asyncio.run(scenario())
