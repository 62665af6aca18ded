"""Latencies of a model's requests as finely as a screen shows them, counted only while somebody watches.

A model that nobody watches has none of this on the path of its requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from ts_frontend.telemetry.metrics.requests import RequestMetrics

STEPS_PER_OCTAVE = 6
#: Upper ends of the buckets, 12 % apart: 10 µs to 11 minutes.
BOUNDS_S = tuple(1e-5 * 2 ** (step / STEPS_PER_OCTAVE) for step in range(26 * STEPS_PER_OCTAVE + 1))


class LatencyCounts:
    """How many requests took how long: a count for each of BOUNDS_S, and one for those beyond."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1

    def since(self, before: Sequence[int]) -> list[int]:
        """Returns the counts of what came after `before`, an earlier copy of `counts`."""
        return [now - then for now, then in zip(self.counts, before, strict=True)]


def quantiles_s(counts: Sequence[int], parts: Sequence[float]) -> list[float] | None:
    """Returns the latency in seconds below which each of `parts` (ascending, in (0, 1]) of the requests lie,
    interpolated within its bucket; None without any requests."""
    total = sum(counts)
    if not total:
        return None
    found: list[float] = []
    below = 0
    for index, count in enumerate(counts):
        while len(found) < len(parts) and below + count >= parts[len(found)] * total:
            low = BOUNDS_S[index - 1] if index else 0.0
            high = BOUNDS_S[min(index, len(BOUNDS_S) - 1)]
            share = (parts[len(found)] * total - below) / count if count else 0.0
            found.append(low + (high - low) * share)
        below += count
    return found


class ObservedRequests:
    """A model's recorder that counts the latencies as well."""

    __slots__ = ("_answered", "_counts", "accepted")

    def __init__(self, recorder: RequestMetrics, latencies: LatencyCounts) -> None:
        self.accepted: Callable[[], None] = recorder.accepted
        self._answered = recorder.answered
        self._counts = latencies.counts

    def answered(self, queued_at_s: float, sent_at_s: float, now_s: float) -> None:
        """As `CountedRequests.answered`."""
        self._counts[bisect_left(BOUNDS_S, now_s - queued_at_s)] += 1
        self._answered(queued_at_s, sent_at_s, now_s)
