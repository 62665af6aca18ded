"""Whether a call is tried again, and after which pause."""

from __future__ import annotations

from dataclasses import dataclass

from grpc import StatusCode


@dataclass(frozen=True, slots=True)
class Retry:
    """At most `attempts_max` attempts in all. The pause before the next doubles from `first_s` up to `most_s`; each is
    a random part, at least half, of it, so that many clients don't come back at once."""

    attempts_max: int = 5
    first_s: float = 0.1
    most_s: float = 5.0

    def __post_init__(self) -> None:
        if self.attempts_max < 1 or not 0 <= self.first_s <= self.most_s:
            raise ValueError(f"{self}: attempts_max is at least 1, and 0 <= first_s <= most_s")

    def pause_s(self, code: StatusCode, attempts: int, left_s: float | None, chance: float) -> float | None:
        """The seconds to wait before the next attempt, None for giving up: it isn't UNAVAILABLE, `attempts` were
        enough, or there would be nothing left of the deadline. `chance` is a random number from 0 to 1."""
        if code is not StatusCode.UNAVAILABLE or attempts >= self.attempts_max:
            return None
        doublings = min(attempts - 1, 60)
        pause = min(self.most_s, self.first_s * 2**doublings) * (0.5 + chance / 2)
        return pause if left_s is None or pause < left_s else None


USUAL, NEVER = Retry(), Retry(attempts_max=1)
