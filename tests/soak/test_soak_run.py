"""The long soak (`make soak`) for some seconds: one right answer for each request, and nothing left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("run.py")
GUARD_S = 280


@pytest.mark.long
def test_every_request_has_its_one_answer_under_faults(tmp_path: Path) -> None:
    command = [sys.executable, str(RUN), "--seconds", "6", "--warm-up-s", "4", "--rate", "100"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S, cwd=tmp_path)
    missed = [line for line in run.stdout.splitlines() if "MISSED" in line]
    # What the first seconds bring to memory is no growth yet: the long run has this measure.
    assert not [line for line in missed if "memory" not in line], run.stdout + run.stderr
    assert "| exit status" in run.stdout, run.stdout + run.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("tool", "words"), [("told.py", ["--count", "1"]), ("overload.py", ["--seconds", "1"])])
def test_each_measurement_ends_with_its_table(tool: str, words: list[str], tmp_path: Path) -> None:
    """Goals are for a quiet machine and the long run."""
    command = [sys.executable, str(RUN.with_name(tool)), *words]
    run = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S, cwd=tmp_path)
    assert run.returncode in (0, 1) and not run.stderr, run.stdout + run.stderr
    first, *rows = [line for line in run.stdout.splitlines() if line.startswith("| ")]
    assert first.startswith("| measure ") and rows
