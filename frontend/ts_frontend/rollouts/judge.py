"""The comparison of a new version with the one before it, which may be looked at at any time.

Each criterion is a share of requests: those that failed, those that took longer than a quantile of the old version's,
those whose answers differ. The bounds of a share hold at all times together with the chosen certainty (a mixture of
likelihood ratios, Robbins 1970), so that looking every second doesn't make a verdict by chance. Pure: no clock, no I/O.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

#: The most rollouts of a good version that may go back, and of a bad one that may be promoted.
FALSE_SHARE_MAX = 0.01
#: The criteria that are judged anew at each step, and all of them.
STEP_CRITERIA, CRITERIA = 3, 4
#: Requests of a version that end in this time count once: a stalled worker ends many together, which says little more.
APART_S = 0.02
#: The old version's latencies of which the quantiles are taken, and the number of requests between two looks at them.
RECENT, RENEWED = 500, 100
QUANTILES = {"p50": 0.5, "p99": 0.99}
#: How much larger the new version's share of requests above the median may be. It may be a third of that at random.
MEDIAN_RISE_MAX = 0.15
#: A rise of less than this part of the limit isn't held against a version.
TOLERATED = 0.25
#: The prior weights of the mixture, which suit small shares.
_PRIOR = 0.5
_STEPS_OF_BISECTION = 40


@dataclass(slots=True)
class Tally:
    """The number of observations, and how many of them are bad."""

    count: int = 0
    bad: int = 0

    def add(self, bad: bool) -> None:
        self.count += 1
        self.bad += bad

    def bounds(self, doubt: float) -> tuple[float, float]:
        """The bounds of the share of bad ones, which are both right at all times but for the probability `doubt`."""
        count, bad = self.count, self.bad
        if not count:
            return 0.0, 1.0
        evidence = _log_beta(bad + _PRIOR, count - bad + _PRIOR) - _log_beta(_PRIOR, _PRIOR)
        limit, share = math.log(1 / doubt), bad / count

        def excluded(guess: float) -> bool:
            return evidence - _log_likelihood(count, bad, guess) >= limit

        return _edge(excluded, 0.0, share), _edge(excluded, 1.0, share)


def _log_beta(one: float, other: float) -> float:
    return math.lgamma(one) + math.lgamma(other) - math.lgamma(one + other)


def _log_likelihood(count: int, bad: int, share: float) -> float:
    found = 0.0
    for times, each in ((bad, share), (count - bad, 1 - share)):
        if times:
            found += times * (math.log(each) if each > 0 else -math.inf)
    return found


def _edge(excluded: Any, outside: float, inside: float) -> float:
    """The share next to `inside` that is excluded, between it and `outside`."""
    if not excluded(outside):
        return outside
    for _ in range(_STEPS_OF_BISECTION):
        middle = (outside + inside) / 2
        if excluded(middle):
            outside = middle
        else:
            inside = middle
    return outside


class Word(Enum):
    """What to do: stay at the step, go to the next one, go back."""

    WAIT = "wait"
    GO_ON = "go on"
    GO_BACK = "go back"


class Verdict(NamedTuple):
    word: Word
    reason: str


class Limits(NamedTuple):
    """What a new version may be worse by. `errors`, `differences`: shares of requests; `p50`, `p99`: ratios of
    latencies. 0: not judged."""

    errors: float = 0.02
    p50: float = 1.2
    p99: float = 1.5
    differences: float = 0.02


class Criterion(NamedTuple):
    """`what`: the requests that are counted; `rise_max`: the rise of their share that is too much."""

    what: str
    rise_max: float
    new: Tally
    old: Tally | None = None

    def __str__(self) -> str:
        beside = "" if self.old is None else f", {self.old.bad} of {self.old.count} of the old version"
        return f"{self.new.bad} of {self.new.count} requests {self.what}{beside}"

    def verdict(self, doubt: float) -> Verdict:
        """`doubt`: the probability of going back by chance, which is that of both versions' bounds together. That of
        going on by chance is for each criterion: a bad version must pass all of them."""
        versions = 1 if self.old is None else 2
        low, _ = self.new.bounds(doubt / versions)
        high_of_old = 0.0 if self.old is None else self.old.bounds(doubt / versions)[1]
        if low > high_of_old + TOLERATED * self.rise_max:
            return Verdict(Word.GO_BACK, str(self))
        _, high = self.new.bounds(FALSE_SHARE_MAX / versions)
        low_of_old = 0.0 if self.old is None else self.old.bounds(FALSE_SHARE_MAX / versions)[0]
        if high < low_of_old + self.rise_max:
            return Verdict(Word.GO_ON, str(self))
        return Verdict(Word.WAIT, f"{self}: not yet enough to tell")


@dataclass(slots=True)
class _Version:
    """The observations of one version at a step. `ended_s`: the time of the last one that counted."""

    errors: Tally = field(default_factory=Tally)
    above: dict[str, Tally] = field(default_factory=lambda: {name: Tally() for name in QUANTILES})
    ended_s: float = -math.inf


class Judge:
    """Compares two versions. `steps`: how often it begins anew, so that the certainty is that of all steps together."""

    def __init__(self, limits: Limits, steps: int) -> None:
        self.limits = limits
        self._doubt = FALSE_SHARE_MAX / (STEP_CRITERIA * max(1, steps) + 1)
        self.new, self.old = _Version(), _Version()
        self.differences = Tally()
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._taken = 0
        self.quantiles_s: dict[str, float] = {}

    def begin_step(self) -> None:
        """Forgets both versions' requests, whose ratio changes with the step; the compared answers stay."""
        self.new, self.old = _Version(), _Version()

    def observe(self, new: bool, failed: bool, seconds: float, now_s: float) -> None:
        """A request of the `new` version or the old one has ended at `now_s`, `seconds` after it was accepted."""
        version = self.new if new else self.old
        if now_s - version.ended_s < APART_S:
            return
        version.ended_s = now_s
        version.errors.add(failed)
        if failed:
            return
        for name, limit_s in self.quantiles_s.items():
            ratio = getattr(self.limits, name) if new else 1.0
            version.above[name].add(seconds > ratio * limit_s)
        if not new:
            self._renew(seconds)

    def _renew(self, seconds: float) -> None:
        """Takes the quantiles from earlier requests, so that what is compared with them is not in them."""
        self._recent.append(seconds)
        self._taken += 1
        if self._taken % RENEWED == 0:
            ordered = sorted(self._recent)
            self.quantiles_s = {name: ordered[int(share * len(ordered))] for name, share in QUANTILES.items()}

    def compared(self, differs: bool) -> None:
        """An answer of the new version was compared with the old one's."""
        self.differences.add(differs)

    def criteria(self, shadow: bool) -> Iterator[Criterion]:
        """What is judged. `shadow`: the new version has copies only, whose answers are compared."""
        limits, new, old = self.limits, self.new, self.old
        if shadow:
            if limits.differences:
                yield Criterion("whose answers differ", limits.differences, self.differences)
            return
        if limits.errors:
            yield Criterion("that failed", limits.errors, new.errors, old.errors)
        for name in QUANTILES:
            ratio = getattr(limits, name)
            if ratio:
                more = f" times {ratio:g}" if ratio != 1 else ""
                rise = MEDIAN_RISE_MAX if name == "p50" else 0.02
                yield Criterion(f"above the old version's {name}{more}", rise, new.above[name], old.above[name])

    def verdict(self, shadow: bool = False) -> Verdict:
        """The first criterion's that says to go back, else the first one's that says to wait."""
        found = [one.verdict(self._doubt) for one in self.criteria(shadow)]
        for word in (Word.GO_BACK, Word.WAIT):
            for one in found:
                if one.word is word:
                    return one
        return Verdict(Word.GO_ON, "; ".join(one.reason for one in found) or "nothing is judged")

    def state(self) -> dict[str, Any]:
        """What a restart needs: the compared answers. The requests of a step are counted anew."""
        return {"compared": self.differences.count, "different": self.differences.bad}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.differences = Tally(int(state.get("compared", 0)), int(state.get("different", 0)))
