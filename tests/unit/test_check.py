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


@pytest.mark.parametrize("mark", ["external", "long", "slow"])
def test_only_files_with_such_tests_are_listed_for_a_mark(
    check: ModuleType, tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any way in which a test gets a mark, and at any depth."""
    monkeypatch.setattr(check, "ROOT", tmp_path)
    texts = {
        "test_module.py": f"pytestmark = pytest.mark.{mark}",
        "deep/er/test_function.py": f"@pytest.mark.{mark}\ndef test_one(): pass",
        "deep/test_case.py": f"pytest.param(1, marks=[pytest.mark.{mark}])",
        "test_none.py": f"def test_{mark}(): pass",
        "support.py": f"pytest.mark.{mark}",
    }
    for name, text in texts.items():
        file = tmp_path / "tests" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    expected = ["tests/deep/er/test_function.py", "tests/deep/test_case.py", "tests/test_module.py"]
    assert check.files_with(mark) == expected


def test_files_with_the_longest_tests_begin(check: ModuleType) -> None:
    for mark in ("external", "long"):
        listed = check.files_with(mark)
        begin = [name for name in check.LONGEST if name in listed]
        assert len(begin) > 3 and listed[: len(begin)] == begin
        assert listed[len(begin) :] == sorted(listed[len(begin) :])
    assert {*check.LONGEST} <= {*check.files_with("external"), *check.files_with("long")}


def test_the_compiled_form_stays_until_its_sources_change(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = module_of(root / "ts_scripts/compiled_environment.py")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    for name in script.SOURCES:
        assert (root / name).exists()
        (tmp_path / name).write_text("") if "." in name else (tmp_path / name).mkdir()
    found = [script.made_from()]
    for name in ("worker/a.py", "frontend/b.py", "setup.cfg"):
        (tmp_path / name).write_text("x = 1")
        found.append(script.made_from())
    (tmp_path / "worker/a.py").rename(tmp_path / "worker/c.py")
    found.append(script.made_from())
    assert len({*found}) == 5
    (tmp_path / "worker/__pycache__").mkdir()
    (tmp_path / "worker/__pycache__/c.pyc").write_text("")
    assert script.made_from() == found[-1]


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
