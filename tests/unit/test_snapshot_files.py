"""Snapshots: their files, and the one that several servers share."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import GUARD_S
from ts_frontend.config.snapshot import (
    Snapshot,
    SnapshotError,
    SnapshotFiles,
    SnapshotKind,
    VersionState,
    decode,
    encode,
)
from ts_frontend.models.sharing import (
    NAME,
    REMOVED_MAX,
    BadDocument,
    Edits,
    SharedFile,
    SharedModels,
    SharedObject,
    SharedSnapshotFailed,
    SharedVersion,
    decode_shared,
    encode_models,
    merged,
    shared_place,
)
from ts_frontend.tasks import Stop

NOW = datetime(2026, 11, 20, 23, 36, 21, 195_000)
STATE = VersionState(archive="probe.mar", default=True, min_workers=1, max_workers=4, url="https://x/probe.mar")


def test_reads_the_recorded_one(root: Path) -> None:
    """The last file of a TorchServe that ran; its settings and its model come back."""
    recording = (root / "tests/data/golden/201_snapshot_files.txt").read_text()
    settings, snapshot = decode(recording[recording.index("#Saving snapshot") :])
    assert settings["enable_model_api"] == "true" and settings["workflow_store"] == "/PATH"
    assert list(snapshot.models) == ["probe"]
    state = snapshot.models["probe"]["1.0"]
    assert (state.archive, state.default, state.min_workers, state.response_timeout_s) == ("probe.mar", True, 1, 120)


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


def test_a_directory_that_cannot_be_written_keeps_what_it_has(tmp_path: Path) -> None:
    files = SnapshotFiles(tmp_path)
    good = files.write(SnapshotKind.SNAPSHOT, {}, {}, NOW)
    blocked = tmp_path / ".20261120233621196-snapshot.cfg.tmp"
    blocked.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        files.write(SnapshotKind.SNAPSHOT, {}, {}, NOW)
    assert files.names() == [good.name]


SHARED_STATE = VersionState(archive="a.mar", default=False, min_workers=1, max_workers=2, url="a.mar")


def shared(stamp: str, **more: object) -> SharedVersion:
    return SharedVersion(replace(SHARED_STATE, **more), stamp)  # type: ignore[arg-type]


A, B = ("a", "1.0"), ("b", "1.0")


def test_only_so_many_unregistered_versions_are_remembered() -> None:
    document = SharedModels(removed={(f"m{number}", "1.0"): "s" for number in range(REMOVED_MAX)})
    later = merged(merged(document, Edits(registered={A: shared("s")})), Edits(gone={A: "s"}))
    assert len(later.removed) == REMOVED_MAX and A in later.removed and ("m0", "1.0") not in later.removed


KEYS = st.tuples(st.sampled_from("abc"), st.sampled_from(["1.0", "2.0"]))
STAMPS = st.sampled_from("stuv")
CHANGES = st.builds(
    Edits,
    registered=st.dictionaries(KEYS, STAMPS.map(shared), max_size=3),
    scaled=st.dictionaries(KEYS, st.tuples(st.integers(0, 3), st.integers(3, 9)), max_size=3),
    gone=st.dictionaries(KEYS, STAMPS, max_size=3),
    defaults=st.dictionaries(st.sampled_from("abc"), st.sampled_from(["1.0", "2.0"]), max_size=2),
)


@given(st.lists(CHANGES, max_size=6))
def test_whatever_is_merged_has_a_default_for_each_name_and_reads_back(changes: list[Edits]) -> None:
    document = SharedModels()
    for edits in changes:
        before, document = document, merged(document, edits)
        touched = edits.registered.keys() | edits.scaled.keys() | edits.gone.keys()
        for key in before.versions.keys() - touched:
            assert document.versions[key] == before.versions[key], "nobody touched it"
        assert {name for name, _ in document.versions} == document.defaults.keys()
        assert all(item in document.versions for item in document.defaults.items())
        assert not document.versions.keys() & document.removed.keys()
        assert merged(document, edits) == document, "a write that is repeated changes nothing"
    assert decode_shared(encode_models(document, "me", "now")) == document


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "it can't be read"),
        (b"[]", "it can't be read"),
        (b"{}", "it has no 'torchrelay'"),
        (b'{"torchrelay": 2}', "it has format 2, and this server knows 1"),
        (b'{"torchrelay": 1, "removed": [], "models": {"a": {"versions": {"1": {}}}}}', "it has no 'marName'"),
        (b'{"torchrelay": 1, "removed": [1], "models": {}}', "it can't be read"),
        (b"\xff", "it can't be read"),
    ],
)
def test_a_broken_document_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(BadDocument, match=message):
        decode_shared(text)


def test_a_model_of_the_start_is_that_of_the_document_if_only_its_workers_differ() -> None:
    held = shared("s", requested={"initial_workers": 4, "batch_size": None})
    assert held.same_source(replace(SHARED_STATE, min_workers=9, requested={"initial_workers": 1}))
    assert not held.same_source(replace(SHARED_STATE, requested={"batch_size": 8}))
    assert not held.same_source(replace(SHARED_STATE, url="s3://b/a.mar"))


# --- places


def test_a_file_is_written_only_over_what_was_read(tmp_path: Path) -> None:
    one, other = SharedFile(tmp_path), SharedFile(tmp_path)
    assert one.read("", Stop()) == (b"", "")
    first = one.write(b"first", "", Stop())
    assert first and other.write(b"other", "", Stop()) is None
    assert one.read(first, Stop()) is None and other.read("", Stop()) == (b"first", first)
    second = other.write(b"second", first, Stop())
    assert second and one.write(b"third", first, Stop()) is None
    assert (tmp_path / NAME).read_bytes() == b"second"
    (tmp_path / NAME).unlink()
    assert one.read(second, Stop()) == (b"", "")


def test_writers_in_many_threads_lose_nothing(tmp_path: Path) -> None:
    def add(number: int) -> None:
        place, key = SharedFile(tmp_path), (f"m{number}", "1.0")
        edits = Edits(registered={key: shared(str(number))}, first_defaults={key[0]: key[1]})
        while True:
            found = place.read("", Stop())
            assert found is not None
            document = decode_shared(found.data) if found.data else SharedModels()
            if place.write(encode_models(merged(document, edits), "me", str(number)), found.tag, Stop()):
                return

    threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(GUARD_S)
    assert len(decode_shared((tmp_path / NAME).read_bytes()).versions) == 8


def test_a_directory_that_is_away_is_told(tmp_path: Path) -> None:
    place = SharedFile(tmp_path / "none")
    with pytest.raises(SharedSnapshotFailed, match=r"torchrelay-models\.json: No such file or directory"):
        place.read("", Stop())
    with pytest.raises(SharedSnapshotFailed, match="No such file"):
        place.write(b"x", "", Stop())


def test_the_setting_names_a_directory_or_a_bucket(tmp_path: Path) -> None:
    assert str(shared_place(tmp_path)) == str(tmp_path / NAME)
    found = shared_place(Path("s3://models/of/all"))
    assert isinstance(found, SharedObject) and str(found) == f"s3://models/of/all/{NAME}"


def test_a_bucket_that_nobody_serves_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "us-east-1")
    with pytest.raises(SharedSnapshotFailed, match="Could not connect to the endpoint URL"):
        shared_place(Path("s3://models/x")).read("", Stop())
