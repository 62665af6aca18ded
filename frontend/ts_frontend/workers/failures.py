"""Failures of workers: their reasons, the delays of restarts, and their lines in the log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ts_frontend.workers.process import WorkerPlan

log = logging.getLogger(__name__)

#: A worker's states, in TorchServe's log.
WORKER_STARTED, MODEL_LOADED = "WORKER_STARTED", "WORKER_MODEL_LOADED"
DELAY_S_FIRST = 0.5
#: The most last lines that are shown of a worker that ended.
SHOWN_LINES_MAX = 20
#: The kinds of failures in the metrics: the worker did not load its model, died later, or did not answer in time.
NOT_LOADED, DIED, HUNG = "not_loaded", "died", "hung"


class StartFailed(Exception):
    """The process didn't start or didn't load its model. `code`: HTTP status; `tail`: its last lines; `cause`: the
    message without the common first words; `traceback`: of the handler's exception, which isn't logged yet; `died`:
    the process was killed, so another one may load the model successfully; `asked_for`: a call stopped it, which is no
    fault."""

    def __init__(
        self,
        message: str,
        code: int = 500,
        tail: Sequence[str] = (),
        *,
        cause: str = "",
        traceback: str = "",
        died: bool = False,
        asked_for: bool = False,
    ) -> None:
        super().__init__(message)
        self.message, self.code, self.tail = message, code, list(tail)
        self.cause, self.traceback, self.died = cause or message, traceback, died
        self.asked_for = asked_for


def _look_at(done: asyncio.Future[None]) -> None:
    if not done.cancelled():
        done.exception()


def unattended_future() -> asyncio.Future[None]:
    """Returns a future whose exception may stay unretrieved, if all waiters are cancelled."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.add_done_callback(_look_at)
    return future


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a worker ended or didn't start, as describe shows it. `failures`: its number of failures in a row."""

    at: float
    worker_id: int
    reason: str
    failures: int
    tail: list[str]

    def shown(self, **when: object) -> dict[str, object]:
        """For describe and the console; `when`: its time, as they tell it."""
        told = {"reason": self.reason, "failuresInARow": self.failures, "lastLines": self.tail[-SHOWN_LINES_MAX:]}
        return {"workerId": str(self.worker_id), **when, **told}


@dataclass(slots=True)
class Backoff:
    """Counts failures in a row. The first restart is at once, then the delay doubles up to `delay_s_max`, each time
    shortened by up to a half by chance, so that many workers don't come back in step."""

    give_up_s: float
    delay_s_max: float = 30.0
    failures: int = 0
    first_failure_s: float = 0.0

    def worked(self) -> None:
        """Resets the failures after an answer or a long time ready: the next failure counts as the first."""
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


@dataclass(frozen=True, slots=True)
class Replacement:
    """The reason why a worker was replaced without a failure."""

    at: float
    worker_id: int
    reason: str

    def shown(self, **when: object) -> dict[str, object]:
        """As `Failure.shown`."""
        return {"workerId": str(self.worker_id), **when, "reason": self.reason}


class Recovery:
    """Logs a worker's ends and returns in TorchServe's words, which alerts look for, with the worker's thread."""

    def __init__(self, worker_id: int, plan: WorkerPlan) -> None:
        self._id, self._plan = worker_id, plan
        self._log = logging.LoggerAdapter(log, {"source": f"W-{worker_id}-{plan.spec.name}"})
        self._recovering = False

    def ended(self, *, failures: int, begun: bool, was_ready: bool, hung: bool) -> None:
        """Logs that a worker has ended by itself, for the `failures`th time in a row. `begun`: it had a process;
        `hung`: it did not answer in time."""
        if begun:
            self._log.info("%s Worker disconnected. %s", self._id, MODEL_LOADED if was_ready else WORKER_STARTED)
        if hung:
            self._log.error("Number or consecutive unsuccessful inference %s", failures)
        if hung or not begun:
            what = "Backend worker did not respond in given time" if hung else "Failed start worker process"
            self._log.error("Backend worker error\norg.pytorch.serve.wlm.WorkerInitializationException: %s", what)
        else:
            plan = self._plan
            name, limit_s = ("response", plan.response_timeout_s) if was_ready else ("startup", plan.startup_timeout_s)
            what = "Backend worker monitoring thread interrupted or backend worker process died."
            self._log.info("%s, %sTimeout:%gsec", what, name, limit_s)
        if self._recovering:
            self._log.warning("Auto recovery failed again")
        else:
            self._recovering = True
            self._log.info("Auto recovery start timestamp: %s", round(time.time() * 1000))

    def retries(self, delay_s: float, known: str = "") -> None:
        """Logs that the next worker starts after so many seconds; `known`: a failure that was logged before."""
        if not known:
            self._log.info("Retry worker: %s in %g seconds.", self._id, round(delay_s, 1))
            return
        what = "Auto recovery failed again" if self._recovering else "Worker disconnected"
        self._recovering = True
        self._log.warning("%s: %s. Retry worker: %s in %g seconds.", what, known, self._id, round(delay_s, 1))

    def ready(self) -> None:
        """Logs that a worker has loaded its model after failures."""
        if self._recovering:
            self._recovering = False
            self._log.info("Auto recovery succeeded, reset recoveryStartTS")
