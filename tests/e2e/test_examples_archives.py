"""The archives of model_store/ equal those that the build script makes from examples/."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path


def check(root: Path, store: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "ts_scripts/build_example_archives.py"), "--check", "--out", str(store)]
    return subprocess.run(command, cwd=store, capture_output=True, text=True)


def test_archives_match_their_sources(root: Path) -> None:
    done = check(root, root / "model_store")
    assert done.returncode == 0, done.stderr


def test_archives_are_small_and_complete(root: Path) -> None:
    archives = sorted((root / "model_store").iterdir())
    assert [archive.name for archive in archives] == [
        "digits.mar",
        "digits_v2.mar",
        "hello_stream.mar",
        "text_stream.mar",
    ]
    assert all(archive.stat().st_size < 1_000_000 for archive in archives)


def test_a_changed_and_a_missing_archive_are_found(root: Path, tmp_path: Path) -> None:
    for name in ("digits.mar", "digits_v2.mar", "text_stream.mar"):
        (tmp_path / name).write_bytes((root / "model_store" / name).read_bytes())
    with zipfile.ZipFile(tmp_path / "digits.mar", "a") as archive:
        archive.writestr("one_more.txt", "not in the sources")
    done = check(root, tmp_path)
    assert done.returncode == 1
    assert "digits.mar differs from its sources in one_more.txt" in done.stderr
    assert "hello_stream.mar is missing" in done.stderr
    assert "digits_v2.mar" not in done.stderr
