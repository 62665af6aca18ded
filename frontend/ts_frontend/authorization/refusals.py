"""Calls that were refused: counted, and told to the log, a few a minute. Pure: time is an argument."""

from __future__ import annotations

from collections import Counter

LINES_MAX = 10
PERIOD_S = 60.0


class Refusals:
    """`counts`: by API. At most LINES_MAX lines in PERIOD_S; the next period says how many weren't told."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._period_began_s = -PERIOD_S
        self._told = self._untold = 0

    def line(self, api: str, peer: str, why: str, now_s: float) -> str | None:
        """Counts one; what to log, None for nothing. `now_s`: of a clock that doesn't go back."""
        self.counts[api] += 1
        more = ""
        if now_s - self._period_began_s >= PERIOD_S:
            if self._untold:
                more = f" ({self._untold} earlier refusals weren't logged)"
            self._period_began_s, self._told, self._untold = now_s, 0, 0
        if self._told == LINES_MAX:
            self._untold += 1
            return None
        self._told += 1
        return f"Refused a call to the {api} API from {peer or 'a Unix socket'}: {why}{more}"
