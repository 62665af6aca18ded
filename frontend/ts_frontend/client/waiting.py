"""Watching a model's workers come up, or go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

POLL_S = 0.2

Description = dict[str, Any]


class WorkersFailed(Exception):
    """A worker failed while its model was waited for; `last` is the description's `lastWorkerFailure`."""

    def __init__(self, description: Description) -> None:
        self.model = f"{description['modelName']} {description['modelVersion']}"
        self.last: dict[str, Any] = description["lastWorkerFailure"]
        super().__init__(f"{self.model}: {self.last.get('reason', '')}")


def count_ready(description: Description) -> int:
    return sum(worker["status"] == "READY" for worker in description["workers"])


def wait_for_workers(
    describe: Callable[[], Description],
    count: int,
    known_failure: object,
    say: Callable[[str], None],
    pause: Callable[[float], None],
) -> Description:
    """Asks until exactly `count` workers are there and ready, saying what changes; the last description.

    Ends early when somebody else asks for another number.

    `known_failure`: the `lastWorkerFailure` from before; another one raises WorkersFailed. There's no limit in time:
    the server ends a load that takes too long, and that is a failure.
    """
    said = ""
    while True:
        description = describe()
        if description["minWorkers"] != count:
            say(f"somebody else asks for {description['minWorkers']} workers now")
            return description
        ready, running = count_ready(description), len(description["workers"])
        state = f"{ready} of {count} workers ready" + (f", {running - count} ending" if running > count else "")
        if state != said:
            say(f"{description['modelName']} {description['modelVersion']}: {state}")
            said = state
        if ready == running == count:
            return description
        last = description.get("lastWorkerFailure")
        if last is not None and last != known_failure:
            raise WorkersFailed(description)
        pause(POLL_S)
