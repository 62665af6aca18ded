"""The key that a command sends to a running server, and its message after a refusal."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from ts_frontend.cli.client import ClientKeys, NoKeys, find_keys
from ts_frontend.cli.commands import commands
from ts_frontend.config.keys import KeyKind

FILE = """{
  "management": {"key": "management-key", "expiration time": "2026-11-21T00:34:37.796771500Z"},
  "inference": {"key": "inference-key", "expiration time": "2026-11-21T00:34:37.796760834Z"},
  "API": {"key": "api-key-1"}
}"""
LONG_AGO, LATER = 0.0, 4e9


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sent(keys: ClientKeys, kind: KeyKind = KeyKind.MANAGEMENT) -> str:
    metadata = dict(keys.metadata(kind))
    return metadata.get("authorization", "")


def test_what_was_named_counts_first(here: Path) -> None:
    (here / "key_file.json").write_text(FILE)
    (here / "other.json").write_text(FILE.replace("management-key", "another-key"))
    assert sent(find_keys(None, here / "other.json", "example.org")) == "Bearer another-key"
    assert sent(find_keys("given-key", here / "other.json", "example.org")) == "Bearer given-key"


def test_a_broken_key_file_matters_only_when_it_was_named(here: Path) -> None:
    (here / "key_file.json").write_text("{")
    assert sent(find_keys(None, None, "127.0.0.1")) == ""
    with pytest.raises(NoKeys, match="key_file.json: it is not JSON"):
        find_keys(None, here / "key_file.json", "127.0.0.1")
    result = CliRunner().invoke(commands, ["ping", "--key-file", "key_file.json"])
    assert (result.exit_code, "it is not JSON" in result.stderr) == (2, True)


@pytest.mark.parametrize("token", ["käse-key", "two words", "line\n"])
def test_a_token_that_cannot_be_a_key(token: str) -> None:
    result = CliRunner().invoke(commands, ["ping", "--token", token])
    assert (result.exit_code, "printable ASCII" in result.stderr) == (2, True)


def test_a_refusal_says_what_was_sent_and_what_to_do(here: Path) -> None:
    assert "its management key; none was sent." in ClientKeys().advice(KeyKind.MANAGEMENT)
    assert "the one of --token (or TORCHSERVE_TOKEN) isn't that" in ClientKeys("x").advice(KeyKind.INFERENCE)
    (here / "key_file.json").write_text(FILE)
    keys = find_keys(None, None, "127.0.0.1")
    assert f"the one of {here / 'key_file.json'} isn't that" in keys.advice(KeyKind.INFERENCE, LONG_AGO)
    assert "key_file.json has expired, at 2026-11-21T00:34:37" in keys.advice(KeyKind.INFERENCE, LATER)
    (here / "key_file.json").write_text('{"inference": "inference-key"}')
    assert "has none, and none was sent" in find_keys(None, None, "::1").advice(KeyKind.MANAGEMENT, LATER)
    for part in ("--token", "TORCHSERVE_TOKEN", "--key-file", "/token?type=management"):
        assert part in keys.advice(KeyKind.MANAGEMENT)
    assert "inference-key" not in keys.advice(KeyKind.INFERENCE)
