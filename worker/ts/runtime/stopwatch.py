"""Times of measured requests (`Measure`): of the handler's call, of its return, and of the encoded answer.

None of this is in the path of a request until the first measurement: only then it is put before the handler's entry and
before the function that takes answers.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Sequence
from typing import Any

from ts.protocol.frames import Times
from ts.runtime.jobs import Failure, Job, Ledger, Outcome

#: The most measured requests that have not ended; of more, the oldest are forgotten.
MEASURED_MAX = 1024


class _Lap:
    """One request's times, `time.monotonic()` seconds, 0 for none yet."""

    __slots__ = ("begun_s", "ended_s")

    def __init__(self) -> None:
        self.begun_s = self.ended_s = 0.0


class Stopwatch:
    """Measures requests of one worker. `runner`: what calls the handler by its `entry`, with the rows and the context
    of a batch; `awaits`: the result is awaited."""

    def __init__(self, ledger: Ledger, runner: Any, *, awaits: bool) -> None:
        self._ledger, self._runner, self._awaits = ledger, runner, awaits
        self._laps: dict[int, _Lap] = {}
        self._entry: Any = None

    def measure(self, job_id: int) -> None:
        """Measures this request, which hasn't arrived yet or waits here."""
        if self._entry is None:
            self._entry = self._runner.entry
            self._runner.entry = self._called
            self._ledger.on_given = self._given
        self._laps[job_id] = _Lap()
        if len(self._laps) > MEASURED_MAX:
            del self._laps[next(iter(self._laps))]

    def _called(self, rows: Sequence[Any], context: Any) -> Any:
        laps = self._laps
        mine = [laps[job.job_id] for job in context._batch.jobs if job.job_id in laps] if laps else []
        if not mine:
            return self._entry(rows, context)
        begun_s = time.monotonic()
        for lap in mine:
            lap.begun_s = lap.begun_s or begun_s
        result = self._entry(rows, context)
        if self._awaits and inspect.isawaitable(result):
            return _awaited(result, mine)
        _end(mine, result)
        return result

    def _given(self, job: Job, value: Outcome, last: bool) -> None:
        """Sends the times before the last piece, or the failure."""
        if self._laps and (last or type(value) is Failure):
            lap = self._laps.pop(job.job_id, None)
            if lap is not None:
                now_s = time.monotonic()
                times = Times(job.job_id, lap.begun_s or now_s, lap.ended_s or now_s, now_s)
                with self._ledger.lock:
                    if not job.done:
                        self._ledger.outbox.push(times)


async def _awaited(result: Awaitable[Any], laps: Sequence[_Lap]) -> Any:
    value = await result
    _end(laps, value)
    return value


def _end(laps: Sequence[_Lap], result: Any) -> None:
    """Notes the handler's end. A stream ends with its last piece."""
    if not (inspect.isgenerator(result) or inspect.isasyncgen(result)):
        now_s = time.monotonic()
        for lap in laps:
            lap.ended_s = now_s
