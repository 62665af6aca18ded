"""What has become of a rollout's calls and copies: their numbers, their curves over time, and the last differences."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ts_frontend.telemetry.metrics.requests import BOUNDS_S, quantiles_s

#: Outcomes of requests, by version, in metrics.
ANSWERED: Final = "answered"
#: What became of the copies: same, different, failed, dropped, and uncompared (streams, large answers); the author's
#: comparison has failed.
SAME, DIFFERENT, FAILED, DROPPED, UNCOMPARED = "same", "different", "failed", "dropped", "uncompared"
COMPARISON_FAILED: Final = "comparison failed"
DIFFERENCES_KEPT_MAX: Final = 20
#: The characters of a difference's reason and of its request's id.
TOLD_MAX: Final = 300
#: The most points of the curves, and the seconds between the first ones. When there are more, they are joined in pairs.
POINTS_MAX, POINT_S = 100, 1.0
#: The numbers of a point, in order; `time`: the begin of its interval, in seconds since the epoch.
COLUMNS: Final = (
    *("time", "percent"),
    *(f"{version}_{name}" for version in ("old", "new") for name in ("answered", "failed", "p50_ms", "p99_ms")),
)


class _Ended:
    """A version's requests that ended in an interval: the failed ones, and the latencies of the answered ones."""

    __slots__ = ("_failed", "_latencies", "_numbers")

    def __init__(self) -> None:
        self._failed = 0
        self._latencies: Counter[int] = Counter()  # by their place in BOUNDS_S
        self._numbers: tuple[float | None, ...] = ()

    def add(self, failed: bool, seconds: float) -> None:
        self._numbers = ()
        if failed:
            self._failed += 1
        else:
            self._latencies[bisect_left(BOUNDS_S, seconds)] += 1

    def join(self, other: _Ended) -> None:
        self._numbers = ()
        self._failed += other._failed
        self._latencies.update(other._latencies)

    def numbers(self) -> tuple[float | None, ...]:
        """Those of COLUMNS. They are kept, since they change at the last point only."""
        if not self._numbers:
            counts = [0] * (len(BOUNDS_S) + 1)
            for place, count in self._latencies.items():
                counts[place] = count
            found = quantiles_s(counts, (0.5, 0.99))
            p50_ms, p99_ms = (None, None) if found is None else (round(one * 1000, 3) for one in found)
            self._numbers = self._latencies.total(), self._failed, p50_ms, p99_ms
        return self._numbers


@dataclass(slots=True)
class _Point:
    """The requests of an interval, by version. `percent`: the new version's share at its end."""

    place: int
    percent: float
    ended: dict[str, _Ended] = field(default_factory=lambda: defaultdict(_Ended))

    def join(self, later: _Point) -> None:
        self.percent = later.percent
        for version, ended in later.ended.items():
            self.ended[version].join(ended)


class Record:
    """`counts`: requests by version and outcome, `copies`: by result."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.copies: Counter[str] = Counter()
        self.differences: deque[dict[str, str]] = deque(maxlen=DIFFERENCES_KEPT_MAX)
        self._points: list[_Point] = []
        self._every_s = POINT_S

    def ended(self, version: str, failed: bool, seconds: float, *, percent: float, at_s: float) -> None:
        """Counts a request. `percent`: the new version's share; `at_s`: seconds since the epoch."""
        self.counts[version, FAILED if failed else ANSWERED] += 1
        points, place = self._points, int(at_s // self._every_s)
        if not points or place > points[-1].place:
            points.append(_Point(place, percent))
            if len(points) > POINTS_MAX:
                self._join()
        points[-1].percent = percent
        points[-1].ended[version].add(failed, seconds)

    def _join(self) -> None:
        """Doubles the interval until there are at most POINTS_MAX points."""
        points = self._points
        while len(points) > POINTS_MAX:
            self._every_s *= 2
            joined: list[_Point] = []
            for point in points:
                point.place //= 2
                if joined and joined[-1].place == point.place:
                    joined[-1].join(point)
                else:
                    joined.append(point)
            points[:] = joined

    def history(self, old: str, new: str) -> dict[str, Any]:
        """The curves of two versions: a row for each interval in which requests have ended."""
        rows = [
            (point.place * self._every_s, point.percent, *point.ended[old].numbers(), *point.ended[new].numbers())
            for point in self._points
        ]
        return {"seconds": self._every_s, "columns": COLUMNS, "rows": rows}

    def differs(self, request_id: str, why: str, answers: Sequence[str]) -> None:
        """Keeps a difference. `answers`: the old version's and the new one's, as they are shown."""
        old, new = answers
        self.differences.append(
            {
                "time": shown_time(time.time()),
                "requestId": request_id[:TOLD_MAX],
                "difference": why[:TOLD_MAX],
                "old": old,
                "new": new,
            }
        )


def shown_time(at_s: float) -> str:
    """Local time, of seconds since the epoch."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at_s))
