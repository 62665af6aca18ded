"""Jobs that one frontend hands to another, whose worker is idle: the borrower's side and the lender's.

Each frontend connects to each other one and borrows over that connection; it speaks the workers' frames. A model gets
its number on a connection by a Load, its state there by Readys. A Predict has one job; its batch id is the model's
number and the job's kind. Credit for the id CALL_ID_MIN + number says how many jobs wait, and back, how many places are
free; a Cancel for it, that the model is gone.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ts.protocol.frames import (
    CALL_ID_MIN,
    CHUNK_COST_BYTES,
    Buffer,
    Cancel,
    Chunk,
    Credit,
    Feed,
    Item,
    Load,
    LoadFailed,
    Message,
    Pieces,
    Predict,
    Ready,
)
from ts_frontend.errors import (
    DeadlineExceeded,
    Draining,
    InvalidArgument,
    ModelNotFound,
    NoWorker,
    ServeError,
    WorkerDied,
    ending_of,
)
from ts_frontend.job import PHRASE_KEY, FedJob, Job, JobState, Whereabouts
from ts_frontend.models.model import Model, Registry
from ts_frontend.scheduling.queues import AHEAD_S, FULL, IDLE
from ts_frontend.scheduling.stream import chunks
from ts_frontend.tasks import kept, watched
from ts_frontend.workers.in_flight import Connection, InFlight

log = logging.getLogger(__name__)

#: The kinds of a job, the low bits of its batch id.
STREAM, ALONE, FED, NUMBER = 1, 2, 4, 8
#: Seconds for which a lender's word about idle places counts.
OFFER_S: Final = 0.02
#: The room of a lender for a frontend with workers of its own, which come first; and for one without any, of which the
#: number of jobs there is taken.
SPARE, NEAR = 0.5, 0.9
#: The most jobs of a model that one frontend without workers has at one lender.
LENT_MAX: Final = 10_000
#: Errors of a lender that another worker needn't have.
ELSEWHERE = (Draining, NoWorker, ModelNotFound)


class Borrowed:
    """The workers that one other frontend lends to a model: a worker of its queue, and a `Lender` of its pool. `first`:
    that frontend is the lead, which says why a model can't serve."""

    def __init__(self, model: Model, link: Borrowing, number: int, *, first: bool) -> None:
        self._model, self._link, self.number, self._first = model, link, number, first
        self._running = InFlight()
        self._places, self._offered_s, self._asked = 0, 0.0, False
        self.ready = False
        self.info: Mapping[str, Any] = {}
        model.pool.lenders = [*model.pool.lenders, self]
        model.queue.attach(self)

    @property
    def open(self) -> bool:
        """Whether requests may wait for it, though it may not be ready: those of a frontend without workers."""
        return self.ready or (self._first and not self._model.pool.slots)

    @property
    def jobs(self) -> int:
        return len(self._running.jobs)

    # --- as a worker of its queue

    def room(self, ahead_s: float = AHEAD_S) -> float:
        """As of `QueueWorker`, and never IDLE."""
        pool, model = self._model.pool, self._model
        if model.guests is not None and model.guests.counts[JobState.QUEUED]:
            return FULL  # a job is handed over once
        if not pool.ready_count:
            others = any(one.ready for one in pool.lenders)
            is_open = self.ready or (self.open and not others)
            return NEAR / (1 + len(self._running.jobs)) if is_open and len(self._running.jobs) < LENT_MAX else FULL
        if not self.ready or any(slot.worker is not None and slot.worker.room(ahead_s) for slot in pool.slots):
            return FULL
        if self._places and time.monotonic() - self._offered_s < OFFER_S:
            return SPARE
        if not self._asked:
            self._asked = True
            self._link.push(Credit(CALL_ID_MIN + self.number, len(model.queue)))
        return FULL

    def holds(self, job: Job) -> bool:
        return job.id in self._running.jobs

    def dispatch(self, jobs: list[Job], now_s: float) -> None:
        """Hands jobs over, each by itself: they form batches there."""
        self._places = max(0, self._places - len(jobs))
        self._model.pool.on_busy()
        for job in jobs:
            kind = STREAM * job.stream | ALONE * job.alone | FED * isinstance(job, FedJob)
            batch = self._running.begin([job], self, now_s)
            try:
                self._link.hand(self, job, self.number * NUMBER | kind)
            except ValueError as error:
                self._running.withdraw(batch)
                job.fail(InvalidArgument(f"The request can't be passed to a worker: {error}"))

    def dispatch_alone(self, job: Job, now_s: float) -> None:
        raise AssertionError("only an idle worker runs a job alone")

    def reserve(self) -> None:
        """Keeps a worker of its own frontend free in its place."""
        ready = [slot.worker for slot in self._model.pool.slots if slot.worker is not None and slot.ready]
        if ready:
            ready[0].reserve()

    def flush(self) -> None:
        self._link.flush()

    def look(self) -> None:
        """Leaves the lender's answers to the loop: its word about idle places comes with them."""

    # --- as a job's owner

    def release(self, job: Job) -> None:
        if job.id in self._running.jobs:
            self._link.push(Cancel(job.id))

    def grant(self, job: Job, size_bytes: int) -> None:
        if job.stream:
            self._link.push(Credit(job.id, size_bytes))

    def feed(self, job: Job, feed: Feed) -> None:
        self._link.push(feed)

    def measure(self, job: Job) -> Whereabouts:
        return Whereabouts(-1, 1, 0.0, None)

    # --- messages of the lender

    def told(self, ready: bool, info: Mapping[str, Any]) -> None:
        if info and not self.info:
            self._model.pool.on_ready(info)
        self.ready, self.info = ready, info or self.info
        self._changed()

    def offered(self, places: int) -> None:
        self._places, self._offered_s, self._asked = places, time.monotonic(), False
        self._model.queue.wake()

    def answered(self, message: Chunk | Pieces | Credit | LoadFailed, job_id: int) -> bool:
        """Handles a message about a job; returns whether it was the last one."""
        last = isinstance(message, LoadFailed) or (not isinstance(message, Credit) and message.last)
        entry = self._running.jobs.get(job_id)
        if entry is None:
            return last
        job, batch = entry
        if isinstance(message, LoadFailed):
            self._running.finish(job_id, batch)
            self._refused(job, ending_of(*message.info["error"]).error())
        elif isinstance(message, Credit):
            job.allow(message.size_bytes)
        else:
            if isinstance(message, Chunk):
                job.deliver(message)
            else:
                job.deliver_pieces(message, time.monotonic())
            if last:
                self._running.finish(job_id, batch)
        if last:
            self._model.queue.wake()
        return last

    def _refused(self, job: Job, error: ServeError) -> None:
        pool = self._model.pool
        if isinstance(error, ELSEWHERE) and job.repeatable and not job.done and (pool.slots or not self._first):
            self.ready, self._places = False, 0  # until it tells more
            self._model.queue.put_back([job])
            self._changed()
        elif isinstance(error, DeadlineExceeded):
            job.expire(error)
        else:
            job.fail(error)

    def _changed(self) -> None:
        self._model.pool.lent()
        self._model.queue.wake()

    # --- its end, and time

    def end(self, reason: str) -> None:
        """The lender is gone: its jobs end like those of a dead worker, or run again."""
        model, repeats = self._model, self._model.pool.plan.repeats
        jobs = list(self._running.open_jobs())
        self._running.clear()
        model.pool.lenders = [one for one in model.pool.lenders if one is not self]
        model.queue.detach(self)
        again = [job for job in jobs if repeats is not None and job.repeatable]
        if repeats is not None:
            repeats.after_deaths += len(again)
        model.queue.put_back(again)
        for job in jobs:
            if job not in again:
                job.fail(WorkerDied(f"Worker died. {reason}."))
        model.pool.lent()

    def tick(self, now_s: float) -> None:
        """As of `Worker`: ends the streams that nobody reads. The lender ends those that hang."""
        self.end_late(now_s)
        self._running.end_unread(now_s, self._model.pool.plan.response_timeout_s, self)

    def end_late(self, now_s: float) -> float:
        """As of `Worker`."""
        return self._running.end_late(now_s, self)


class Borrowing:
    """The connection to one lender, `number`, and the jobs that were handed to it."""

    def __init__(self, number: int, sock: socket.socket, size_max: int, on_end: Callable[[Borrowing], None]) -> None:
        self.number = number
        self.handed = 0
        self._on_end = on_end
        self._numbers = itertools.count()
        self._by_number: dict[int, Borrowed] = {}
        self._by_model: dict[Model, Borrowed] = {}
        self._by_job: dict[int, Borrowed] = {}
        self._connection = Connection(sock, self._received, self._closed, size_max)
        self.push, self.flush = self._connection.push, self._connection.flush

    def follow(self, models: Sequence[Model]) -> None:
        """Borrows for these models from now on, and for no others."""
        for model in models:
            if model not in self._by_model and model.guests is not None:
                number = next(self._numbers)
                one = self._by_number[number] = Borrowed(model, self, number, first=self.number == 0)
                self._by_model[model] = one
                self.push(Load({"number": number, "name": model.name, "version": model.version}))
        for model in [model for model in self._by_model if model not in models and not model.ledger.live]:
            one = self._by_model.pop(model)
            del self._by_number[one.number]
            self.push(Cancel(CALL_ID_MIN + one.number))
            one.end("The model is gone")

    def hand(self, borrowed: Borrowed, job: Job, batch_id: int) -> None:
        self._connection.push_request(batch_id, job)
        self.handed += 1
        self._by_job[job.id] = borrowed

    def close(self) -> None:
        self._connection.close()
        self._closed("The server has ended")

    def _received(self, messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, Credit) and message.job_id >= CALL_ID_MIN:
                if (known := self._by_number.get(message.job_id - CALL_ID_MIN)) is not None:
                    known.offered(message.size_bytes)
            elif isinstance(message, Ready):
                if (known := self._by_number.get(message.info["number"])) is not None:
                    known.told(message.info["ready"], message.info["info"])
            elif isinstance(message, (Chunk, Pieces, Credit, LoadFailed)):
                job_id = message.info["job"] if isinstance(message, LoadFailed) else message.job_id
                borrowed = self._by_job.get(job_id)
                if borrowed is not None and borrowed.answered(message, job_id):
                    del self._by_job[job_id]

    def _closed(self, reason: str) -> None:
        self._by_job.clear()
        borrowed, self._by_model = list(self._by_model.values()), {}
        self._on_end(self)
        for one in borrowed:
            one.end(f"Frontend {self.number} has ended")


class Lending:
    """Runs the jobs of the other frontends, which connect to a Unix socket at `path`."""

    def __init__(self, registry: Registry, path: Path, size_max: int, credit_bytes: int) -> None:
        self._registry, self._size_max, self.credit_bytes = registry, size_max, credit_bytes
        self._links: set[_Link] = set()
        self._watched: set[Model] = set()
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.setblocking(False)
        self._listening.bind(str(path))
        self._listening.listen(64)
        self._tasks = [
            kept(self._accept, "The connections of other frontends"),
            kept(self._follow, "The watch over the lent workers"),
        ]

    async def _accept(self) -> None:
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(self._listening)
            self._links.add(_Link(self, self._registry, sock, self._size_max, self.credit_bytes))

    async def _follow(self) -> None:
        while True:
            await self._registry.changes.wait()
            for link in list(self._links):
                link.tell()

    def watch(self, model: Model) -> None:
        """Looks for idle places of the model whenever one of its jobs ends."""
        assert model.guests is not None
        if model not in self._watched:
            self._watched = {one for one in self._watched if self._registry.get(one.name, one.version) is one} | {model}
            for ledger in (model.ledger, model.guests):
                ledger.on_left = _also(ledger.on_left, self._soon)

    def _soon(self, _: Job) -> None:
        for link in self._links:
            link.soon()

    def left(self, link: _Link) -> None:
        self._links.discard(link)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        self._listening.close()
        for link in list(self._links):
            link.close()


class _Link:
    """One borrower: the models that it has named, and its jobs."""

    def __init__(
        self, lending: Lending, registry: Registry, sock: socket.socket, size_max: int, credit_bytes: int
    ) -> None:
        self._lending, self._registry, self._credit_bytes = lending, registry, credit_bytes
        self._names: dict[int, tuple[str, str]] = {}
        self._told: dict[int, tuple[Any, ...]] = {}
        self._hungry: set[int] = set()
        self._looks = False
        self._guests: dict[int, _Guest] = {}
        self._connection = Connection(sock, self._received, self._closed, size_max)
        self.push = self._connection.push

    def close(self) -> None:
        self._connection.close()
        self._closed("")

    def _closed(self, reason: str) -> None:
        self._lending.left(self)
        for guest in list(self._guests.values()):
            guest.job.cancel()
        self._hungry.clear()

    def tell(self) -> None:
        """Tells of the models whose state has changed."""
        for number, (name, version) in self._names.items():
            model = self._registry.get(name, version)
            ready = model is not None and (model.pool.ready_count > 0 or model.resident is not None)
            info = next(model.infos(), {}) if model is not None and ready else {}
            if self._told.get(number) != (ready, bool(info)):
                self._told[number] = ready, bool(info)
                self.push(Ready({"number": number, "ready": ready, "info": info}))
        self._look()

    def _received(self, messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, Predict):
                for item in message.items:
                    self._run(message.batch_id, item)
            elif isinstance(message, Load):
                told = message.settings
                self._names[int(told["number"])] = str(told["name"]), str(told["version"])
                self.tell()
            elif isinstance(message, Cancel) and message.job_id >= CALL_ID_MIN:
                self._forget(message.job_id - CALL_ID_MIN)
            elif isinstance(message, Credit) and message.job_id >= CALL_ID_MIN:
                self._wants(message.job_id - CALL_ID_MIN)
            elif isinstance(message, (Cancel, Credit, Feed)):
                guest = self._guests.get(message.job_id)
                if guest is not None:
                    guest.take(message)

    def _forget(self, number: int) -> None:
        self._names.pop(number, None)
        self._told.pop(number, None)
        self._hungry.discard(number)

    # --- idle places

    def _model(self, number: int) -> Model | None:
        named = self._names.get(number)
        return None if named is None else self._registry.get(*named)

    def _wants(self, number: int) -> None:
        """The borrower has jobs that wait: it is told once there are idle places."""
        model = self._model(number)
        if model is None or model.guests is None:
            return
        self._hungry.add(number)
        self._lending.watch(model)
        self._look()

    def soon(self) -> None:
        if self._hungry and not self._looks:
            self._looks = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._looks = False
        for number in list(self._hungry):
            model = self._model(number)
            places = 0 if model is None or len(model.queue) else _idle_places(model)
            if places:
                self._hungry.discard(number)
                self.push(Credit(CALL_ID_MIN + number, places))

    # --- jobs

    def _run(self, batch_id: int, item: Item) -> None:
        kind = batch_id % NUMBER
        try:
            model = self._model(batch_id // NUMBER)
            if model is None:
                raise ModelNotFound(self._names.get(batch_id // NUMBER, ("",))[0])
            made = model.take_over(item, stream=bool(kind & STREAM), alone=bool(kind & ALONE), fed=bool(kind & FED))
        except ServeError as error:
            self.refuse(item.job_id, error)
            return
        guest = self._guests[item.job_id] = _Guest(self, item.job_id, made, self._credit_bytes)
        guest.task.add_done_callback(lambda _: self._guests.pop(item.job_id, None))

    def refuse(self, job_id: int, error: ServeError) -> None:
        self.push(LoadFailed({"job": job_id, "error": error.ending().plain()}))


class _Guest:
    """A job of a borrower, and the task that sends its answer."""

    def __init__(self, link: _Link, number: int, job: Job, credit_bytes: int) -> None:
        self._link, self._number, self.job = link, number, job
        self._credit_bytes = credit_bytes
        self._more = asyncio.Event()
        self._feeds: asyncio.Queue[Feed] = asyncio.Queue()
        self._feeding: asyncio.Task[None] | None = None
        if isinstance(job, FedJob):
            self._feeding = watched(self._feed(job), "The inputs of another frontend's stream")
            link.push(Credit(number, credit_bytes))
        self.task = watched(self._answer(), "The answer for another frontend")

    def take(self, message: Cancel | Credit | Feed) -> None:
        if isinstance(message, Cancel):
            self.job.cancel()
            self._more.set()
        elif isinstance(message, Credit):
            self._credit_bytes += message.size_bytes
            self._more.set()
        else:
            self._feeds.put_nowait(message)

    async def _feed(self, job: FedJob) -> None:
        last = False
        while not last:
            feed = await self._feeds.get()
            last = feed.last
            await job.feed(feed.inputs, last)
            size = CHUNK_COST_BYTES + sum(len(one.data) for one in feed.inputs)
            self._link.push(Credit(self._number, size))

    async def _answer(self) -> None:
        try:
            if self.job.stream:
                await self._stream()
            else:
                first, *rest = await self.job.pieces() or [b""]
                self._send_first(first, last=not rest)
                for left, piece in zip(range(len(rest) - 1, -1, -1), rest, strict=True):
                    self._link.push(Chunk(self._number, piece, not left))
        except ServeError as error:
            self._link.refuse(self._number, error)
        finally:
            if self._feeding is not None:
                self._feeding.cancel()

    def _send_first(self, data: Buffer, *, last: bool) -> None:
        job = self.job
        headers = [pair for pair in job.headers if pair[0] != PHRASE_KEY] if job.phrase else job.headers
        self._link.push(Chunk(self._number, data, last, job.status, job.phrase, headers))

    async def _stream(self) -> None:
        begun, coming = False, chunks(self.job)
        try:
            async for pieces in coming:
                while self._credit_bytes <= 0 and not self.job.done:
                    self._more.clear()
                    await self._more.wait()
                for piece in pieces:
                    if begun:
                        self._link.push(Chunk(self._number, piece, False))
                    else:
                        self._send_first(piece, last=False)
                    begun = True
                    self._credit_bytes -= len(piece) + CHUNK_COST_BYTES
        finally:
            await coming.aclose()
        self._link.push(Chunk(self._number, b"", True))


def _idle_places(model: Model) -> int:
    """The requests that its workers could begin at once."""
    places = 0
    for slot in model.pool.slots:
        worker = slot.worker
        if worker is not None and worker.room():
            if worker.room() == IDLE:
                places += max(model.settings.batch_size, worker.concurrency)
            elif worker.concurrency:
                places += 1
    return places


def _also(first: Callable[[Job], None] | None, second: Callable[[Job], None]) -> Callable[[Job], None]:
    def both(job: Job) -> None:
        if first is not None:
            first(job)
        second(job)

    return both


async def connected(path: Path) -> socket.socket:
    """A connection to the lender at `path`. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, str(path))
    except BaseException:
        sock.close()
        raise
    return sock
