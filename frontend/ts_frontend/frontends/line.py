"""The line between the lead and one of its siblings: calls in both directions, each with one answer; and the metrics of
several frontends as one page: counters and histograms are summed, and so are gauges that count.

A frame is its length (u32, little endian) and a MessagePack array: [CALL, id, name, value], [ANSWER, id, value], or
[FAILURE, id, kind, arguments, details] with the parts of an `Ending`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ts_frontend.errors import Draining, ServeError, ending_of
from ts_frontend.tasks import watched
from ts_frontend.telemetry.metrics.families import Counter, Definition, Family, Gauge, Histogram, MetricKind, Sample

log = logging.getLogger(__name__)


#: Gauges that aren't sums: how the values of the frontends become one.
_GAUGES: Mapping[str, Callable[[float, float], float]] = {
    "ts_server_ready": min,
    "ts_server_draining": max,
    "ts_queue_capacity": max,
    "ts_model_failing": max,
    "process_start_time_seconds": min,
}


def _sum(one: float, other: float) -> float:
    return one + other


def plain(families: Iterable[Family]) -> list[Any]:
    """Families as plain values."""
    return [
        [
            [one.definition.name, one.definition.kind.value, one.definition.unit, list(one.definition.dimensions)],
            one.help,
            [[list(labels), _values(sample)] for labels, sample in one.samples.items()],
        ]
        for one in families
    ]


def _values(sample: Sample) -> list[Any]:
    if isinstance(sample, Histogram):
        return [list(sample.bounds), list(sample.counts), sample.sum]
    return [sample.value] if isinstance(sample, (Counter, Gauge)) else []


def summed(own: Iterable[Family], others: Sequence[Any]) -> Iterator[Family]:
    """The families of this frontend with those of others, which are `plain`."""
    found: dict[str, Family] = {}
    for family in [*plain(own), *(one for some in others for one in some)]:
        (name, kind, unit, dimensions), help, samples = family
        whole = found.setdefault(name, Family(Definition(name, MetricKind(kind), unit, tuple(dimensions)), help))
        for labels, values in samples:
            _add(whole, tuple(labels), values)
    yield from found.values()


def _add(family: Family, labels: tuple[str, ...], values: Sequence[Any]) -> None:
    before = family.samples.get(labels)
    if len(values) == 3:
        bounds, counts, total = values
        if not isinstance(before, Histogram):
            before = family.samples[labels] = Histogram(bounds)
        if list(before.bounds) == bounds:
            before.counts = [one + more for one, more in zip(before.counts, counts, strict=True)]
            before.sum += total
    elif values and family.definition.kind is MetricKind.COUNTER:
        family.samples[labels] = Counter(values[0] + (before.value if isinstance(before, Counter) else 0.0))
    elif values:
        join = _GAUGES.get(family.definition.name, _sum)
        family.samples[labels] = Gauge(join(before.value, values[0]) if isinstance(before, Gauge) else values[0])


CALL, ANSWER, FAILURE = range(3)
#: The largest frame: a description of thousands of models, or their metrics.
FRAME_BYTES_MAX = 64 << 20
_LENGTH = struct.Struct("<I")

#: Answers a call: its name, and its value.
Answer = Callable[[str, Any], Awaitable[Any]]


class Line:
    """One end of a line over a connected socket. `answer` answers the other side's calls, which run side by side."""

    def __init__(self, sock: socket.socket, answer: Answer) -> None:
        self._sock, self._answer = sock, answer
        self._ids = itertools.count(1).__next__
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._running: set[asyncio.Task[None]] = set()
        self.up = True
        self.ended = asyncio.Event()

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._sock)

    async def run(self) -> None:
        """Reads frames until the line ends: the other side has closed it, or sent what is none. Calls that wait for
        their answers fail then."""
        if self._reader is None:
            await self.open()
        reader = self._reader
        assert reader is not None
        try:
            while True:
                (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                if size > FRAME_BYTES_MAX:
                    log.error("A frame of %d bytes on the line between frontends: at most %d", size, FRAME_BYTES_MAX)
                    return
                self._take(msgspec.msgpack.decode(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            log.error("The line between frontends has a frame that can't be read: %s", error)
        finally:
            self.close()
            for task in self._running:
                task.cancel()

    def close(self) -> None:
        self.up = False
        self.ended.set()
        if self._writer is not None:
            self._writer.close()
        waiting, self._waiting = self._waiting, {}
        for one in waiting.values():
            if not one.done():
                one.set_exception(Draining("The frontend has ended"))

    async def call(self, name: str, value: Any = None) -> Any:
        """Returns the other side's answer. Raises its ServeError, or Draining once the line has ended."""
        if not self.up or self._writer is None:
            raise Draining("The frontend has ended")
        number = self._ids()
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(CALL, number, name, value)
            return await answer
        finally:
            self._waiting.pop(number, None)

    def _send(self, *parts: Any) -> None:
        data = msgspec.msgpack.encode(parts)
        if len(data) > FRAME_BYTES_MAX:
            raise ServeError(f"A message between frontends has {len(data)} bytes, and may have {FRAME_BYTES_MAX}")
        if self._writer is not None and self.up:
            self._writer.write(_LENGTH.pack(len(data)) + data)

    def _take(self, frame: Any) -> None:
        kind, number, *parts = frame
        if kind == CALL:
            name, value = parts
            task = watched(self._run(number, name, value), f"The call {name} of a frontend")
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            return
        waiting = self._waiting.pop(number, None)
        if waiting is None or waiting.done():
            return
        if kind == ANSWER:
            waiting.set_result(parts[0])
        else:
            waiting.set_exception(ending_of(*parts).error())

    async def _run(self, number: int, name: str, value: Any) -> None:
        try:
            self._send(ANSWER, number, await self._answer(name, value))
        except ServeError as error:
            self._send(FAILURE, number, *error.ending().plain())
        except Exception as error:
            self._send(FAILURE, number, "ServeError", [f"{type(error).__name__}: {error}"], {})
            raise
