"""`make test` runs its steps: some side by side with the others, and a failed one fails the run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support import module_of


@pytest.fixture(scope="module")
def check(root: Path) -> ModuleType:
    return module_of(root / "ts_scripts/check.py")


def program(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def test_steps_aside_run_while_the_others_do_and_speak_after_them(
    check: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each end of a pipe waits until the other is opened."""
    os.mkfifo(tmp_path / "pipe")
    steps = [
        check.Step("types", program("open('pipe', 'w').write('met'); print('checked')"), tmp_path, aside=True),
        check.Step("tests", program("print(open('pipe').read())"), tmp_path),
    ]
    assert check.run_all(steps) == []
    lines = [line.partition(" in ")[0] for line in capfd.readouterr().out.splitlines()]
    assert lines == ["", "== tests", "met", "== tests: ok", "", "== types", "checked", "== types: ok"]


def test_each_step_runs_and_those_that_failed_are_named(check: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    wrong = program("raise SystemExit('wrong')")
    steps = [
        check.Step("lint", wrong),
        check.Step("types", wrong, aside=True),
        check.Step("protos", program(""), aside=True),
        check.Step("tests", program("")),
    ]
    assert check.run_all(steps) == ["lint", "types"]
    said = capfd.readouterr()
    assert said.err == "wrong\n" and "wrong\n== types: FAILED (1)" in said.out and "== tests: ok" in said.out


def test_the_types_are_checked_aside(check: ModuleType) -> None:
    assert {step.title for step in check.usual_steps() if step.aside} == {"types", "generated protos"}
