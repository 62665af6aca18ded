"""Snapshot files: TorchServe's form, whole or not at all, the newest that can be read."""

from __future__ import annotations

import os
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ts_frontend.config.snapshot import (
    Snapshot,
    SnapshotError,
    SnapshotFiles,
    SnapshotKind,
    VersionState,
    decode,
    encode,
)

NOW = datetime(2026, 11, 20, 23, 36, 21, 195_000)
STATE = VersionState(archive="probe.mar", default=True, min_workers=1, max_workers=4, url="https://x/probe.mar")

#: As TorchServe 0.12 writes it.
TORCHSERVES = """\
#Saving snapshot
#Fri Nov 20 23:36:21 UTC 2026
model_snapshot={\\n  "name"\\: "20261120233621195-shutdown.cfg",\\n  "modelCount"\\: 1,\\n  \
"created"\\: 1795217781196,\\n  "models"\\: {\\n    "probe"\\: {\\n      "1.0"\\: {\\n        \
"defaultVersion"\\: true,\\n        "marName"\\: "probe.mar",\\n        "minWorkers"\\: 1,\\n        \
"maxWorkers"\\: 2,\\n        "batchSize"\\: 4,\\n        "maxBatchDelay"\\: DELAY,\\n        \
"responseTimeout"\\: 60\\n      }\\n    }\\n  }\\n}
model_store=/PATH
"""


def test_reads_the_recorded_one(root: Path) -> None:
    """The last file of a TorchServe that ran; its settings and its model come back."""
    recording = (root / "tests/data/golden/201_snapshot_files.txt").read_text()
    settings, snapshot = decode(recording[recording.index("#Saving snapshot") :])
    assert settings["enable_model_api"] == "true" and settings["workflow_store"] == "/PATH"
    assert list(snapshot.models) == ["probe"]
    state = snapshot.models["probe"]["1.0"]
    assert (state.archive, state.default, state.min_workers, state.response_timeout_s) == ("probe.mar", True, 1, 120)


@pytest.mark.parametrize(("delay", "asked"), [("100", False), ("250", True)])
def test_reads_torchserves_own(delay: str, asked: bool) -> None:
    settings, snapshot = decode(TORCHSERVES.replace("DELAY", delay))
    assert settings == {"model_store": "/PATH"}
    assert snapshot.created_ms == 1795217781196
    assert snapshot.models["probe"]["1.0"] == VersionState(
        archive="probe.mar",
        default=True,
        min_workers=1,
        max_workers=2,
        batch_size=4,
        max_batch_delay_ms=int(delay),
        max_batch_delay_set=asked,
        response_timeout_s=60,
        startup_timeout_s=120,
    )


states = st.builds(
    VersionState,
    archive=st.text(),
    default=st.booleans(),
    min_workers=st.integers(0, 99),
    max_workers=st.integers(0, 99),
    batch_size=st.integers(1, 99),
    max_batch_delay_ms=st.integers(0, 9999),
    max_batch_delay_set=st.booleans(),
    parallel_level=st.integers(0, 8),
    url=st.text(),
    requested=st.dictionaries(st.text(), st.none() | st.integers() | st.text()),
)
names = st.text(min_size=1)


@given(
    st.dictionaries(names, st.dictionaries(names, states, max_size=2), max_size=2), st.dictionaries(names, st.text())
)
def test_what_is_written_reads_back(models: dict[str, dict[str, VersionState]], settings: dict[str, str]) -> None:
    settings.pop("model_snapshot", None)
    snapshot = Snapshot("n", 5, models)
    assert decode(encode(snapshot, settings, NOW)) == (settings, snapshot)


def test_a_cut_file_is_never_taken_for_a_whole_one() -> None:
    text = encode(Snapshot("n", 5, {"m": {"1.0": STATE}}), {"job_queue_size": "1"}, NOW).rstrip("\n")
    for length in range(len(text)):
        with pytest.raises(SnapshotError):
            decode(text[:length])


@pytest.mark.parametrize(
    "tree", ["[]", "{}", '{"models": []}', '{"models": {"m": {"1": {}}}}', '{"models": {"m": {"1": 5}}}', "\\u12"]
)
def test_other_shapes_are_refused(tree: str) -> None:
    with pytest.raises(SnapshotError):
        decode(f"model_snapshot={tree}")


def test_names_times_and_modes(tmp_path: Path) -> None:
    path = SnapshotFiles(tmp_path / "config").write(SnapshotKind.STARTUP, {"probe": {"1.0": STATE}}, {"a": "b"}, NOW)
    assert path.name == "20261120233621195-startup.cfg"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text().startswith("#Saving snapshot\n#Fri Nov 20 23:36:21 2026\na=b\nmodel_snapshot=")
    assert os.listdir(path.parent) == [path.name]


def test_the_newest_is_the_last_written_also_when_the_clock_goes_back(tmp_path: Path) -> None:
    files = SnapshotFiles(tmp_path)
    for minutes, limit in ((0, "1"), (0, "2"), (-60, "3")):
        files.write(SnapshotKind.SNAPSHOT, {}, {"limit": limit}, NOW + timedelta(minutes=minutes))
    found, skipped = files.newest()
    assert found is not None
    assert (found.settings, skipped) == ({"limit": "3"}, ())


def test_broken_newer_ones_are_skipped(tmp_path: Path) -> None:
    files = SnapshotFiles(tmp_path)
    good = files.write(SnapshotKind.SNAPSHOT, {"m": {"1.0": STATE}}, {}, NOW)
    (tmp_path / "20261120233621196-shutdown.cfg").write_bytes(b"\xff\x00")
    (tmp_path / "20261120233621197-shutdown.cfg").mkdir()
    found, skipped = files.newest()
    assert found is not None
    assert found.path == good
    assert len(skipped) == 2


def test_only_the_newest_stay(tmp_path: Path) -> None:
    files = SnapshotFiles(tmp_path, kept_max=3)
    (tmp_path / "notes.txt").write_text("mine")
    written = [files.write(SnapshotKind.SNAPSHOT, {}, {}, NOW).name for _ in range(5)]
    assert files.names() == written[2:]
    assert (tmp_path / "notes.txt").exists()


def test_nothing_there(tmp_path: Path) -> None:
    assert SnapshotFiles(tmp_path / "none").newest() == (None, ())


def test_a_directory_that_cannot_be_written_keeps_what_it_has(tmp_path: Path) -> None:
    files = SnapshotFiles(tmp_path)
    good = files.write(SnapshotKind.SNAPSHOT, {}, {}, NOW)
    blocked = tmp_path / ".20261120233621196-snapshot.cfg.tmp"
    blocked.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        files.write(SnapshotKind.SNAPSHOT, {}, {}, NOW)
    assert files.names() == [good.name]
