"""Tuning: the search for a model's best configuration, a climb over a grid.

Its measurements are made by a closed loop of requests from this process (a fixed number in flight, each answer followed
by the next request). What people see of them are rows, bars, and the lines of a model-config.yaml.

A new load (requests in flight) costs nothing, a new number of workers a scale call, a new batch size or delay a reload
of the model. So each setting of the last three is measured at several loads, from a likely one up and down, as long as
the answers a second rise. The settings are changed one at a time, or batch size and workers together, from the best
so far.

Measurements are noisy, and the best of many is most often one that was lucky. So the best few are measured again, in
turns, and the best of their medians is the result.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import re
import statistics
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

#: Gains below this share don't count: measurements of one configuration differ by as much.
GAIN_MIN = 0.02
#: A search ends after a tenth of the grid, but not before this number of measurements.
EVALUATIONS_MIN = 32
#: The number of configurations that are measured again at the end, and how often each is measured altogether.
RIVALS, LOOKS = 4, 3


@dataclass(frozen=True, slots=True)
class Trial:
    """A configuration to measure. `concurrency`: requests in flight, of all clients together."""

    batch_size: int
    delay_ms: int
    workers: int
    concurrency: int

    @property
    def settings(self) -> tuple[int, int, int]:
        return self.batch_size, self.delay_ms, self.workers


@dataclass(frozen=True, slots=True)
class Measurement:
    """A trial's measurement. `error`: why the trial, or its first request without an answer, failed."""

    answers_per_s: float
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    memory_bytes: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of a configuration; None for no limit. `memory_bytes`: of all workers of the model together."""

    p99_ms: float | None = None
    memory_bytes: int | None = None

    def excess(self, found: Measurement) -> float:
        """The factor by which the measurement exceeds a bound, less 1; 0 within all, infinity after a failure."""
        if found.error:
            return math.inf
        pairs = ((found.p99_ms, self.p99_ms), (found.memory_bytes, self.memory_bytes))
        return max([0.0, *(value / most - 1 for value, most in pairs if most is not None)])


@dataclass(frozen=True, slots=True)
class Space:
    """The values that are tried, in rising order."""

    batch_sizes: Sequence[int]
    delays_ms: Sequence[int]
    workers: Sequence[int]
    concurrencies: Sequence[int]

    @property
    def axes(self) -> tuple[Sequence[int], ...]:
        return self.batch_sizes, self.delays_ms, self.workers, self.concurrencies

    @property
    def size(self) -> int:
        return math.prod(map(len, self.axes))


def rank(found: Measurement, bounds: Bounds) -> tuple[float, float, float]:
    """Higher is better: first those within the bounds, then more answers, then a lower p99."""
    excess = bounds.excess(found)
    return (-excess, found.answers_per_s if excess == 0 else -found.p99_ms, -found.p99_ms)


def best_within(trials: Iterable[tuple[Trial, Measurement]], bounds: Bounds) -> float:
    """The most answers a second of the trials within the bounds; 0 without any."""
    return max((found.answers_per_s for _, found in trials if bounds.excess(found) == 0), default=0.0)


def better(one: Measurement, other: Measurement | None, bounds: Bounds) -> bool:
    """Whether `one` is better by more than the noise of measurements."""
    if other is None:
        return True
    mine, theirs = bounds.excess(one), bounds.excess(other)
    if mine != theirs:
        return mine < theirs
    if mine == 0:
        return one.answers_per_s > other.answers_per_s * (1 + GAIN_MIN)
    return one.p99_ms < other.p99_ms * (1 - GAIN_MIN)


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search: `best` is None if every candidate failed. `within`: it is within the bounds."""

    best: Trial | None
    measured: Measurement | None
    within: bool
    evaluations: int


Search = Generator[Trial, Measurement, Found]


def search(space: Space, bounds: Bounds, start: Trial | None = None) -> Search:
    """Yields the candidates to measure, some of them several times, is sent their measurements, and returns the best.
    `start`: the present configuration, whose settings are measured first."""
    return _Climb(space, bounds).run(start)


def middle_of(found: Sequence[Measurement]) -> Measurement:
    """The medians of measurements of one configuration; a failed one if any has failed."""
    for one in found:
        if one.error or len(found) == 1:
            return one
    return Measurement(
        statistics.median(one.answers_per_s for one in found),
        statistics.median(one.p50_ms for one in found),
        statistics.median(one.p99_ms for one in found),
        max(one.memory_bytes for one in found),
    )


class _Climb:
    def __init__(self, space: Space, bounds: Bounds) -> None:
        self._space = space
        self._bounds = bounds
        self._looks: dict[Trial, list[Measurement]] = {}
        self._seen: dict[Trial, Measurement] = {}  # the middle of each trial's measurements
        # A load ladder and the last measurements may go over it.
        self._most = max(EVALUATIONS_MIN, space.size // 10 - len(space.concurrencies) - 2 * RIVALS * LOOKS)

    def run(self, start: Trial | None) -> Search:
        space = self._space
        least = first = Trial(*(axis[0] for axis in space.axes))
        if start:
            first = Trial(*(axis[_index(axis, at)] for axis, at in zip(space.axes, astuple(start), strict=True)))
        current = yield from self._load(first)
        batch_size, workers = (axis[len(axis) // 2] for axis in (space.batch_sizes, space.workers))
        middle = Trial(batch_size, least.delay_ms, workers, first.concurrency)  # a likely good start
        corner = yield from self._load(middle)
        if better(self._seen[corner], self._seen[current], self._bounds):
            current = corner
        yield from self._settle(current)
        if not self._found().within and not self._spent:  # a local best beyond the bounds
            yield from self._settle((yield from self._load(least)))
        yield from self._make_sure()
        if (best := self._found(sure=True).best) is not None:  # it may be another one, with better neighbours
            yield from self._settle(best)
            yield from self._make_sure()
        return self._found(sure=True)

    def _make_sure(self) -> Generator[Trial, Measurement, None]:
        ranked = sorted(self._seen, key=lambda one: rank(self._seen[one], self._bounds), reverse=True)
        for looks in range(1, LOOKS):
            for one in ranked[:RIVALS]:
                if len(self._looks[one]) == looks and not self._seen[one].error:
                    yield from self._measure(one, again=True)

    def _settle(self, current: Trial) -> Generator[Trial, Measurement, None]:
        before = -1
        while self._measured > before and not self._spent:
            before = self._measured
            current = yield from self._climb(current)
            current = yield from self._shrink(current)

    def _climb(self, current: Trial) -> Generator[Trial, Measurement, Trial]:
        moved, last = True, _STEPS[0]
        while moved and not self._spent:
            moved = False
            for step in (last, *(one for one in _STEPS if one != last)):
                neighbour = self._beside(current, step)
                if neighbour is None:
                    continue
                found = yield from self._load(neighbour, current)
                if better(self._seen[found], self._seen[current], self._bounds):
                    current, moved, last = found, True, step
                if moved or self._spent:
                    break
        return current

    def _shrink(self, current: Trial) -> Generator[Trial, Measurement, Trial]:
        """The candidate with the fewest workers that is as good."""
        workers = self._space.workers
        while (index := workers.index(current.workers)) > 0 and not self._spent:
            found = yield from self._load(replace(current, workers=workers[index - 1]))
            if better(self._seen[current], self._seen[found], self._bounds):
                break
            current = found
        return self._found().best or current

    @property
    def _spent(self) -> bool:
        return len(self._seen) >= self._most

    @property
    def _measured(self) -> int:
        return sum(len(looks) for looks in self._looks.values())

    def _measure(self, candidate: Trial, again: bool = False) -> Generator[Trial, Measurement, Measurement]:
        if again or candidate not in self._seen:
            looks = self._looks.setdefault(candidate, [])
            looks.append((yield candidate))
            self._seen[candidate] = middle_of(looks)
        return self._seen[candidate]

    def _load(self, candidate: Trial, beside: Trial | None = None) -> Generator[Trial, Measurement, Trial]:
        """The candidate at the best load for its settings: up from a likely load while the answers a second rise, else
        down. `beside`: the neighbour from which it was reached, at its best load."""
        loads = self._space.concurrencies
        likely = candidate.batch_size * candidate.workers
        if beside is not None:
            likely = max(likely, beside.concurrency)
        index = _index(loads, likely)
        best = replace(candidate, concurrency=loads[index])
        first = yield from self._measure(best)
        if self._bounds.excess(Measurement(0, memory_bytes=first.memory_bytes)) > 0:
            return best  # another load takes no less memory
        for step in (1, -1):
            at, moved = index + step, False
            while 0 <= at < len(loads):
                found = replace(candidate, concurrency=loads[at])
                measured = yield from self._measure(found)
                if not better(measured, self._seen[best], self._bounds):
                    break
                best, moved, at = found, True, at + step
            if moved:
                break
        return best

    def _beside(self, current: Trial, step: Sequence[int]) -> Trial | None:
        """The candidate one step away in some settings; None beyond the grid."""
        axes = self._space.axes[:3]
        at = [axis.index(value) + by for axis, value, by in zip(axes, current.settings, step, strict=True)]
        if not all(0 <= place < len(axis) for place, axis in zip(at, axes, strict=True)):
            return None
        batch_size, delay_ms, workers = (axis[place] for place, axis in zip(at, axes, strict=True))
        return Trial(batch_size, delay_ms, workers, current.concurrency)

    def _found(self, sure: bool = False) -> Found:
        """The best trial; among equals, the one with the fewest resources. `sure`: none that was measured once."""
        usable = {one: it for one, it in self._seen.items() if not math.isinf(self._bounds.excess(it))}
        if sure:
            usable = {one: it for one, it in usable.items() if len(self._looks[one]) > 1} or usable
        if not usable:
            return Found(None, None, False, self._measured)
        top = max(usable, key=lambda one: rank(usable[one], self._bounds))
        as_good = [one for one in usable if not better(usable[top], usable[one], self._bounds)]
        best = min(as_good, key=lambda one: (one.workers, one.concurrency, one.batch_size, one.delay_ms))
        return Found(best, usable[best], self._bounds.excess(usable[best]) == 0, self._measured)


#: Changes of batch size, delay and workers: of one setting first, then of the batch size with another. Two workers more
#: come last: with one more, the next load of the grid may be too much.
_CHANGES = itertools.product((1, 0, -1), repeat=3)
_STEPS = sorted((one for one in _CHANGES if any(one) and not all(one[1:])), key=lambda one: sum(map(abs, one)))
_STEPS += [(0, 0, 2), (0, 0, -2)]


def _index(values: Sequence[int], wanted: int) -> int:
    """The index of the least value that isn't smaller, or of the last."""
    return next((index for index, value in enumerate(values) if value >= wanted), len(values) - 1)


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


HEAD = (
    f"{'batch':>5} {'delay':>6} {'workers':>7} {'in flight':>9} {'answers/s':>10} {'p50':>8} {'p99':>8} {'memory':>8}"
)
BAR_CHARS = 20
BARS = "▁▂▃▄▅▆▇█"
Trials = Sequence[tuple[Trial, Measurement]]


def row(trial: Trial, found: Measurement, bounds: Bounds, best_per_s: float) -> str:
    """The line of one measurement; its bar is relative to the best so far."""
    excess = bounds.excess(found)
    if math.isinf(excess):
        note = f"failed: {' '.join(found.error.split())[:80]}"
    else:
        filled = round(BAR_CHARS * found.answers_per_s / max(best_per_s, found.answers_per_s, 1e-9))
        note = "█" * filled + ("  over the bound" if excess > 0 else "")
    return (
        f"{trial.batch_size:>5} {trial.delay_ms:>3} ms {trial.workers:>7} {trial.concurrency:>9}"
        f" {found.answers_per_s:>10.1f} {_ms(found.p50_ms):>8} {_ms(found.p99_ms):>8}"
        f" {found.memory_bytes / 2**20:>4.0f} MiB  {note}"
    ).rstrip()


def sparkline(values: Sequence[float]) -> str:
    """One character for each value, from 0 to the greatest."""
    most = max(values, default=0.0) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int(value / most * len(BARS)))] for value in values)


def conclusion(found: Found, trials: Trials, bounds: Bounds) -> str:
    """The last lines: the course of the search, and its result."""
    lines = [f"{sparkline([it.answers_per_s for _, it in trials])}  answers a second, {found.evaluations} measurements"]
    if found.best is None or found.measured is None:
        return "\n".join([*lines, "No configuration answered."])
    best, it = found.best, found.measured
    if not found.within:
        lines.append(f"No configuration keeps {_bounds_text(bounds)}. The nearest:")
    lines.append(
        f"batchSize {best.batch_size}, maxBatchDelay {best.delay_ms} ms, {best.workers} workers: {it.answers_per_s:.1f}"
        f" answers a second with {best.concurrency} in flight, p99 {_ms(it.p99_ms)}, {it.memory_bytes / 2**20:.0f} MiB"
    )
    return "\n".join(lines)


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"


def _bounds_text(bounds: Bounds) -> str:
    texts = [f"p99 of {bounds.p99_ms:g} ms"] if bounds.p99_ms is not None else []
    texts += [f"memory of {bounds.memory_bytes / 2**20:.0f} MiB"] if bounds.memory_bytes is not None else []
    return " and ".join(texts)


def as_json(found: Found, trials: Trials) -> dict[str, Any]:
    def one(trial: Trial, it: Measurement) -> dict[str, Any]:
        return {**settings_of(trial), "inFlight": trial.concurrency, **asdict(it)}

    best = None if found.best is None or found.measured is None else one(found.best, found.measured)
    return {"best": best, "within": found.within, "trials": [one(trial, it) for trial, it in trials]}


def settings_of(trial: Trial) -> dict[str, int]:
    """The trial's settings by their keys in model-config.yaml."""
    return {
        "minWorkers": trial.workers,
        "maxWorkers": trial.workers,
        "batchSize": trial.batch_size,
        "maxBatchDelay": trial.delay_ms,
    }


def with_settings(text: str, settings: Mapping[str, int]) -> str:
    """The text of a model-config.yaml with these keys, changed in their lines or appended; all else stays."""
    left = dict(settings)
    lines = []
    for line in text.splitlines():
        key = re.match(r"(\w+)\s*:", line)
        lines.append(f"{key[1]}: {left.pop(key[1])}" if key and key[1] in left else line)
    return "\n".join([*lines, *(f"{key}: {value}" for key, value in left.items())]) + "\n"
