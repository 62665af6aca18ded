"""The document that several servers share: merging, its bytes, and the file that it lies in."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import GUARD_S
from ts_frontend.config.snapshot import VersionState
from ts_frontend.models.sharing.document import (
    REMOVED_MAX,
    BadDocument,
    Edits,
    SharedModels,
    SharedVersion,
    decode_shared,
    encode_models,
    merged,
)
from ts_frontend.models.sharing.places import NAME, SharedFile, SharedObject, SharedSnapshotFailed, shared_place
from ts_frontend.models.store.http import Stop

STATE = VersionState(archive="a.mar", default=False, min_workers=1, max_workers=2, url="a.mar")


def shared(stamp: str, **more: object) -> SharedVersion:
    return SharedVersion(replace(STATE, **more), stamp)  # type: ignore[arg-type]


A, B = ("a", "1.0"), ("b", "1.0")
HELD = SharedModels({A: shared("s")}, {"a": "1.0"})


def test_registrations_of_two_servers_are_both_kept() -> None:
    one = merged(SharedModels(), Edits(registered={A: shared("s")}, first_defaults={"a": "1.0"}))
    both = merged(one, Edits(registered={B: shared("t")}, first_defaults={"b": "1.0"}))
    assert both == SharedModels({A: shared("s"), B: shared("t")}, {"a": "1.0", "b": "1.0"})


def test_two_versions_of_a_new_name_are_both_kept_and_the_first_stays_the_default() -> None:
    later = merged(HELD, Edits(registered={("a", "2.0"): shared("t")}, first_defaults={"a": "2.0"}))
    assert set(later.versions) == {A, ("a", "2.0")} and later.defaults == {"a": "1.0"}
    assert merged(later, Edits(defaults={"a": "2.0"})).defaults == {"a": "2.0"}


def test_the_last_writer_of_a_version_counts() -> None:
    assert merged(HELD, Edits(registered={A: shared("t", batch_size=4)})).versions[A] == shared("t", batch_size=4)
    assert merged(HELD, Edits(scaled={A: (3, 5)})).versions[A] == shared("s", min_workers=3, max_workers=5)


def test_what_was_unregistered_elsewhere_is_not_scaled() -> None:
    gone = merged(HELD, Edits(gone={A: "s"}))
    assert gone == SharedModels(removed={A: "s"})
    assert merged(gone, Edits(scaled={A: (3, 5)})) == gone
    assert merged(gone, Edits(registered={A: shared("t")})).removed == {}


def test_what_was_registered_anew_elsewhere_is_not_unregistered() -> None:
    anew = merged(HELD, Edits(registered={A: shared("t")}))
    assert merged(anew, Edits(gone={A: "s"})) == anew


def test_a_default_that_is_gone_gives_way_to_another_version() -> None:
    two = merged(HELD, Edits(registered={("a", "2.0"): shared("t")}))
    assert merged(two, Edits(gone={A: "s"})).defaults == {"a": "2.0"}


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
    assert held.same_source(replace(STATE, min_workers=9, requested={"initial_workers": 1}))
    assert not held.same_source(replace(STATE, requested={"batch_size": 8}))
    assert not held.same_source(replace(STATE, url="s3://b/a.mar"))


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
