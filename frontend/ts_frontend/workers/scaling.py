"""Autoscaling: the number of workers that a model's load needs. `Scaling` is pure, time is an argument; `PoolScaler`
samples a pool and scales it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ts_frontend.tasks import watched
from ts_frontend.workers.failures import StartFailed
from ts_frontend.workers.pool import Pool
from ts_frontend.workers.worker import WorkerState

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """The rule of autoscaling. `target_queue`: requests that may wait for each worker; `target_wait_s`: seconds that
    90 % of the requests may wait (0: any time). Exceeding either for `up_after_s` adds workers; workers that were
    not needed for `down_after_s` are ended."""

    target_queue: float = 1.0
    target_wait_s: float = 0.0
    up_after_s: float = 1.0
    down_after_s: float = 60.0


class LoadSample(NamedTuple):
    """The load of a pool at one time. `queued`: requests that wait, `held` of them in engines; `wait_p90_s`: of the
    waiting and running requests; `at_once`: requests that one worker runs together; `ready`: the number of `workers`
    that accept requests."""

    queued: int
    running: int
    wait_p90_s: float
    workers: int
    ready: int
    at_once: int = 1
    held: int = 0

    @property
    def needed(self) -> int:
        """The number of workers with which none of these requests would wait."""
        return math.ceil((self.queued + self.running) / self.at_once)


class ScalingDecision(NamedTuple):
    """A change of the number of workers, `at` seconds since the epoch."""

    at: float
    before: int
    workers: int
    reason: str


class Scaling:
    """Decides between `least` and `most` workers. After a decision, the next one needs its full time again, so a
    constant load causes at most one correction downwards."""

    def __init__(self, rule: ScalingRule) -> None:
        self.rule = rule
        self._crowded_since_s: float | None = None
        #: (time, needed workers) of the samples in the window, without those that a later one exceeds: the first is the
        #: largest.
        self._needs: deque[tuple[float, int]] = deque()
        self._begun_s: float | None = None

    def decide(self, now_s: float, sample: LoadSample, least: int, most: int) -> tuple[int, str] | None:
        """Takes a sample; returns the wanted workers and the reason, None for no change. `now_s` never decreases."""
        rule = self.rule
        self._remember(now_s, sample)
        if sample.workers < least or sample.workers > most:
            return self._decided(now_s, min(max(sample.workers, least), most), f"between {least} and {most} workers")
        if self._crowded(sample):
            if self._crowded_since_s is None:
                self._crowded_since_s = now_s
            long_s = now_s - self._crowded_since_s
            if long_s >= rule.up_after_s and sample.ready == sample.workers < most:
                fits = math.ceil((sample.queued + sample.running) / (sample.at_once + rule.target_queue))
                wanted = min(max(fits, sample.workers + 1), 2 * sample.workers, most)
                reason = f"{sample.queued} requests wait, 90 % of all for {sample.wait_p90_s:.3g} s or less"
                return self._decided(now_s, wanted, reason)
            return None
        self._crowded_since_s = None
        if self._begun_s is None or now_s - self._begun_s < rule.down_after_s:
            return None
        wanted = max(least, min(self._needs[0][1], most))
        if wanted >= sample.workers:
            return None
        return self._decided(now_s, wanted, f"no more than {wanted} were busy in {rule.down_after_s:g} s")

    def _crowded(self, sample: LoadSample) -> bool:
        if not sample.queued:
            return False
        late = 0 < self.rule.target_wait_s < sample.wait_p90_s
        return late or sample.queued > self.rule.target_queue * max(1, sample.workers)

    def _remember(self, now_s: float, sample: LoadSample) -> None:
        if self._begun_s is None:
            self._begun_s = now_s
        needs = self._needs
        while needs and needs[-1][1] <= sample.needed:
            needs.pop()
        needs.append((now_s, sample.needed))
        while needs[0][0] < now_s - self.rule.down_after_s:
            needs.popleft()

    def _decided(self, now_s: float, wanted: int, reason: str) -> tuple[int, str]:
        self._crowded_since_s = None
        self._needs.clear()
        self._begun_s = now_s
        return wanted, reason


def percentile(values: Sequence[float], part: float) -> float:
    """The value that `part` (0 to 1) of the values don't exceed; 0 without values."""
    if not values:
        return 0.0
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


class PoolScaler:
    """Scales a pool by its load, between `least` and `most`; inactive while they are equal or `least` is 0.
    `batch_size`: of the handler's batches."""

    def __init__(self, pool: Pool, rule: ScalingRule, batch_size: int) -> None:
        self.pool = pool
        self.rule = rule
        self.least = self.most = 0
        self.last: ScalingDecision | None = None
        self.ups = self.downs = 0
        self._batch_size = batch_size
        #: The requests that a full engine ran when workers were added for those that waited in it, until none is there.
        self._fitted: int | None = None
        self._scaling = Scaling(rule)
        self._changing: asyncio.Task[None] | None = None

    @property
    def active(self) -> bool:
        return 0 < self.least < self.most

    def between(self, least: int, most: int) -> int:
        """Scales between these numbers; returns those to begin with: the present one, if it is within them."""
        self.least, self.most = least, most
        return min(max(len(self.pool.slots), least), most) if self.active else least

    def sample(self, now_s: float) -> LoadSample:
        waiting = self.pool.queue.waiting()
        workers = [slot.worker for slot in self.pool.slots if slot.worker is not None]
        running = [job for worker in workers if worker.state is WorkerState.READY for job in worker.jobs()]
        held = sum(worker.waiting for worker in workers if worker.state is WorkerState.READY)
        waits = [now_s - job.queued_at_s for job in waiting]
        waits += [job.sent_at_s - job.queued_at_s for job in running]
        at_once = next((worker.concurrency for worker in workers if worker.info), 0) or self._batch_size
        if not running:
            self._fitted = None
        kept = sum(not slot.gave_up for slot in self.pool.slots)
        ready = self.pool.ready_count
        return LoadSample(
            len(waiting) + held,
            len(running) - held,
            percentile(waits, 0.9),
            kept,
            ready,
            min(at_once, self._fitted or at_once),
            held,
        )

    def tick(self, now_s: float) -> None:
        """Takes a sample, and begins a change that is due, unless one is under way."""
        if not self.active or not self.pool.slots:
            return
        if self._changing is not None and not self._changing.done():
            return
        sample = self.sample(now_s)
        found = self._scaling.decide(now_s, sample, self.least, self.most)
        if found is None:
            return
        wanted, reason = found
        if sample.held and wanted > sample.workers:
            self._fitted = max(1, sample.running // max(1, sample.ready))
        self.last = ScalingDecision(time.time(), sample.workers, wanted, reason)
        self.ups += wanted > sample.workers
        self.downs += wanted < sample.workers
        log.info("%s gets %s workers instead of %s: %s.", self.pool.name, wanted, sample.workers, reason)
        self._changing = watched(self._change(wanted), f"The scaling of {self.pool.name}")

    async def _change(self, wanted: int) -> None:
        try:
            await self.pool.scale(wanted)
        except StartFailed as error:
            log.warning("%s does not get all of its %s workers yet: %s", self.pool.name, wanted, error.message)

    async def close(self) -> None:
        """Ends a change under way; the pool's own end follows."""
        self.least = self.most = 0
        if self._changing is not None:
            self._changing.cancel()
            await asyncio.wait({self._changing})
