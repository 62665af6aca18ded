"""The search for a model's best configuration: a climb over a grid. Pure.

A new load (requests in flight) costs nothing, a new number of workers a scale call, a new batch size or delay a reload
of the model. So each setting of the last three is measured at several loads, from a likely one up and down, as long as
the answers a second rise. The settings are changed one at a time, or batch size and workers together, from the best
so far.

Measurements are noisy, and the best of many is most often one that was lucky. So the best few are measured again, in
turns, and the best of their medians is the result.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Generator, Iterable, Sequence
from dataclasses import astuple, dataclass, replace

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
        """The values of each member of a trial."""
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
