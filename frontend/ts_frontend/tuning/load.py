"""A closed loop of requests from this process: a fixed number in flight, each answer followed by the next request."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from ts_frontend.tuning.search import Measurement, Space, Trial

#: The part of a measurement after which it ends early if its result is far below the best.
LOOK_PART, FAR_BELOW = 0.25, 0.7
#: The part of its seconds that a measurement's warm-up takes at least.
WARM_UP_PART = 0.1
#: Sends one request and returns when it is answered. Raises for any failure.
Send = Callable[[int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Length:
    """The length of a measurement: at least `seconds` and `answers`, at most `seconds_max`; a quarter of that if the
    result is far below the best by then. A warm-up before it, of a tenth of the seconds and one round of the requests
    in flight, isn't measured."""

    seconds: float = 3.0
    answers: int = 100
    seconds_max: float = 30.0

    def whole_s(self, answers_per_s: float, concurrency: int) -> float:
        """The time of a measurement with this rate that doesn't end early, with its warm-up."""
        if answers_per_s <= 0:
            return self.seconds * (1 + WARM_UP_PART)
        warm_up_s = max(self.seconds * WARM_UP_PART, concurrency / answers_per_s)
        return warm_up_s + min(max(self.seconds, self.answers / answers_per_s), self.seconds_max)

    def reached(self, spent_s: float, answers: int, best_per_s: float = 0.0) -> bool:
        """Whether `answers` in `spent_s` are enough. `best_per_s`: the best answers a second so far."""
        far = answers / max(spent_s, 1e-9) < FAR_BELOW * best_per_s
        part = LOOK_PART if far else 1.0
        ready = spent_s >= part * self.seconds and answers >= part * self.answers
        return ready or spent_s >= part * self.seconds_max


@dataclass(slots=True)
class Durations:
    """The durations of a search's steps in seconds, from which the time of an exhaustive grid is estimated: loads of
    the model, changes of its number of workers, and measurements, whose full length counts if they ended early."""

    loads_s: list[float] = field(default_factory=list)
    scalings_s: list[float] = field(default_factory=list)
    measurements_s: dict[Trial, float] = field(default_factory=dict)

    def grid_s(self, over: Space) -> float:
        """The time of measuring each configuration once: of each part its mean so far. The grid changes the load first,
        then the number of workers, so that the model is loaded once for each batch size and delay."""
        loads = len(over.batch_sizes) * len(over.delays_ms)
        parts = (
            (over.size, list(self.measurements_s.values())),
            (loads, self.loads_s),
            (loads * (len(over.workers) - 1), self.scalings_s),
        )
        return sum(number * statistics.mean(durations) for number, durations in parts if durations)


async def measure(send: Send, concurrency: int, length: Length, best_per_s: float = 0.0) -> Measurement:
    """Measures with `concurrency` requests in flight; a failed request ends the measurement. Memory isn't measured.
    `best_per_s`: the answers a second of the best measurement so far."""
    latencies_ms: list[float] = []
    numbers, errors = itertools.count(), list[str]()
    begun_s, started_s, done = time.perf_counter(), 0.0, 0

    def enough(now_s: float) -> bool:
        if not started_s:
            return now_s - begun_s > length.seconds_max
        return length.reached(now_s - started_s, len(latencies_ms), best_per_s)

    async def client() -> None:
        nonlocal done, started_s
        while not errors and not enough(time.perf_counter()):
            sent_s = time.perf_counter()
            try:
                await send(next(numbers))
            except Exception as error:  # every way in which a request can fail makes the configuration unusable
                errors.append(str(error))
                return
            now_s = time.perf_counter()
            done += 1
            if started_s:
                latencies_ms.append((now_s - sent_s) * 1000)
            elif done >= concurrency and now_s - begun_s >= length.seconds * WARM_UP_PART:
                started_s = now_s

    await asyncio.gather(*(client() for _ in range(concurrency)))
    error = next(filter(None, errors), "")
    return summary(latencies_ms, time.perf_counter() - (started_s or begun_s), len(errors), error)


def summary(latencies_ms: Sequence[float], spent_s: float, failed: int = 0, error: str = "") -> Measurement:
    if not latencies_ms:
        return Measurement(0.0, failed=failed, error=error or "no request was answered in time")
    ordered = sorted(latencies_ms)
    return Measurement(len(ordered) / spent_s, _share(ordered, 0.5), _share(ordered, 0.99), 0, failed, error)


def _share(ordered: Sequence[float], share: float) -> float:
    """The quantile: the value that a `share` (0 to 1) of the ordered values doesn't exceed."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
