"""How a process ended, in words that tell its user what to do."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of a process: `code` as in subprocess (negative: the signal), None when it isn't known."""

    code: int | None

    @staticmethod
    def of_wait_status(status: int) -> Exit:
        return Exit(os.waitstatus_to_exitcode(status))

    @property
    def by_sigkill(self) -> bool:
        return self.code == -signal.SIGKILL

    def describe(self) -> str:
        """For people: `killed by SIGKILL (out of memory?)`, `exit code 1`."""
        if self.code is None:
            return "ended for an unknown reason"
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        return f"killed by {name}" + (" (out of memory?)" if self.by_sigkill else "")

    def sentence(self) -> str:
        if self.code is None:
            return "It ended for an unknown reason"
        return f"It ended with {self.describe()}" if self.code >= 0 else f"It was {self.describe()}"
