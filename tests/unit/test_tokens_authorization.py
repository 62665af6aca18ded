"""The keys of a server over time: made, renewed, taken over from outside; its key file in a directory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from support import Clock
from ts_frontend.authorization.authorization import (
    NOT_RENEWED,
    REFUSED,
    Authorization,
    KeyFile,
    KeyFileError,
    open_authorization,
    read_keys,
    remove_left_behind,
)
from ts_frontend.config.keys import KeyKind, Keys
from ts_frontend.config.kinds import ConfigError
from ts_frontend.config.load import Option, load_config
from ts_frontend.errors import InvalidArgument, PermissionDenied


def made(directory: Path, outside: Callable[[], Keys] | None = None, **more: float) -> tuple[Authorization, Clock]:
    clock = Clock(1_000_000.0)
    settings = {"life_s": 60.0, "overlap_s": 0.0} | more
    return Authorization(outside, KeyFile(directory), clock=clock, **settings), clock


def in_file(directory: Path, kind: str) -> bytes:
    key: str = json.loads((directory / "key_file.json").read_text())[kind]["key"]
    return key.encode()


def header(key: bytes) -> list[bytes]:
    return [b"Bearer " + key]


# --- made here


def test_a_key_opens_its_kind_until_it_expires(tmp_path: Path) -> None:
    authorization, clock = made(tmp_path)
    inference, management = in_file(tmp_path, "inference"), in_file(tmp_path, "management")
    assert not authorization.opens(KeyKind.INFERENCE, header(management))
    assert not authorization.opens(KeyKind.MANAGEMENT, header(inference))
    assert not authorization.opens(KeyKind.API, header(management))
    clock.now_s += 59.9
    authorization.check(KeyKind.INFERENCE, header(inference), "peer")
    clock.now_s += 0.1
    with pytest.raises(PermissionDenied, match=REFUSED):
        authorization.check(KeyKind.INFERENCE, header(inference), "peer")
    assert authorization.opens(KeyKind.API, header(in_file(tmp_path, "API")))
    authorization.close()


def test_an_old_key_may_count_a_little_longer(tmp_path: Path) -> None:
    authorization, clock = made(tmp_path, overlap_s=10.0)
    old = in_file(tmp_path, "inference")
    asyncio.run(authorization.renew(KeyKind.INFERENCE))
    clock.now_s += 9.9
    assert authorization.opens(KeyKind.INFERENCE, header(old))
    clock.now_s += 0.1
    assert not authorization.opens(KeyKind.INFERENCE, header(old))
    assert authorization.opens(KeyKind.INFERENCE, header(in_file(tmp_path, "inference")))
    authorization.close()


def test_keys_count_without_their_file_and_it_comes_back_with_a_new_one(tmp_path: Path) -> None:
    authorization, _ = made(tmp_path)
    inference, api = in_file(tmp_path, "inference"), in_file(tmp_path, "API")
    (tmp_path / "key_file.json").unlink()
    assert authorization.opens(KeyKind.INFERENCE, header(inference))
    asyncio.run(authorization.renew(KeyKind.MANAGEMENT))
    assert in_file(tmp_path, "API") == api
    authorization.close()


# --- two servers, and what is left behind


def test_a_server_leaves_a_file_that_is_not_its_own(tmp_path: Path) -> None:
    first, _ = made(tmp_path)
    (tmp_path / "key_file.json").unlink()
    second, _ = made(tmp_path)
    with pytest.raises(KeyFileError, match="another server that runs"):
        asyncio.run(first.renew(KeyKind.INFERENCE))
    first.close()
    assert (tmp_path / "key_file.json").exists()
    second.close()
    assert not (tmp_path / "key_file.json").exists()


def test_a_file_left_behind_is_overwritten_or_removed(tmp_path: Path) -> None:
    (tmp_path / "key_file.json").write_text("left")
    (tmp_path / ".key_file.json.new").write_text("left, too")
    authorization, _ = made(tmp_path)
    assert in_file(tmp_path, "API")
    authorization.close()
    (tmp_path / "key_file.json").write_text("left")
    remove_left_behind(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_link_of_that_name_is_replaced_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("somebody's")
    (tmp_path / "key_file.json").symlink_to(target)
    authorization, _ = made(tmp_path)
    assert target.read_text() == "somebody's"
    assert not (tmp_path / "key_file.json").is_symlink()
    authorization.close()


def test_a_directory_of_that_name_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "key_file.json").mkdir()
    with pytest.raises(KeyFileError, match="can't be written: Is a directory"):
        made(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["key_file.json"]


# --- from outside


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    """A secret as Kubernetes mounts it: files that are links into a directory that a link names."""
    place = tmp_path / "mounted"
    place.mkdir()
    for name in ("inference", "management"):
        (place / name).symlink_to(Path("..data") / name)
    swap(place, inference="first-inference", management="first-management")
    return place


def swap(place: Path, **keys: str) -> None:
    version = place / f"..{len(list(place.iterdir()))}"
    version.mkdir()
    for name, key in keys.items():
        (version / name).write_text(key)
    (place / "..new").symlink_to(version.name)
    os.replace(place / "..new", place / "..data")


def test_a_mounted_secret_is_taken_over_as_it_changes(tmp_path: Path, mounted: Path) -> None:
    authorization, _ = made(tmp_path, lambda: read_keys(mounted))
    assert authorization.made_in is None
    assert not (tmp_path / "key_file.json").exists()
    swap(mounted, inference="first-inference\nsecond-inference", management="first-management")
    asyncio.run(authorization.reload())
    for key in (b"first-inference", b"second-inference"):
        assert authorization.opens(KeyKind.INFERENCE, header(key))
    swap(mounted, inference="second-inference", management="first-management")
    asyncio.run(authorization.reload())
    assert not authorization.opens(KeyKind.INFERENCE, header(b"first-inference"))
    assert authorization.opens(KeyKind.INFERENCE, header(b"second-inference"))
    authorization.close()


@pytest.mark.parametrize("damage", ["vanished", "unreadable", "empty", "a kind less", "short"])
def test_what_cannot_be_read_leaves_the_keys_and_is_told_once(
    tmp_path: Path, mounted: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    authorization, _ = made(tmp_path, lambda: read_keys(mounted))
    if damage == "vanished":
        mounted.rename(tmp_path / "away")
    elif damage == "unreadable":
        (mounted / "..data").unlink()
    else:
        keys = {"empty": {"inference": ""}, "a kind less": {}, "short": {"inference": "hush"}}[damage]
        if damage == "a kind less":
            (mounted / "inference").unlink()
        swap(mounted, **{"management": "other-management", **keys})
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            asyncio.run(authorization.reload())
    assert authorization.opens(KeyKind.INFERENCE, header(b"first-inference"))
    assert authorization.opens(KeyKind.MANAGEMENT, header(b"first-management"))
    assert not authorization.opens(KeyKind.MANAGEMENT, header(b"other-management"))
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("The keys stay as they were: ")
    assert "first-" not in caplog.text and "hush" not in caplog.text
    authorization.close()


def test_a_file_that_is_no_json_for_a_while(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys.json"
    good = json.dumps({"inference": "first-inference", "management": "first-management"})
    file.write_text(good)
    authorization, _ = made(tmp_path, lambda: read_keys(file))
    with caplog.at_level(logging.INFO):
        for text in (good[:20], good[:20], "", "", good, good, good[:20]):
            file.write_text(text)
            asyncio.run(authorization.reload())
            assert authorization.opens(KeyKind.INFERENCE, header(b"first-inference"))
    told = [message.partition(":")[0] for message in caplog.messages]
    assert told == ["The keys stay as they were", "Keys were read again", "The keys stay as they were"]
    authorization.close()


def test_what_is_not_given_is_made(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text('{"inference": "from-outside"}')
    authorization, _ = made(tmp_path, lambda: read_keys(file))
    assert list(json.loads((tmp_path / "key_file.json").read_text())) == ["management", "API"]
    assert "from-outside" not in (tmp_path / "key_file.json").read_text()
    asyncio.run(authorization.renew(KeyKind.MANAGEMENT))
    with pytest.raises(InvalidArgument, match="inference key was given"):
        asyncio.run(authorization.renew(KeyKind.INFERENCE))
    authorization.close()


def test_without_a_key_for_it_nobody_makes_new_ones(tmp_path: Path, mounted: Path) -> None:
    authorization, _ = made(tmp_path, lambda: read_keys(mounted))
    assert not authorization.opens(KeyKind.API, header(b""))
    assert not authorization.opens(KeyKind.API, header(b"first-management"))
    with pytest.raises(PermissionDenied, match=NOT_RENEWED):
        authorization.refuse(KeyKind.API, [], "peer", NOT_RENEWED)
    authorization.close()


# --- from settings


def opened(directory: Path, **settings: str) -> Authorization | None:
    config = load_config([Option(key, text, "--set") for key, text in settings.items()], environ={})
    return open_authorization(config, directory)


@pytest.mark.parametrize("needed", [False, True])
def test_the_keys_of_a_killed_server_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, needed: bool
) -> None:
    """Also at a start that makes no keys and leaves the file there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key_file.json").write_text("left")
    with caplog.at_level("INFO"):
        authorization = opened(tmp_path, disable_token_authorization="false" if needed else "true")
        said = f"{tmp_path / 'key_file.json'} has the keys of a server that has ended: they don't count"
        assert caplog.messages == [said]
        with contextlib.ExitStack() as open_one:
            if authorization is not None:
                open_one.callback(authorization.close)
                assert opened(tmp_path, disable_token_authorization="true") is None
                assert caplog.messages == [said]  # the present file is that of a running server


def test_keys_that_cannot_be_used_keep_the_server_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"token_path: .*missing: it can't be read"):
        opened(tmp_path, token_path="missing")
    (tmp_path / "key_file.json").write_text('{"inference": "from-a-file"}')
    with pytest.raises(ConfigError, match="Use another name"):
        opened(tmp_path, token_path="./key_file.json")
    assert (tmp_path / "key_file.json").read_text() == '{"inference": "from-a-file"}'
