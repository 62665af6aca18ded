"""What every call of a client carries, and its attempts: how long each may take, and whether another follows."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

from torchrelay_client.calls import Call
from torchrelay_client.connecting import pairs
from torchrelay_client.errors import CallFailed, failure
from torchrelay_client.retry import NEVER, Retry


class Attempts:
    """Of one call, begun now. `timeout_s`: for all of them, None for none."""

    def __init__(self, retry: Retry, timeout_s: float | None) -> None:
        self._retry = retry
        self._end_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._made = 0

    def left_s(self) -> float | None:
        """Seconds left for the next one."""
        return None if self._end_s is None else self._end_s - time.monotonic()

    def pause_s(self, error: Any) -> float | None:
        """One has failed with an error of grpc's: seconds until the next, None for giving up."""
        self._made += 1
        return self._retry.pause_s(error.code(), self._made, self.left_s(), random.random())

    def failure(self, error: Any) -> CallFailed:
        """What the caller is told of the last one."""
        return failure(error, self._made)


class Manner:
    """How a client makes its calls: what goes with each, its time, and whether it is repeated."""

    def __init__(
        self,
        token: str,
        metadata: Sequence[tuple[str, str]],
        timeout_s: float | None,
        retry: Retry | None,
        idempotent: bool,
    ) -> None:
        self._metadata = pairs(token, metadata)
        self._timeout_s, self._retry, self._idempotent = timeout_s, retry or NEVER, idempotent

    def sent_with(self, call: Call[Any]) -> tuple[tuple[str, str], ...]:
        return (*call.metadata, *self._metadata)

    def timeout_s(self, asked_s: float | None) -> float | None:
        """Of a call with one answer; None asks for the client's own."""
        return self._timeout_s if asked_s is None else asked_s

    def attempts(self, call: Call[Any], timeout_s: float | None, idempotent: bool | None) -> Attempts:
        """`idempotent` None: as the client has it."""
        repeated = call.safe or (self._idempotent if idempotent is None else idempotent)
        return Attempts(self._retry if repeated else NEVER, timeout_s)
