"""Systems without Linux's /proc: its readers go on without it, or name the missing file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ts.runtime import forkable
from ts.runtime.forkable import Footprint, owned_files
from ts_frontend.workers import limits, ranks


def test_a_process_is_looked_at_without_what_the_system_does_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forkable, "PROC", str(tmp_path / "none"))
    now = Footprint.now()
    assert now.tasks == {} and now.files == {} and now.children == frozenset()
    assert now.refusal(now) == ""
    owned_files(())


def test_a_path_that_is_too_long_for_a_socket_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(OSError, match=r"longer than 100 bytes.*temp_dir"), ranks._short(tmp_path / ("x" * 100), "s"):
        pass


def test_free_memory_is_the_machines_without_cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_CGROUP", tmp_path / "none")
    assert limits.available_bytes() > 0
