"""The search for a model's configuration, against surfaces whose best point an exhaustive grid tells."""

from __future__ import annotations

import itertools
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ts_frontend.tuning.load import Length
from ts_frontend.tuning.search import (
    Bounds,
    Found,
    Measurement,
    Space,
    Trial,
    best_within,
    middle_of,
    rank,
    search,
)

SPACE = Space(
    (1, 2, 4, 8, 16, 32, 64), (0, 1, 2, 5, 10, 20, 50), (1, 2, 3, 4, 6, 8), (1, 2, 4, 8, 16, 32, 64, 128, 256)
)
Surface = Callable[[Trial], Measurement]


def trials_of(space: Space) -> Iterator[Trial]:
    return itertools.starmap(Trial, product(space.batch_sizes, space.delays_ms, space.workers, space.concurrencies))


def server(
    fixed_ms: float, each_ms: float, cores: int, transfer_ms: float, memory: int, worth_waiting: float = 1.0
) -> Surface:
    """A server with clients that ask again as soon as they are answered. A call of the handler with n requests takes
    `fixed_ms` + n · `each_ms`, longer when there are more workers than cores; a request is under way for `transfer_ms`
    beside that. `worth_waiting`: the share of a full batch that is there without a delay."""

    def measure(at: Trial) -> Measurement:
        share = at.concurrency / at.workers
        fill = worth_waiting if at.delay_ms == 0 else 1.0
        rows = max(1.0, min(at.batch_size * fill, share))
        waits = at.delay_ms if at.delay_ms and share < at.batch_size else 0.0
        slower = max(1.0, at.workers / cores)
        cycle_ms = (fixed_ms + rows * each_ms) * slower + waits
        busy = min(at.workers, at.concurrency)
        most = busy * rows / cycle_ms
        alone = at.concurrency / (cycle_ms + transfer_ms)
        per_ms = min(most, alone)
        latency_ms = at.concurrency / per_ms
        return Measurement(per_ms * 1000, latency_ms, latency_ms * 1.3, at.workers * memory)

    return measure


def run(surface: Surface, bounds: Bounds, space: Space = SPACE, start: Trial | None = None) -> tuple[Found, int]:
    """The result, and the number of measurements."""
    climb, measured = search(space, bounds, start), 0
    try:
        candidate = next(climb)
        while True:
            measured += 1
            candidate = climb.send(surface(candidate))
    except StopIteration as end:
        return end.value, measured


def best_of_grid(surface: Surface, bounds: Bounds, space: Space = SPACE) -> Measurement:
    return max((surface(one) for one in trials_of(space)), key=lambda found: rank(found, bounds))


def good_enough(surface: Surface, bounds: Bounds, space: Space = SPACE, start: Trial | None = None) -> None:
    found, measured = run(surface, bounds, space, start)
    best = best_of_grid(surface, bounds, space)
    assert measured == found.evaluations and measured <= space.size / 10, measured
    assert found.best is not None and found.measured == surface(found.best)
    if bounds.excess(best) == 0:
        assert found.within and found.measured.answers_per_s >= 0.9 * best.answers_per_s, (found, best)
    else:
        assert not found.within


@settings(max_examples=30, derandomize=True)  # a heuristic: a rare surface is beyond it
@given(
    fixed_ms=st.floats(0.1, 100),
    each_ms=st.floats(0.01, 20),
    cores=st.integers(1, 16),
    transfer_ms=st.floats(0.05, 5),
    worth_waiting=st.floats(0.3, 1),
)
def test_within_a_tenth_of_the_best_in_a_tenth_of_the_evaluations(
    fixed_ms: float, each_ms: float, cores: int, transfer_ms: float, worth_waiting: float
) -> None:
    good_enough(server(fixed_ms, each_ms, cores, transfer_ms, 100, worth_waiting), Bounds())


@settings(max_examples=30, derandomize=True)  # a heuristic: a rare surface is beyond it
@given(
    fixed_ms=st.floats(0.1, 100),
    each_ms=st.floats(0.01, 20),
    cores=st.integers(1, 16),
    allowed=st.floats(1.5, 30),
    workers=st.floats(1.1, 10),
    start=st.sampled_from(list(trials_of(SPACE))),
)
# The bound allows a smaller load than the batches could take: a ladder of loads that begins above it wastes the search.
@example(fixed_ms=49, each_ms=15, cores=3, allowed=1.8125, workers=4, start=Trial(32, 50, 1, 1))
# Four workers keep the bound with four clients, eight with eight; six keep it with no more than four.
@example(fixed_ms=1.0, each_ms=1.0, cores=8, allowed=1.5, workers=8.0, start=Trial(1, 0, 1, 1))
def test_also_under_bounds_and_from_any_start(
    fixed_ms: float, each_ms: float, cores: int, allowed: float, workers: float, start: Trial
) -> None:
    surface = server(fixed_ms, each_ms, cores, 0.1, 100)
    bounds = Bounds(p99_ms=allowed * (fixed_ms + each_ms), memory_bytes=int(workers * 110))
    good_enough(surface, bounds, SPACE, start)


def test_a_local_best_beyond_the_bounds_is_left() -> None:
    surface = server(1.0, 1.0, 4, 0.1, 100)
    start = Trial(batch_size=1, delay_ms=0, workers=6, concurrency=1)
    good_enough(surface, Bounds(p99_ms=4.0, memory_bytes=165), SPACE, start)


def test_bounds_that_nothing_keeps_are_told_with_what_comes_nearest() -> None:
    found, _ = run(server(50, 1, 2, 0.1, 100), Bounds(p99_ms=1))
    assert not found.within and found.best is not None
    assert (found.best.concurrency, found.best.batch_size) == (1, 1)


def test_candidates_that_fail_are_none() -> None:
    surface = server(10, 0.1, 4, 0.1, 100)

    def measure(at: Trial) -> Measurement:
        return Measurement(0, error="out of memory") if at.batch_size > 8 else surface(at)

    found, _ = run(measure, Bounds())
    assert found.best is not None and found.best.batch_size == 8
    nothing, _ = run(lambda at: Measurement(0, error="no"), Bounds())
    assert (nothing.best, nothing.measured, nothing.within) == (None, None, False)


def time_of(length: Length, rate: float, best_per_s: float) -> float:
    """The duration of a measurement with this rate, in seconds, looked at after each answer, without a clock."""
    answers = range(1, 10**8)
    return answers[bisect_left(answers, True, key=lambda one: length.reached(one / rate, one, best_per_s))] / rate


@settings(max_examples=30, derandomize=True)  # a heuristic: a rare surface is beyond it
@given(
    seed=st.integers(0, 10**6),
    fixed_ms=st.floats(5, 100),
    each_ms=st.floats(1, 20),
    cores=st.integers(1, 8),
    noisy=st.floats(0, 0.1),
)
def test_measurements_that_are_far_from_the_best_end_early_and_lose_nothing(
    seed: int, fixed_ms: float, each_ms: float, cores: int, noisy: float
) -> None:
    """One that ends early saw less: its noise is twice that of a whole one."""
    exact, noise, length = server(fixed_ms, each_ms, cores, 0.1, 100), random.Random(seed), Length()
    trials: list[tuple[Trial, Measurement]] = []
    climb, spent_s, whole_s = search(SPACE, Bounds()), 0.0, 0.0
    candidate = next(climb)
    while True:
        rate = exact(candidate).answers_per_s
        best_per_s = best_within(trials, Bounds())
        took_s, all_s = time_of(length, rate, best_per_s), time_of(length, rate, 0)
        spread = noisy / 3 * (2 if took_s < all_s else 1)
        measured = Measurement(rate * max(0.5, noise.gauss(1, spread)), 1, 1, 0)
        trials.append((candidate, measured))
        spent_s, whole_s = spent_s + took_s, whole_s + all_s
        try:
            candidate = climb.send(measured)
        except StopIteration as end:
            found = end.value.best
            break
    assert spent_s <= whole_s
    best = best_of_grid(exact, Bounds())
    assert exact(found).answers_per_s >= (0.9 - noisy) * best.answers_per_s


def lucky(exact: Surface, nth: int) -> Surface:
    """A surface whose nth measurement is three times the true value."""
    numbers = itertools.count()

    def measure(at: Trial) -> Measurement:
        found = exact(at)
        return replace(found, answers_per_s=3 * found.answers_per_s) if next(numbers) == nth else found

    return measure


@pytest.mark.parametrize("nth", [0, 3, 9])
def test_one_lucky_measurement_does_not_end_a_search(nth: int) -> None:
    for fixed, each, cores in SERVERS:
        exact = server(fixed, each, cores, 0.1, 100)
        found, _ = run(lucky(exact, nth), Bounds())
        assert found.best is not None
        assert exact(found.best).answers_per_s >= 0.9 * best_of_grid(exact, Bounds()).answers_per_s, (found, fixed)


def test_the_middle_of_measurements_is_their_median_and_fails_with_any() -> None:
    looks = [Measurement(100, 1, 5, 10), Measurement(20, 9, 50, 30), Measurement(90, 2, 6, 20)]
    assert middle_of(looks) == Measurement(90, 2, 6, 30)
    failed = Measurement(0, error="no memory")
    assert middle_of([*looks, failed]) == failed


#: Milliseconds of a call and of each of its rows, and processors: of 18 servers.
SERVERS = [(fixed, each, cores) for fixed in (0.5, 5, 40) for each in (0.05, 1, 10) for cores in (2, 8)]


def test_a_search_takes_few_measurements() -> None:
    """The means of 18 servers with 2646 configurations each."""
    measured = [run(server(*one, 0.1, 100), Bounds())[1] for one in SERVERS]
    assert sum(measured) / len(measured) < 65, measured


def test_with_bounds_and_from_a_poor_start_it_takes_few_more() -> None:
    measured = []
    for fixed_ms, each_ms, cores in SERVERS:
        bounds = Bounds(p99_ms=3 * (fixed_ms + each_ms), memory_bytes=440)
        surface = server(fixed_ms, each_ms, cores, 0.1, 100)
        measured.append(run(surface, bounds, start=Trial(32, 50, 1, 1))[1])
    assert sum(measured) / len(measured) < 110, measured


@pytest.mark.parametrize(
    ("spent_s", "answers", "best_per_s", "reached"),
    [
        (3.0, 100, 0, True),
        (3.0, 99, 0, False),
        (2.9, 500, 0, False),
        (30.0, 1, 0, True),
        (0.75, 25, 100, True),  # 33 a second: far below
        (0.75, 75, 100, False),  # as good
        (0.75, 200, 100, False),  # far above: the rest tells whether it was luck
        (0.7, 25, 100, False),
        (7.5, 1, 100, True),
    ],
)
def test_when_a_measurement_has_seen_enough(spent_s: float, answers: int, best_per_s: float, reached: bool) -> None:
    assert Length(3.0, 100, 30.0).reached(spent_s, answers, best_per_s) is reached
