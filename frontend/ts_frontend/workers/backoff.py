"""When a worker that ended is started again. Decides purely: time and chance are arguments."""

from __future__ import annotations

from dataclasses import dataclass

DELAY_S_FIRST = 0.5


@dataclass(slots=True)
class Backoff:
    """Counts failures in a row. The first restart is at once, then the delay doubles up to `delay_s_max`, each time
    shortened by up to a half by chance, so that many workers don't come back in step."""

    give_up_s: float
    delay_s_max: float = 30.0
    failures: int = 0
    first_failure_s: float = 0.0

    def worked(self) -> None:
        """The worker has answered something, or was ready for long: what fails next is a new failure."""
        self.failures = 0

    def failed(self, now_s: float) -> None:
        if not self.failures:
            self.first_failure_s = now_s
        self.failures += 1

    def delay_s(self, chance: float) -> float:
        """Seconds until the next start; `chance` is in [0, 1)."""
        if self.failures <= 1:
            return 0.0
        whole = min(self.delay_s_max, DELAY_S_FIRST * 2.0 ** min(self.failures - 2, 10))
        return whole * (1 - chance / 2)

    def exhausted(self, now_s: float) -> bool:
        """True when it has been failing for longer than `give_up_s` (maxRetryTimeoutInSec)."""
        return self.failures > 0 and now_s - self.first_failure_s > self.give_up_s
