"""The list of tests that may not be skipped does its work: read as a text, and in a run of pytest of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

SAMPLE = """
import pytest

def test_runs(): pass

@pytest.mark.parametrize("engine", ["a", "b"])
def test_skips_one(engine):
    if engine == "b":
        pytest.skip("no engine b here")
"""


def run(folder: Path, root: Path, required: str, *options: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(root / "tests/conftest.py", folder)
    (folder / "required_tests.txt").write_text(
        f"# a comment\n[other]\ntest_sample.py::test_gone\n[usual]\n{required}\n"
    )
    (folder / "test_sample.py").write_text(SAMPLE)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--required",
        "usual",
        *options,
        str(folder),
    ]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(root / "tests")}
    return subprocess.run([*command, str(folder)], cwd=folder, capture_output=True, text=True, env=env)


def test_a_run_with_every_required_test_passes_and_counts_what_was_skipped(tmp_path: Path, root: Path) -> None:
    done = run(tmp_path, root, "test_sample.py::test_runs\ntest_sample.py::test_skips_one[a]")
    assert done.returncode == 0, done.stdout
    assert "tests run 2, skipped 1, left to another command 0" in done.stdout
    assert "skipped 1: no engine b here" in done.stdout


def test_required_tests_that_are_skipped_or_missing_fail_the_run(tmp_path: Path, root: Path) -> None:
    done = run(tmp_path, root, "test_sample.py\ntest_sample.py::test_renamed")
    assert done.returncode == 6, done.stdout
    assert "test_sample.py::test_skips_one[b]: skipped" in done.stdout
    assert "test_sample.py::test_renamed: no such test was run" in done.stdout


def test_several_processes_are_counted_together(tmp_path: Path, root: Path) -> None:
    (tmp_path / "test_other.py").write_text("import pytest\npytest.skip('not here', allow_module_level=True)\n")
    (tmp_path / "test_more.py").write_text("def test_more(): pass\n\ndef test_left_out(): pass\n")
    parallel = ("--processes", "2", "-k", "not left_out")
    done = run(tmp_path, root, "test_more.py::test_more\ntest_other.py", *parallel)
    assert done.returncode == 6, done.stdout
    assert "tests run 3, skipped 2, left to another command 1" in done.stdout
    assert "skipped 1: not here" in done.stdout and "test_other.py: skipped" in done.stdout
    (tmp_path / "test_fails.py").write_text("def test_wrong():\n    print('said')\n    assert 2 + 2 == 5\n")
    done = run(tmp_path, root, "test_more.py::test_more", *parallel)
    assert done.returncode == 1, done.stdout
    assert "assert (2 + 2) == 5" in done.stdout and "said" in done.stdout
    (tmp_path / "test_fails.py").write_text("import os\n\ndef test_dies():\n    os._exit(0)\n")
    done = run(tmp_path, root, "test_more.py::test_more", *parallel)
    assert done.returncode != 0
    assert "a process of the tests has died, in test_fails.py::test_dies" in done.stdout
