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


SAMPLE = """
import pathlib

def test_flickers():
    mark = pathlib.Path(__file__).with_name("mark")
    ran_before, _ = mark.exists(), mark.touch()
    assert ran_before

def test_passes():
    assert True
"""


def test_tests_that_fail_run_once_more_alone(
    check: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many that fail at once fail the run."""
    monkeypatch.setattr(check, "LAST_FAILED", tmp_path / ".pytest_cache/v/cache/lastfailed")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    sample = tmp_path / "test_sample.py"
    step = check.tests("tests", "not slow", "usual")
    words = [one for one in step.command if one not in ("--required", "usual")]
    step = step._replace(command=words, folder=tmp_path)
    sample.write_text(SAMPLE)
    assert check.run_all([step]) == []
    said = capfd.readouterr().out
    assert "1 that failed, once more and alone" in said
    assert said.split("These passed alone", 1)[1].splitlines()[1] == "test_sample.py::test_flickers"
    sample.write_text("import pytest\n@pytest.mark.parametrize('n', range(9))\ndef test_it(n):\n    assert False\n")
    assert check.run_all([step]) == ["tests"]
    assert "once more" not in capfd.readouterr().out
