"""One worker as its frontend sees it: its socket, and the batches on it (its room for more, the hanging ones, and the
unfinished ones at its end).

asyncio's stream transports can't pass descriptors and copy more than necessary, so `Connection` reads and writes the
raw, non-blocking socket itself and uses the loop only to wait for readiness.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import Any, Final, Protocol, TypeAlias

from ts.protocol.decoder import Decoder
from ts.protocol.frames import Chunk, Failed, FrameError, Message, Pieces, Predict, chunks_of, request_frame
from ts.protocol.outbox import Outbox
from ts.protocol.shared import ANSWERS_AT, REQUESTS_AT, Giver, Taker
from ts_frontend.errors import DeadlineExceeded
from ts_frontend.job import Job, Owner
from ts_frontend.scheduling import queues

READ_BYTES: Final = 64 * 1024
READS_PER_TURN_MAX: Final = 4
#: The bytes that are read together with the rest of a large frame.
BEYOND_BYTES: Final = 16 * 1024


class Connection:
    """Messages to and from one worker. `on_messages` gets the messages that arrived together; `on_end` is called
    once, with the reason, when the socket ends or has invalid data. `shared`: memory with arenas for large bodies."""

    def __init__(
        self,
        sock: socket.socket,
        on_messages: Callable[[list[Message]], None],
        on_end: Callable[[str], None],
        message_bytes_max: int,
        shared: mmap | None = None,
    ) -> None:
        sock.setblocking(False)
        self._sock: socket.socket | None = sock
        self.on_messages = on_messages
        self._on_end = on_end
        self._decoder = Decoder(message_bytes_max)
        self._outbox = Outbox()
        self._shared = shared
        if shared is not None:
            self._outbox.giver, self._decoder.taker = Giver(shared, REQUESTS_AT), Taker(shared, ANSWERS_AT)
        self._loop = asyncio.get_running_loop()
        self._writing = False
        self._flush_scheduled = False
        self._beyond: bytearray | None = None
        self._fd = sock.fileno()
        self._loop.add_reader(self._fd, self._readable)

    def push(self, message: Message) -> None:
        """Queues a message; `flush` or the end of this turn of the loop writes it."""
        if self._sock is None:
            return
        self._outbox.push(message)
        if not self._flush_scheduled and not self._writing:
            self._flush_scheduled = True
            self._loop.call_soon(self.flush)

    def push_request(self, batch_id: int, job: Job) -> None:
        """`push` for a batch of one job. Its sender calls `flush` afterwards, which saves a turn of the loop."""
        frame = request_frame(batch_id, job.id, job.request_id, job.deadline_s, job.request_headers, job.inputs)
        if frame is None:
            self.push(Predict(batch_id, [job.item()]))
        elif self._sock is not None:
            self._outbox.push_frame(frame)

    def flush(self) -> None:
        """Writes the queued messages as far as the socket accepts them; the rest follows when it is writable."""
        self._flush_scheduled = False
        if self._writing or self._sock is None:
            return
        if not self._write():
            self._writing = True
            self._loop.add_writer(self._fd, self._writable)

    def _write(self) -> bool:
        """Returns True when everything is written (or the socket has ended: its reader reports that)."""
        sock, outbox = self._sock, self._outbox
        while outbox and sock is not None:
            try:
                outbox.sent(sock.sendmsg(outbox.buffers()))
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                self._end(f"writing failed: {error}")
                return True
        return True

    def _writable(self) -> None:
        if self._write() and self._sock is not None:
            self._loop.remove_writer(self._fd)
            self._writing = False

    def _readable(self) -> None:
        for _ in range(READS_PER_TURN_MAX):
            if not self._read_once():
                return

    def _read_once(self) -> bool:
        """Returns True when there may be more to read."""
        sock = self._sock
        if sock is None:
            return False
        room = self._decoder.room
        if room is not None:
            return self._read_into(sock, room)
        try:
            data = sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._end(f"reading failed: {error}")
            return False
        if not data:
            self._end("socket closed")
            return False
        return self._decode(data) and len(data) == READ_BYTES

    def look(self) -> None:
        """Reads the answers that have arrived, before the loop's turn comes to them; an end of the socket is left to
        that."""
        sock = self._sock
        if sock is None or self._decoder.room is not None:
            return
        try:
            data = sock.recv(READ_BYTES)
        except OSError:
            return
        if data:
            self._decode(data)

    def _read_into(self, sock: socket.socket, room: memoryview) -> bool:
        """Reads into the rest of a large frame, and the bytes after it; otherwise like `_read_once`."""
        beyond = self._beyond
        if beyond is None:
            beyond = self._beyond = bytearray(BEYOND_BYTES)
        try:
            size = sock.recvmsg_into([room, beyond])[0]
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._end(f"reading failed: {error}")
            return False
        if not size:
            self._end("socket closed")
            return False
        more = size - len(room)
        return self._decode(bytes(beyond[:more]) if more > 0 else b"", min(size, len(room))) and more >= 0

    def _decode(self, data: bytes, filled: int = 0) -> bool:
        try:
            messages = self._decoder.filled(filled) if filled else []
            if data:
                messages += self._decoder.feed(data)
        except FrameError as error:
            self._end(f"worker sent no valid frame: {error}")
            return False
        if messages:
            self.on_messages(messages)
        return True

    def _end(self, reason: str) -> None:
        if self._sock is not None:
            self.close()
            self._on_end(reason)

    def finish(self, reason: str) -> None:
        """Reads the last messages of a peer that has ended, then ends, even if a child of the peer holds the socket."""
        while self._read_once():
            pass
        self._end(reason)

    def close(self) -> None:
        sock, self._sock = self._sock, None
        if sock is None:
            return
        if self._shared is not None:
            self._outbox.close()
            self._decoder.close()
            self._shared.close()
        self._loop.remove_reader(self._fd)
        if self._writing:
            self._loop.remove_writer(self._fd)
        sock.close()


READ_AHEAD_BATCHES_MAX: Final = 16
#: A stream whose reader has read nothing for these seconds is stalled and doesn't count as running...
STALLED_S: Final = 0.1
#: ... until a worker has this many times `max_concurrency` batches.
STALLED_FACTOR_MAX: Final = 8

_batch_ids: Final = itertools.count(1).__next__


@dataclass(slots=True, eq=False)
class Batch:
    """Requests that were sent together, except for those that never reached the handler. `left`: the number without
    a complete answer; `ended`: the ids of the others, None without any."""

    id: int
    jobs: list[Job]
    left: int
    active_s: float
    taken_s: float
    ended: set[int] | None = None

    def open_jobs(self) -> list[Job]:
        ended = self.ended or ()
        return [job for job in self.jobs if job.id not in ended and not job.done]

    def unread(self, now_s: float) -> bool:
        """Whether the batch waits for a client that reads or sends slowly, so that it doesn't count as hanging."""
        return any(job.client_wait_s(now_s) > 0 for job in self.open_jobs())


class Concurrency(Protocol):
    """The number of batches that a worker runs at a time."""

    def room(self, running: InFlight, ahead_s: float) -> float:
        """The room of a busy worker: FULL, or less than IDLE. `ahead_s`: as of `QueueWorker`."""


class Serial:
    """One batch at a time, without read-ahead."""

    def room(self, running: InFlight, ahead_s: float) -> float:
        return queues.FULL


class Pipelined:
    """For a blocking handler: one batch at a time, and a few ahead on its socket while they are quick. None waits
    behind one that has run for longer than `ahead_s`."""

    def room(self, running: InFlight, ahead_s: float) -> float:
        count = len(running.batches)
        if count > 1 and ahead_s > queues.AHEAD_S:
            ahead_s = queues.AHEAD_S
        if count > READ_AHEAD_BATCHES_MAX or count * running.mean_s >= ahead_s:
            return queues.FULL
        return 1 if time.monotonic() - running.turn_s < ahead_s else queues.FULL


@dataclass(frozen=True, slots=True)
class Concurrent:
    """For a generator or async handler: several batches, STALLED_FACTOR_MAX times more while readers stall."""

    limit: int

    def room(self, running: InFlight, ahead_s: float) -> float:
        count, limit = len(running.batches), self.limit
        return 1 if count - running.stalled < limit and count < limit * STALLED_FACTOR_MAX else queues.FULL


@dataclass(frozen=True, slots=True)
class Continuous:
    """A continuous batch of at most `limit` requests; the emptiest of several workers is filled first."""

    limit: int

    def room(self, running: InFlight, ahead_s: float) -> float:
        free = self.limit - len(running.batches)
        return 1 + free / (self.limit + 1) if free > 0 else queues.FULL


@dataclass(frozen=True, slots=True)
class Until:
    """No room until these batches have ended in any way; then that of `former`."""

    batch_ids: frozenset[int]
    former: Concurrency

    def room(self, running: InFlight, ahead_s: float) -> float:
        if not self.batch_ids.isdisjoint(running.batches):
            return queues.FULL
        running.concurrency = self.former
        return self.former.room(running, ahead_s)


#: The seconds that a worker has spent reading and writing tensors, by the size of the batch.
Spent: TypeAlias = "Mapping[int, tuple[float, float]]"


class BatchRecorder(Protocol):
    """Measures the batches and the loads of a model version's workers."""

    def answered(self, jobs: Sequence[Job], waited_s: float, worked_s: float, now_s: float) -> None:
        """Measures a complete batch: `waited_s` on its way or behind another batch, then `worked_s` on the worker."""

    def loaded(self, worker_id: int, seconds: float) -> None:
        """Measures a load: the seconds from the worker's creation until it had its model."""


class InFlight:
    """The batches on one worker. `jobs` finds a job and its batch by the job's id."""

    def __init__(self, concurrency: Concurrency | None = None) -> None:
        self.jobs: dict[int, tuple[Job, Batch]] = {}
        self.batches: dict[int, Batch] = {}
        self.concurrency: Concurrency = concurrency or Pipelined()
        self.shared = False  # its requests run in turns, or concurrently
        self.concurrent = False  # concurrently: one that hangs doesn't block the others
        self.isolated = 0  # the batch that runs alone, or did so last
        self.stalled = 0
        self.mean_s = 1.0
        self.turn_s = 0.0
        self._sign_s = 0.0
        self._finished_s = 0.0

    def set_concurrency(self, handler_kind: str, limit: int) -> None:
        """Sets the concurrency by the kind of the worker's handler: blocking, generator, async or continuous."""
        self.shared, self.concurrent = handler_kind != "blocking", handler_kind == "async"
        if handler_kind == "continuous":
            self.concurrency = Continuous(limit)
        elif self.shared:
            self.concurrency = Concurrent(limit)

    def hold_nothing_ahead(self) -> None:
        """Stops read-ahead: the handler waits for other models' answers, which may depend on a batch sent ahead."""
        if not self.shared:
            self.concurrency = Serial()

    def close_until_idle(self) -> None:
        """Accepts no more before its present batches are finished."""
        former = self.concurrency.former if isinstance(self.concurrency, Until) else self.concurrency
        self.concurrency = Until(frozenset(self.batches), former)

    def isolate(self, job: Job) -> None:
        """Makes a job that has just begun run alone."""
        if job.id in self.jobs:
            self.isolated = self.jobs[job.id][1].id
            self.close_until_idle()

    def room(self, ahead_s: float = queues.AHEAD_S) -> float:
        """Returns the room for more batches, as of `QueueWorker`."""
        return self.concurrency.room(self, ahead_s) if self.batches else queues.IDLE

    # --- its course

    def begin(self, jobs: list[Job], owner: Owner | None, now_s: float) -> Batch:
        batch = Batch(_batch_ids(), jobs, len(jobs), now_s, now_s)
        if not self.batches:
            self.turn_s = now_s
        self.batches[batch.id] = batch
        for job in jobs:
            job.send(owner, now_s)
            self.jobs[job.id] = job, batch
        return batch

    def withdraw(self, batch: Batch) -> None:
        del self.batches[batch.id]
        for job in batch.jobs:
            del self.jobs[job.id]

    def active(self, batch: Batch, now_s: float) -> None:
        """Notes a sign of life: a piece of an answer, or progress of its reader."""
        self.turn_s = batch.active_s = now_s

    def alive(self, batch: Batch) -> None:
        """Notes that a batch waits for work elsewhere."""
        self._sign_s = batch.active_s = time.monotonic()

    def finish(self, job_id: int, batch: Batch) -> bool:
        """Completes one answer; returns True when that ends its batch."""
        del self.jobs[job_id]
        batch.left -= 1
        if batch.left:
            if batch.ended is None:
                batch.ended = set()
            batch.ended.add(job_id)
            return False
        del self.batches[batch.id]
        return True

    def measure(self, batch: Batch, now_s: float) -> tuple[float, float]:
        """Measures an ended batch; returns the seconds it waited behind others on the worker, and those it ran."""
        turn_s = now_s - self.turn_s
        self.mean_s += 0.2 * ((turn_s if turn_s < 1.0 else 1.0) - self.mean_s)
        self.turn_s = now_s
        # A batch sent ahead waits on the socket until the batch before it is finished.
        behind_s = self._finished_s - batch.taken_s
        waited_s = behind_s if behind_s > 0.0 and not self.shared else 0.0
        self._finished_s = now_s
        return waited_s, now_s - batch.taken_s - waited_s

    def free_since_s(self) -> float | None:
        """Returns the time since which no batch has been before the one that has just begun (`time.monotonic()`
        seconds, 0 for always); None if there is one before it."""
        return self._finished_s if len(self.batches) == 1 else None

    def clear(self) -> None:
        self.jobs.clear()
        self.batches.clear()

    def open_jobs(self) -> Iterator[Job]:
        for batch in self.batches.values():
            yield from batch.open_jobs()

    # --- late requests, unread streams, hanging batches

    def end_late(self, now_s: float, owner: Owner) -> float:
        """Ends the requests whose deadline has passed, has `owner` tell the handler, and returns the earliest deadline
        of the rest (`time.monotonic()` seconds)."""
        earliest_s = math.inf
        for job, _ in list(self.jobs.values()):
            if job.done:
                continue
            if job.ends_s > now_s:
                earliest_s = min(earliest_s, job.ends_s)
                continue
            ran_s = now_s - job.sent_at_s
            job.expire(DeadlineExceeded(f"Deadline passed {ran_s:.1f} s after the request was given to a worker"))
            owner.release(job)
        return earliest_s

    def end_unread(self, now_s: float, limit_s: float, owner: Owner) -> None:
        """Ends the streams of which a client has read nothing for so long."""
        for job, batch in list(self.jobs.values()):
            if not job.done and job.unread_since(now_s) > limit_s:
                job.fail(DeadlineExceeded(f"The stream's reader has taken nothing for {limit_s:g} s"))
                owner.release(job)
                self.active(batch, now_s)

    def count_stalled(self, now_s: float) -> bool:
        """Returns True if more streams than before have stalled readers, which adds room."""
        before = self.stalled
        self.stalled = sum(
            all(job.client_wait_s(now_s) > STALLED_S for job in batch.open_jobs()) for batch in self.batches.values()
        )
        return self.stalled > before

    def overdue(self, now_s: float, limit_s: float) -> bool:
        """Returns whether a batch has run for too long without a sign of life. Waiting behind another request isn't
        running, and waiting for the reader of a stream isn't hanging."""
        batches = self.batches.values()
        if self.concurrent:
            return any(now_s - batch.active_s > limit_s and not batch.unread(now_s) for batch in batches)
        if not batches or now_s - max(self.turn_s, self._sign_s) <= limit_s:
            return False
        unread = [batch.unread(now_s) for batch in batches]
        return not (all(unread) if self.shared else any(unread))


CANCELLED: Final = 499

#: Called for each response of a decoupled model: its number from 0, its kind (success, fail, empty or cancel), and the
#: seconds since the previous one.
OnResponse: TypeAlias = Callable[[int, str, float], None]


class ResponseCounter:
    """The number of responses that each open request of one worker has had, and the time of the last one."""

    def __init__(self, on_response: OnResponse) -> None:
        self._on_response = on_response
        self._open: dict[int, tuple[int, float]] = {}

    def note(self, messages: Sequence[Message], jobs: Mapping[int, tuple[Job, Any]]) -> None:
        """Counts the responses in `messages` of the worker, whose jobs are `jobs`."""
        now_s = time.monotonic()
        for message in messages:
            if isinstance(message, (Chunk, Failed, Pieces)) and message.job_id in jobs:
                for response in chunks_of(message) if isinstance(message, Pieces) else (message,):
                    self._note(response, jobs[message.job_id][0].sent_at_s, now_s)

    def _note(self, response: Chunk | Failed, sent_at_s: float, now_s: float) -> None:
        job_id = response.job_id
        index, before_s = self._open.pop(job_id, (0, sent_at_s))
        self._on_response(index, _kind(response), now_s - before_s)
        if isinstance(response, Chunk) and not response.last:
            self._open[job_id] = index + 1, now_s


def _kind(message: Chunk | Failed) -> str:
    if isinstance(message, Failed):
        return "cancel" if message.code == CANCELLED else "fail"
    return "success" if len(message.data) else "empty"
