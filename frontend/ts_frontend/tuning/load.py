"""A closed loop of requests from this process: a fixed number in flight, each answer followed by the next request."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from ts_frontend.tuning.search import Measurement

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

    def reached(self, spent_s: float, answers: int, best_per_s: float = 0.0) -> bool:
        """Whether `answers` in `spent_s` are enough. `best_per_s`: the best answers a second so far."""
        far = answers / max(spent_s, 1e-9) < FAR_BELOW * best_per_s
        part = LOOK_PART if far else 1.0
        ready = spent_s >= part * self.seconds and answers >= part * self.answers
        return ready or spent_s >= part * self.seconds_max


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
                errors.append(str(error) or type(error).__name__)
                return
            now_s = time.perf_counter()
            done += 1
            if started_s:
                latencies_ms.append((now_s - sent_s) * 1000)
            elif done >= concurrency and now_s - begun_s >= length.seconds * WARM_UP_PART:
                started_s = now_s

    await asyncio.gather(*(client() for _ in range(concurrency)))
    spent_s = time.perf_counter() - (started_s or begun_s)
    return summary(latencies_ms, spent_s, next(iter(errors), ""))


def summary(latencies_ms: Sequence[float], spent_s: float, error: str = "") -> Measurement:
    if not latencies_ms:
        return Measurement(0.0, error=error or "no request was answered in time")
    ordered = sorted(latencies_ms)
    return Measurement(len(ordered) / spent_s, _share(ordered, 0.5), _share(ordered, 0.99), error=error)


def _share(ordered: Sequence[float], share: float) -> float:
    """The quantile: the value that a `share` (0 to 1) of the ordered values doesn't exceed."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
