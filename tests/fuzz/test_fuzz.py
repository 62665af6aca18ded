"""A short run of the fuzzer: the old findings, and a hundred new inputs for each target."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("run.py")
#: A guard against a fuzzer that hangs: its inputs have their own limit, of processor time.
GUARD_S = 600


def fuzzed(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RUN), "--findings", str(folder / "findings"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S, cwd=folder)


def test_nothing_from_outside_ends_in_an_error_that_is_not_documented(tmp_path: Path) -> None:
    run = fuzzed(tmp_path, "--runs", "100")
    assert run.returncode == 0, run.stdout + run.stderr
    targets = [line for line in run.stdout.splitlines() if line.endswith(" 0 findings")]
    assert len(targets) > 25, run.stdout


@pytest.mark.long
def test_the_fuzzer_finds_errors_and_hangs(tmp_path: Path) -> None:
    """On a target that has both, so that a fuzzer that finds nothing is one that would find something."""
    program = tmp_path / "broken.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(RUN.parent)!r})\n"
        "import run, targets\n"
        "def broken(data):\n"
        "    while len(data) > 40:\n"
        "        pass\n"
        "    if b'\\xff' in data:\n"
        "        raise KeyError(data)\n"
        "    raise ValueError\n"
        "targets.TARGETS['urls'] = targets.Target(broken, (ValueError,))\n"
        "run.TIME_S, run.TIME_S_PER_BYTE = 0.02, 0.0\n"
        "run.main()\n"
    )
    command = [sys.executable, str(program), "urls", "--runs", "200", "--findings", str(tmp_path / "findings")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "KeyError" in run.stdout
    assert "more processor time" in run.stdout
    found = [path.read_bytes() for path in (tmp_path / "findings").iterdir()]
    assert any(b"\xff" in data for data in found) and any(len(data) > 40 for data in found)
