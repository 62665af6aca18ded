"""A process that doesn't stop by itself is ended."""

from __future__ import annotations

import subprocess
import sys

from support import GUARD_S

STUCK = """
import threading
from ts_frontend.process import end_within

timer = end_within({limit_s})
if {by_itself}:
    timer.cancel()
else:
    threading.Event().wait()
"""


def run(limit_s: float, by_itself: bool) -> subprocess.CompletedProcess[str]:
    code = STUCK.format(limit_s=limit_s, by_itself=by_itself)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=GUARD_S)


def test_a_stop_that_hangs_is_ended_and_says_where() -> None:
    ended = run(0.2, by_itself=False)
    assert ended.returncode == 70
    assert "did not stop in 0.2 s" in ended.stderr and "<module>" in ended.stderr


def test_one_that_ends_by_itself_is_left_alone() -> None:
    assert run(3600, by_itself=True).returncode == 0
