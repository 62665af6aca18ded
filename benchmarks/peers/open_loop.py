"""Load over HTTP/1.1 that doesn't wait for answers: requests come at random at a given rate, whatever the server does.

Arrivals are a Poisson process, gathered in ticks of 1 ms, the precision of timers. A request takes an idle connection,
or a new one up to a limit, or else waits for one. Its latency counts from its arrival, so that a late server is late
for all requests that arrive meanwhile. The same client can also load in a closed loop, which measures a server's
capacity in the same terms.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import cast

import uvloop
from measuring.h2load import LoadFailed, percentile

from peers.questions import STEPS, Question

TICK_S = 0.001
LATE_S_MAX = 0.002
"""Of a timer, which has milliseconds."""
CONNECTIONS_MAX = 512
END_S_MAX = 5.0
"""For the answers still due at the end."""
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)
_OK = b"200"


def arrivals(rate: float, seconds: float, seed: int) -> Iterator[tuple[float, int]]:
    """The ticks with requests: seconds from the start, and the number of requests. `rate`: requests per second."""
    numbers = random.Random(seed)
    ticks: dict[int, int] = {}
    at_s = numbers.expovariate(rate)
    while at_s < seconds:
        tick = math.ceil(at_s / TICK_S)
        ticks[tick] = ticks.get(tick, 0) + 1
        at_s += numbers.expovariate(rate)
    return ((tick * TICK_S, count) for tick, count in ticks.items())


def due(planned_s: float, now_s: float) -> float:
    """The time from which a latency counts: an inexact timer is excused, a late client or machine isn't."""
    return now_s if now_s - planned_s <= LATE_S_MAX else planned_s


@dataclass(slots=True)
class Offered:
    """The results of the requests. `latencies_s`: of answers with status 200."""

    seconds: float
    offered: int = 0
    refused: int = 0
    latencies_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0

    @property
    def unanswered(self) -> int:
        return self.offered - self.refused - len(self.latencies_s)

    @property
    def rate(self) -> float:
        """Right answers per second, until the last one."""
        return len(self.latencies_s) / max(self.seconds, self.ended_s)

    def percentile_ms(self, share: float) -> float:
        return percentile(sorted(self.latencies_s), share) * 1000

    def part(self, count: int) -> float:
        """The share of all requests, in per cent."""
        return 100 * count / self.offered if self.offered else 0.0


def requests_of(question: Question) -> Callable[[int], Iterator[tuple[bytes, bool]]]:
    """The requests of the connection with a number: always the same one, or sequences one after the other; and
    whether the connection may end after it."""
    if question.step is None:
        request = request_bytes(question)
        return lambda _: itertools.repeat((request, True))
    step = question.step

    def sequences(number: int) -> Iterator[tuple[bytes, bool]]:
        for sequence in itertools.count(number + CONNECTIONS_MAX, CONNECTIONS_MAX):
            for at in range(STEPS):
                yield request_bytes(replace(question, body=step(sequence, at))), at == STEPS - 1

    return sequences


def request_bytes(question: Question) -> bytes:
    lines = (
        f"POST {question.path} HTTP/1.1",
        "host: 127.0.0.1",
        *(f"{name}: {value}" for name, value in question.headers.items()),
        f"content-length: {len(question.body)}",
    )
    return "\r\n".join((*lines, "", "")).encode() + question.body


class AnswerReader:
    """Finds the ends of HTTP/1.1 answers in the received bytes."""

    def __init__(self) -> None:
        self._received = b""

    def feed(self, data: bytes) -> tuple[bytes, bool] | None:
        """The status of a complete answer, and whether its connection stays open. Raises LoadFailed."""
        self._received += data
        head_bytes = self._received.find(b"\r\n\r\n")
        if head_bytes < 0:
            return None
        head = self._received[:head_bytes]
        length = _LENGTH.search(head)
        if length is None:
            raise LoadFailed(f"an answer without a length: {head[:200]!r}")
        if len(self._received) < head_bytes + 4 + int(length[1]):
            return None
        self._received = b""
        return head[9:12], _CLOSE.search(head) is None


class Connection(asyncio.Protocol):
    """A connection with one request at a time."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._reader = AnswerReader()
        self._requests = client.requests()
        self.due_s: float | None = None
        self.may_end = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's isn't a subclass
        self._client.idle(self)

    def send(self, due_s: float) -> None:
        self.due_s = due_s
        request, self.may_end = next(self._requests)
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        try:
            answer = self._reader.feed(data)
        except LoadFailed as error:
            self._client.fail(error)
            return
        if answer is not None:
            due_s, self.due_s = self.due_s, None
            status, stays = answer
            if due_s is not None:
                self._client.answered(status, due_s)
            if stays:
                self._client.idle(self)
            else:
                self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.lost(self)


class Client:
    """All connections to one server. `closed_loop`: each sends its next request after an answer."""

    def __init__(self, port: int, question: Question, result: Offered, connections_max: int, closed_loop: bool) -> None:
        self._requests, self._numbers = requests_of(question), itertools.count()
        self.result = result
        self._port = port
        self._max = connections_max
        self._closed_loop = closed_loop
        self._idle: list[Connection] = []
        self._waiting: deque[float] = deque()
        self._count = 0
        self._connects: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._began_s = time.monotonic()
        self._ending = self._asked_all = False
        self._settled = asyncio.Event()
        self._failure: Exception | None = None
        self.connections: set[Connection] = set()

    def requests(self) -> Iterator[tuple[bytes, bool]]:
        """Those of one more connection."""
        return self._requests(next(self._numbers) % CONNECTIONS_MAX)

    def connect(self) -> None:
        self._count += 1
        task = self._loop.create_task(self._connect())
        self._connects.add(task)
        task.add_done_callback(self._connects.discard)

    async def _connect(self) -> None:
        try:
            await self._loop.create_connection(lambda: Connection(self), "127.0.0.1", self._port)
        except OSError:
            self._count -= 1

    def ask(self, due_s: float) -> None:
        self.result.offered += 1
        if self._idle:
            self._idle.pop().send(due_s)
            return
        self._waiting.append(due_s)
        if self._count < self._max:
            self.connect()

    def idle(self, connection: Connection) -> None:
        self.connections.add(connection)
        if self._waiting:
            connection.send(self._waiting.popleft())
        elif self._closed_loop and not (self._ending and connection.may_end):
            self.result.offered += 1
            connection.send(time.monotonic())
        else:
            self._idle.append(connection)

    def answered(self, status: bytes, due_s: float) -> None:
        now_s = time.monotonic()
        if status == _OK:
            self.result.latencies_s.append(now_s - due_s)
        else:
            self.result.refused += 1
        self.result.ended_s = now_s - self._began_s
        self._settle()

    def _settle(self) -> None:
        """Notes that no further requests follow."""
        if self._asked_all and not self.result.unanswered and all(one.may_end for one in self.connections):
            self._settled.set()

    def lost(self, connection: Connection) -> None:
        self._count -= 1
        self.connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if (self._waiting or self._closed_loop) and not self._ending:
            self.connect()

    def fail(self, error: Exception) -> None:
        self._failure = error
        self._settled.set()

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def end(self) -> None:
        """Waits for the outstanding answers, then closes."""
        self._ending = self._closed_loop
        self._asked_all = True
        self._settle()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._settled.wait(), END_S_MAX)
        self._ending = True
        for connection in list(self.connections):
            connection.transport.close()
        await asyncio.gather(*self._connects, return_exceptions=True)
        self.check()


async def _offer(port: int, question: Question, rate: float, seconds: float, seed: int) -> Offered:
    result = Offered(seconds)
    client = Client(port, question, result, CONNECTIONS_MAX, closed_loop=False)
    begun_s = time.monotonic()
    for at_s, count in arrivals(rate, seconds, seed):
        wait_s = begun_s + at_s - time.monotonic()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        due_s = due(begun_s + at_s, time.monotonic())
        for _ in range(count):
            client.ask(due_s)
        client.check()
    await client.end()
    return result


async def _saturate(port: int, question: Question, clients: int, seconds: float) -> Offered:
    result = Offered(seconds)
    client = Client(port, question, result, clients, closed_loop=True)
    for _ in range(clients):
        client.connect()
    await asyncio.sleep(seconds)
    await client.end()
    return result


def offer(port: int, question: Question, rate: float, seconds: float, seed: int = 0) -> Offered:
    """Sends `rate` requests per second for `seconds`, and returns the results of all. Raises LoadFailed."""
    return uvloop.run(_offer(port, question, rate, seconds, seed))


def saturate(port: int, question: Question, clients: int, seconds: float) -> Offered:
    """A closed loop of `clients`. Raises LoadFailed, also if nothing is answered."""
    found = uvloop.run(_saturate(port, question, clients, seconds))
    if not found.latencies_s:
        raise LoadFailed(f"none of {found.offered} requests was answered")
    return found
