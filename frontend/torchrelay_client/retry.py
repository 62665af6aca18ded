"""Retries: whether and after which pause a call is tried again, its attempts, and their metadata and time limits."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpc import StatusCode

from torchrelay_client.calls import Call
from torchrelay_client.errors import CallFailed, failure


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


class Attempts:
    """The attempts of one call, which begins now. `timeout_s`: for all of them together, None for no limit."""

    def __init__(self, retry: Retry, timeout_s: float | None) -> None:
        self._retry = retry
        self._end_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._made = 0

    def left_s(self) -> float | None:
        """Seconds left for the next attempt, None without a limit."""
        return None if self._end_s is None else self._end_s - time.monotonic()

    def pause_s(self, error: Any) -> float | None:
        """Counts an attempt that failed with an error of grpc; seconds until the next one, None to give up."""
        self._made += 1
        return self._retry.pause_s(error.code(), self._made, self.left_s(), random.random())

    def failure(self, error: Any) -> CallFailed:
        """The error that the caller gets, made of the last attempt's."""
        return failure(error, self._made)


class CallPolicy:
    """The metadata, time limit and retries that a client adds to each of its calls."""

    def __init__(
        self,
        token: str,
        metadata: Sequence[tuple[str, str]],
        timeout_s: float | None,
        retry: Retry | None,
        idempotent: bool,
    ) -> None:
        given = tuple((name.lower(), value) for name, value in metadata)
        self._metadata = (*given, ("authorization", f"Bearer {token}")) if token else given
        self._timeout_s, self._retry, self._idempotent = timeout_s, retry or NEVER, idempotent

    def sent_with(self, call: Call[Any]) -> tuple[tuple[str, str], ...]:
        return (*call.metadata, *self._metadata)

    def timeout_s(self, asked_s: float | None) -> float | None:
        """The time limit of a call with one answer; None stands for that of the client."""
        return self._timeout_s if asked_s is None else asked_s

    def attempts(self, call: Call[Any], timeout_s: float | None, idempotent: bool | None) -> Attempts:
        """The attempts of a call. `idempotent` None: the client's setting."""
        repeated = call.safe or (self._idempotent if idempotent is None else idempotent)
        return Attempts(self._retry if repeated else NEVER, timeout_s)
