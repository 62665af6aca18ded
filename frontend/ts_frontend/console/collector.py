"""The collector of the console's data: shared by all readers, and running only while there are any.

Readers get server-sent events: `state` at once and after each change, `history` once, `sample` every SAMPLE_S. Each
event is encoded once for all readers.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ts_frontend.console.state import (
    COLUMNS,
    SAMPLE_S,
    WINDOW_S,
    MachineLoad,
    ModelWatch,
    key_of,
    models_state,
    server_state,
)
from ts_frontend.errors import Code, Draining, ServeError
from ts_frontend.models.health import Health
from ts_frontend.models.model import Model
from ts_frontend.models.registry import Registry
from ts_frontend.tasks import watched
from ts_frontend.telemetry.metrics.gpus import Gpus
from ts_frontend.workers.memory import WorkerMemory

#: Seconds without an announced change after which the state is sent again.
STATE_S = 2.0
#: Changes within this time are sent together.
GAP_S = 0.1
HISTORY_S = 180.0
#: A reader that reconnects within this time gets the samples that it missed.
LINGER_S = 10.0
READERS_MAX = 64
#: A reader's key is checked when it connects; after this time it must reconnect.
READ_S_MAX = 600.0


class TooManyReaders(ServeError):
    """The limit of clients that read the events is reached."""

    remedy = "Close other windows of the console."
    code, http_status, type_name = Code.RESOURCE_EXHAUSTED, 503, "ServiceUnavailableException"
    retry_after_s = LINGER_S


class Reader:
    """The events that one reader hasn't read: the latest state, and samples up to the history's length."""

    def __init__(self, samples_max: int) -> None:
        self._state: bytes | None = None
        self._samples: deque[bytes] = deque(maxlen=samples_max)
        self._ended = False
        self._news = asyncio.Event()

    def tell(self, *, state: bytes | None = None, sample: bytes | None = None) -> None:
        self._state = state or self._state
        if sample is not None:
            self._samples.append(sample)
        self._news.set()

    def end(self) -> None:
        self._ended = True
        self._news.set()

    async def take(self) -> list[bytes]:
        """Waits for new events and returns them; [] at the end."""
        await self._news.wait()
        self._news.clear()
        if self._ended:
            self._news.set()
            return []
        found = [*([self._state] if self._state else ()), *self._samples]
        self._state = None
        self._samples.clear()
        return found


@dataclass(frozen=True, slots=True)
class Pace:
    """The intervals between events, in seconds."""

    sample_s: float = SAMPLE_S
    state_s: float = STATE_S
    linger_s: float = LINGER_S
    read_s_max: float = READ_S_MAX


class Collector:
    """`about`: the facts about the server that never change; `clients`: the rows of its clients, as of
    `Limits.rows`."""

    def __init__(
        self,
        models: Registry,
        health: Health,
        about: Callable[[], Mapping[str, Any]],
        gpus: Gpus,
        pace: Pace | None = None,
        clients: Callable[[], Sequence[Sequence[object]]] | None = None,
    ) -> None:
        self._models, self._health, self._about = models, health, about
        self._gpus, self._clients = gpus, clients
        self._pace = pace or Pace()
        self._readers: set[Reader] = set()
        self._watches: dict[Model, ModelWatch] = {}
        self._history: deque[bytes] = deque(maxlen=int(HISTORY_S / self._pace.sample_s))
        self._state = b""
        self._memory = WorkerMemory()
        self._task: asyncio.Task[None] | None = None

    @property
    def working(self) -> bool:
        return self._task is not None

    async def events(self) -> AsyncGenerator[list[bytes], None]:
        """Yields the events of one reader, as bytes of text/event-stream, until it disconnects, the server drains, or
        READ_S_MAX has passed. Raises TooManyReaders, Draining."""
        if len(self._readers) >= READERS_MAX:
            raise TooManyReaders(f"{READERS_MAX} clients already read the console's events")
        if self._health.draining:
            raise Draining("The server is shutting down")
        reader = Reader(self._history.maxlen or 1)
        self._readers.add(reader)
        ends_s = time.monotonic() + self._pace.read_s_max
        try:
            if self._task is None:
                self._task = watched(self._work(), "The console's collector")
                self._task.add_done_callback(self._over)
            else:
                reader.tell(state=self._state)
            yield [b"retry: 1000\n\n", self._past()]
            while time.monotonic() < ends_s and (ready := await reader.take()):
                yield ready
        finally:
            self._readers.discard(reader)

    def _past(self) -> bytes:
        head = json.dumps({"columns": COLUMNS, "sample_s": self._pace.sample_s, "window_s": WINDOW_S})
        return _event("history", f'{head[:-1]}, "samples": ['.encode() + b",".join(self._history) + b"]}")

    # --- sampling

    async def _work(self) -> None:
        pace, load = self._pace, MachineLoad()
        load.read(time.monotonic())
        next_sample_s = next_state_s = last_reader_s = time.monotonic()
        while not self._health.draining:
            now_s = time.monotonic()
            if self._readers:
                last_reader_s = now_s
            elif now_s - last_reader_s > pace.linger_s:
                return
            if now_s >= next_sample_s:
                if self._gpus.stale:  # for a later sample
                    watched(self._gpus.fresh(), "The reading of the GPUs' load")
                self._tell_sample(load, now_s)
                next_sample_s = max(next_sample_s + pace.sample_s, now_s)
            if now_s >= next_state_s:
                self._tell_state()
                next_state_s = now_s + pace.state_s
            if await self._changed(min(next_sample_s, next_state_s) - time.monotonic()):
                next_state_s = min(next_state_s, time.monotonic() + GAP_S)

    async def _changed(self, limit_s: float) -> bool:
        try:
            await asyncio.wait_for(self._models.changes.wait(), max(limit_s, 0.001))
        except TimeoutError:
            return False
        return True

    def _over(self, _: asyncio.Task[None]) -> None:
        self._task = None
        self._state = b""
        self._history.clear()
        self._memory = WorkerMemory()
        for watch in self._watches.values():
            watch.model.observe(None)
        self._watches.clear()
        for reader in self._readers:  # the server drains, or the collector failed: readers reconnect
            reader.end()

    def _tell_sample(self, load: MachineLoad, now_s: float) -> None:
        rows: dict[str, Any] = {}
        batches: dict[str, Any] = {}
        for model, watch in self._all_watched().items():
            row, sizes = watch.row(now_s)
            if any(row):
                rows[key_of(model)] = row
            if sizes:
                batches[key_of(model)] = sizes
        machine = load.read(now_s)
        if self._gpus.count:
            machine["gpus"] = [asdict(one) for one in self._gpus.loads]
        sample: dict[str, Any] = {"t": round(time.time(), 2), "machine": machine, "models": rows, "batches": batches}
        if self._clients is not None:
            sample["clients"] = self._clients()
        data = json.dumps(sample, separators=(",", ":")).encode()
        self._history.append(data)
        event = _event("sample", data)
        for reader in self._readers:
            reader.tell(sample=event)

    def _all_watched(self) -> dict[Model, ModelWatch]:
        old, self._watches = self._watches, {}
        for model in self._models:
            watch = old.pop(model, None)
            if watch is None:
                watch = ModelWatch(model)
                model.observe(watch.latencies)
            self._watches[model] = watch
        for gone in old:
            gone.observe(None)
        return self._watches

    def _tell_state(self) -> None:
        workers = [slot.worker for model in self._models for slot in model.pool.slots if slot.worker is not None]
        self._memory.look(workers)
        server = server_state(self._about(), ready=self._health.ready, draining=self._health.draining)
        state = {"server": server, "models": models_state(self._models, self._memory)}
        event = _event("state", json.dumps(state, separators=(",", ":")).encode())
        if event != self._state:
            self._state = event
            for reader in self._readers:
                reader.tell(state=event)


def _event(name: str, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)
