"""The comparison with other servers, as its command runs, for a moment: ours alone, and with other servers where they
are installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COMPARE = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "compare.py"
GUARD_S = 600


def compared(folder: Path, *words: str) -> tuple[dict[str, Any], str]:
    """The files of the run: its figures and its page."""
    files = ("--json", str(folder / "found.json"), "--write", str(folder / "page.md"))
    short = ("--rounds", "1", "--seconds", "0.3", "--warm-up", "0.2")
    run = subprocess.run(
        [sys.executable, str(COMPARE), *short, *files, *words], capture_output=True, text=True, timeout=GUARD_S
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads((folder / "found.json").read_text()), (folder / "page.md").read_text()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("h2load") is None, reason="needs h2load")
def test_every_kind_of_scenario_has_its_figures(tmp_path: Path) -> None:
    names = (
        "noop-http",
        "infer-grpc",
        "mlp-http",
        "sequences-http",
        "streams-grpc",
        "mixed",
        "open",
        "overload",
        "lone",
        "start",
        "memory",
    )
    ours = "ours,bare,bare-http,in-process,ours-triton,ours-mlserver,ours-kserve"
    found, page = compared(tmp_path, "--only", ",".join(names), "--systems", ours)
    assert not found["skipped"]
    assert {row["scenario"] for row in found["rows"]} == set(names)
    assert {row["system"] for row in found["rows"]} == set(ours.split(","))
    assert all(value >= 0 for row in found["rows"] for value in row["figures"].values())
    assert page.count("\n## ") == 5 and all(f"| `{name}` |" in page for name in ("noop-http", "mlp-http"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("h2load") is None, reason="needs h2load")
def test_a_server_that_cannot_be_had_is_named_with_the_reason(tmp_path: Path) -> None:
    """Java is missing where the PATH has h2load alone."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "h2load").symlink_to(str(shutil.which("h2load")))
    (tools / "git").symlink_to(str(shutil.which("git") or "/usr/bin/git"))
    words = ("--only", "noop-grpc", "--systems", "ours,torchserve", "--rounds", "1", "--seconds", "0.2")
    files = ("--json", str(tmp_path / "found.json"))
    run = subprocess.run(
        [sys.executable, str(COMPARE), *words, *files],
        capture_output=True,
        text=True,
        timeout=GUARD_S,
        env={"PATH": str(tools)},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (left_out,) = json.loads((tmp_path / "found.json").read_text())["skipped"]
    assert left_out[:2] == ["", "torchserve"] and "needs Java 17" in left_out[2]
