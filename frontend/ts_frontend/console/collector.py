"""The data of the console: the served models and their workers, their state, and their numbers over the last seconds
(rates, latencies, queues, batches, streams), collected for all readers together, and only while there are any.

Readers get server-sent events: `state` at once and after each change, `history` once, `sample` every SAMPLE_S. Each
event is encoded once for all readers.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, NamedTuple

import psutil

from ts_frontend.errors import Code, Draining, ServeError
from ts_frontend.job import FINAL, Job, JobState
from ts_frontend.models.health import Health
from ts_frontend.models.model import Model, Registry
from ts_frontend.models.settings import TensorSpec
from ts_frontend.tasks import watched
from ts_frontend.telemetry.metrics.registry import FIRST_TOKEN, GENERATED_TOKENS, PROMPT_TOKENS
from ts_frontend.telemetry.metrics.requests import LatencyCounts, quantiles_s
from ts_frontend.telemetry.metrics.system import Gpus
from ts_frontend.workers.memory import WorkerMemory
from ts_frontend.workers.pool import Slot
from ts_frontend.workers.process import Failure, Replacement
from ts_frontend.workers.worker import Worker

#: The columns of a model's row, in order.
COLUMNS = (
    "answered_per_s",
    "failed_per_s",
    "cancelled_per_s",
    "p50_ms",
    "p95_ms",
    "p99_ms",
    "queue_ms",
    "handler_ms",
    "batch_size",
    "queued",
    "running",
    "streams",
    "stream_bytes_per_s",
    "prompt_tokens_per_s",
    "generated_tokens_per_s",
    "first_token_ms",
)
#: The time between two samples.
SAMPLE_S = 0.5
PARTS = (0.5, 0.95, 0.99)
#: Rates, latencies and batches cover this number of seconds before the sample.
WINDOW_S = 3.0
#: The most streams of a model that are counted.
LIVE_MAX = 10_000


class Reading(NamedTuple):
    """The sums of a model since it was loaded. `latencies`: counts as of `LatencyCounts`; `batches`: calls by size."""

    at_s: float
    ended: int
    answered: int
    failed: int
    cancelled: int
    measured: int
    queue_s: float
    handler_s: float
    latencies: list[int]
    batches: Mapping[int, int]


class ModelWatch:
    """The readings of one model version over the last seconds, and the bytes sent on its streams."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.latencies = LatencyCounts()
        self._readings: deque[Reading] = deque()
        self._streamed: dict[int, int] = {}
        self._tokens: deque[tuple[float, Mapping[str, tuple[float, int]]]] = deque()

    def row(self, now_s: float) -> tuple[list[float | int | None], dict[int, float]]:
        """Returns the model's numbers in the order of COLUMNS, None where nothing was measured, and its calls of
        the handler a second by batch size. `now_s`: `time.monotonic()` seconds."""
        readings, reading = self._readings, self._read(now_s)
        while len(readings) > 1 and readings[1].at_s <= now_s - WINDOW_S:
            readings.popleft()
        before = readings[0] if readings else reading
        since_last_s = now_s - readings[-1].at_s if readings else 0.0
        readings.append(reading)
        numbers, batches = between(before, reading)
        ledger = self.model.ledger
        streams, streamed = self._streams(ledger.live.values())
        stream_bytes_per_s = round(streamed / since_last_s) if since_last_s > 0 else 0
        now = [ledger.queued, ledger.sent, streams, stream_bytes_per_s]
        return [*numbers, *now, *self._tokens_of(now_s)], batches

    def _tokens_of(self, now_s: float) -> tuple[float, float, float | None]:
        """Returns a language model's tokens of prompts and of answers a second, and its mean time to the first token,
        over the last seconds."""
        told, past = self.model.tokens, self._tokens
        if not told:  # most models: their past is one entry
            past.clear()
            past.append((now_s, {}))
            return 0, 0, None
        while len(past) > 1 and past[1][0] <= now_s - WINDOW_S:
            past.popleft()
        past.append((now_s, dict(told)))
        begun_s, before = past[0]
        seconds = now_s - begun_s
        if seconds <= 0:
            return 0, 0, None
        prompt, generated, first = (
            tuple(new - old for new, old in zip(told.get(name, (0.0, 0)), before.get(name, (0.0, 0)), strict=True))
            for name in (PROMPT_TOKENS, GENERATED_TOKENS, FIRST_TOKEN)
        )
        first_ms = _short(first[0] / first[1] * 1e3) if first[1] else None
        return _short(prompt[0] / seconds), _short(generated[0] / seconds), first_ms

    def _read(self, now_s: float) -> Reading:
        """Returns the present sums; the previous object if they haven't changed, as for most of many models."""
        last, counts = self._readings[-1] if self._readings else None, self.model.ledger.counts
        if last is not None and last.ended == sum(counts[state] for state in FINAL):
            return last._replace(at_s=now_s)
        return read(self.model, self.latencies.counts, now_s)

    def _streams(self, jobs: Iterable[Job]) -> tuple[int, int]:
        """The number of unfinished answers that have begun, and the bytes sent on them since the last reading."""
        before = self._streamed
        now = {
            job.id: job.received_bytes
            for job in islice(jobs, LIVE_MAX)
            if job.received_bytes and job.state is JobState.SENT
        }
        self._streamed = now
        return len(now), sum(size - before.get(job_id, 0) for job_id, size in now.items())


def read(model: Model, latencies: list[int], now_s: float) -> Reading:
    counts, statistics = model.ledger.counts, model.statistics
    return Reading(
        now_s,
        sum(counts[state] for state in FINAL),
        counts[JobState.ANSWERED],
        counts[JobState.FAILED] + counts[JobState.EXPIRED],
        counts[JobState.CANCELLED],
        statistics.answered,
        statistics.queue_s,
        statistics.worked_s,
        latencies.copy(),
        {size: batches.calls for size, batches in statistics.batches.items()},
    )


def between(before: Reading, now: Reading) -> tuple[list[float | int | None], dict[int, float]]:
    """Returns the first numbers of COLUMNS, up to the batch size, and the calls a second by batch size."""
    seconds = now.at_s - before.at_s
    if seconds <= 0 or before.ended == now.ended:
        return [0, 0, 0, *[None] * 6], {}
    rates = (getattr(now, name) - getattr(before, name) for name in ("answered", "failed", "cancelled"))
    found = quantiles_s([new - old for new, old in zip(now.latencies, before.latencies, strict=True)], PARTS)
    measured = now.measured - before.measured
    batches = {size: count - before.batches.get(size, 0) for size, count in now.batches.items()}
    batches = {size: count for size, count in batches.items() if count}
    calls = sum(batches.values())
    numbers: list[float | int | None] = [
        *(_short(rate / seconds) for rate in rates),
        *([None] * len(PARTS) if found is None else [_short(one * 1e3) for one in found]),
        _short((now.queue_s - before.queue_s) / measured * 1e3) if measured else None,
        _short((now.handler_s - before.handler_s) / measured * 1e3) if measured else None,
        _short(sum(size * count for size, count in batches.items()) / calls) if calls else None,
    ]
    return numbers, {size: _short(count / seconds) for size, count in batches.items()}


def _short(value: float) -> float:
    return float(f"{value:.3g}") if value else 0


class MachineLoad:
    """The load of the machine and of the server's own process since the last reading."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._before = self._times(0.0)

    def _times(self, now_s: float) -> tuple[float, float, float, float]:
        whole, own = psutil.cpu_times(), self._process.cpu_times()
        idle = whole.idle + getattr(whole, "iowait", 0.0)
        return sum(whole), idle, own.user + own.system, now_s

    def read(self, now_s: float) -> dict[str, Any]:
        """Returns percent of all cores, percent of one core for the server's process, and bytes of memory."""
        (total, idle, own, at_s), before = self._times(now_s), self._before
        self._before = total, idle, own, at_s
        spent, seconds = total - before[0], at_s - before[3]
        memory = psutil.virtual_memory()
        return {
            "cpu_percent": round(100 * (1 - (idle - before[1]) / spent), 1) if spent > 0 else 0.0,
            "server_cpu_percent": round(100 * (own - before[2]) / seconds, 1) if seconds > 0 else 0.0,
            "server_memory_bytes": self._process.memory_info().rss,
            "memory_used_bytes": memory.total - memory.available,
            "memory_total_bytes": memory.total,
        }


def key_of(model: Model) -> str:
    return f"{model.name}/{model.version}"


def models_state(registry: Registry, memory: WorkerMemory) -> list[dict[str, Any]]:
    """Returns all model versions, by name and in the order of their registration."""
    models = sorted(registry, key=lambda model: model.name)
    return [model_state(model, registry.is_default(model), memory.of) for model in models]


def model_state(model: Model, is_default: bool, memory: Callable[[Worker], int]) -> dict[str, Any]:
    settings, pool = model.settings, model.pool
    return {
        "key": key_of(model),
        "name": model.name,
        "version": model.version,
        "default": is_default,
        "status": status_of(model),
        "url": model.url,
        "registeredAt": round(model.created_s, 3),
        "workflow": model.workflow,
        "runs": model.adapter or "torchserve",
        "minWorkers": model.minimum,
        "maxWorkers": model.maximum,
        "batchSize": settings.batch_size,
        "maxBatchDelayMs": settings.max_batch_delay_ms,
        "queueSize": settings.job_queue_size,
        "responseTimeoutS": settings.response_timeout_s,
        "continuousBatching": settings.continuous_batching,
        "stateful": settings.stateful,
        "tensors": model.takes_tensors,
        "streams": model.streams,
        "chats": _chats(model),
        "inputs": [_tensor(spec) for spec in model.signature.inputs],
        "outputs": [_tensor(spec) for spec in model.signature.outputs],
        "loadFailure": pool.load_failure.cause if pool.load_failure is not None else None,
        "lastFailure": _shown(pool.last_failure),
        "lastReplacement": _shown(pool.last_replacement),
        "workers": [_worker(slot, memory) for slot in pool.slots],
    }


def _chats(model: Model) -> bool:
    """Whether its handler speaks OpenAI's API, and generates texts: a model that classifies them declares no inputs."""
    speaks = model.openai is not None and model.openai.speaks
    return speaks and (bool(model.signature.inputs) or not model.signature.declared)


def status_of(model: Model) -> str:
    if model.ready:
        return "ready"
    if model.failing:
        return "failing"
    return "loading" if model.loading else "stopped"


def _worker(slot: Slot, memory: Callable[[Worker], int]) -> dict[str, Any]:
    worker, device = slot.worker, slot.device
    found: dict[str, Any] = {
        "id": str(slot.id),
        "state": "given up" if slot.gave_up else "waiting" if worker is None else worker.state.value,
        "device": str(device),
        "failuresInARow": slot.failures,
    }
    if slot.waits_for:
        found["waitsFor"] = slot.waits_for
    if worker is not None and worker.node:
        found["node"] = worker.node["address"]
    if worker is not None:
        found |= {
            "pid": worker.pid,
            "memoryBytes": memory(worker),
            "startedAt": round(worker.started_at, 3),
        }
    return found


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape), "optional": spec.optional}


def _shown(one: Failure | Replacement | None) -> dict[str, object] | None:
    return None if one is None else one.shown(at=round(one.at, 3))


def worker_log(model: Model, worker_id: str) -> dict[str, Any] | None:
    """Returns the last lines that a worker printed, up to a hundred; None when the model has no such worker."""
    for slot in model.pool.slots:
        if str(slot.id) == worker_id:
            worker = slot.worker
            lines = worker.tail() if worker is not None else []
            return {"workerId": worker_id, "pid": worker.pid if worker is not None else 0, "lines": lines}
    return None


def server_state(about: Mapping[str, Any], *, ready: bool, draining: bool) -> dict[str, Any]:
    """Returns the state of the whole server: `about`, which doesn't change, and its health now."""
    return {**about, "ready": ready, "draining": draining}


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
