"""Keys: headers and files that are good or aren't, and that no message shows one."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from ts_frontend.authorization.authorization import FILE_BYTES_MAX, LINES_MAX, PERIOD_S, Refusals, read_keys
from ts_frontend.config.keys import (
    KEYS_MAX,
    BadKeys,
    Key,
    KeyKind,
    bearer,
    joined,
    key_file_text,
    opens,
    parse_key_file,
    parse_key_lines,
    parse_time,
    time_text,
    why_refused,
)

SECRET = "hush-hush-hush"
GOLDEN = Path(__file__).parents[1] / "data" / "golden"
KEYS = {
    KeyKind.INFERENCE: (Key(b"inference1", 100.0), Key(b"inference2")),
    KeyKind.MANAGEMENT: (Key(b"management"),),
}


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ([b"Bearer abc"], b"abc"),
        ([b"Bearer \t abc"], b"abc"),
        ([], None),
        ([b""], None),
        ([b"Bearer "], None),
        ([b"Bearer"], None),
        ([b"bearer abc"], None),
        ([b"BEARER abc"], None),
        ([b"Basic abc"], None),
        ([b"abc"], None),
        ([b"Bearer abc def"], None),
        ([b" Bearer abc"], None),
        ([b"Bearer abc "], None),
        ([b"Bearer abc\n"], None),
        ([b"Bearer \xe4bc"], None),
        ([b"Bearer abc", b"Bearer abc"], None),
        ([b"Bearer abc, Bearer abc"], None),
    ],
)
def test_a_header_is_one_bearer_with_one_key(values: list[bytes], key: bytes | None) -> None:
    assert bearer(values) == key


def test_any_of_the_keys_opens_until_it_expires() -> None:
    inference = KEYS[KeyKind.INFERENCE]
    assert opens(inference, b"inference1", 99.9)
    assert not opens(inference, b"inference1", 100.0)
    assert opens(inference, b"inference2", 1e12)
    for wrong in (b"inference", b"inference3", b"management", b"", b"INFERENCE1"):
        assert not opens(inference, wrong, 0)
    assert not opens((), b"", 0)


@pytest.mark.parametrize(
    ("values", "now_s", "why"),
    [
        ([], 0, "it sent no key"),
        ([b"Basic x"], 0, "it's `Bearer KEY`".replace("it's", "its Authorization isn't")),
        ([b"Bearer a", b"Bearer b"], 0, "it sent more than one Authorization"),
        ([b"Bearer inference1"], 100, "its key has expired"),
        ([b"Bearer management"], 0, "its key is the one of kind management"),
        ([b"Bearer nothing"], 0, "its key is unknown"),
    ],
)
def test_the_log_says_why(values: list[bytes], now_s: float, why: str) -> None:
    assert why_refused(KEYS, KeyKind.INFERENCE, values, now_s) == why


# --- key_file.json


def test_the_key_file_has_torchserves_shape() -> None:
    recorded = (GOLDEN / "150_key_file_json.txt").read_text().partition("\n")[2].strip()
    keys = parse_key_file(recorded)
    assert keys[KeyKind.API] == (Key(b"aShZObwf"),)
    written = key_file_text(keys)
    theirs, ours = json.loads(recorded), json.loads(written)
    for kind in ("management", "inference"):
        for entry in (theirs, ours):
            entry[kind]["expiration time"] = entry[kind]["expiration time"][:23]  # ours ends with microseconds
    assert json.dumps(ours, indent=2) == json.dumps(theirs, indent=2)
    assert list(ours) == ["management", "inference", "API"]


def test_times_are_read_as_they_are_written() -> None:
    for seconds in (0.0, 1795217677.796771, 1e9):
        assert parse_time(time_text(seconds)) == pytest.approx(seconds, abs=1e-5)
    assert time_text(1e30).startswith("9999-12-31")
    assert parse_time("2026-11-21T00:34:37Z") == parse_time("2026-11-21T02:34:37.000000000+02:00")
    for wrong in ("", "soon", "2026-11-21", "2026-13-21T00:00:00Z", "2026-11-21T00:34:37"):
        with pytest.raises(ValueError):
            parse_time(wrong)


def test_a_file_may_hold_several_keys_of_a_kind() -> None:
    keys = parse_key_file(
        json.dumps(
            {
                "inference": ["first-key", {"key": "second-key", "expiration time": "2030-01-01T00:00:00Z"}],
                "management": "third-key",
                "api": {"key": "fourth-key"},
            }
        )
    )
    assert [key.secret for key in keys[KeyKind.INFERENCE]] == [b"first-key", b"second-key"]
    assert [math.isinf(key.expires_s) for key in keys[KeyKind.INFERENCE]] == [True, False]
    assert set(keys) == set(KeyKind)


@pytest.mark.parametrize(
    "text",
    [
        "",
        SECRET,
        f'"{SECRET}"',
        f'["{SECRET}"]',
        "{}",
        f'{{"{SECRET}": "{SECRET}"}}',
        f'{{"api": "{SECRET}", "API": "{SECRET}"}}',
        '{"inference": []}',
        '{"inference": ""}',
        '{"inference": "short"}',
        '{"inference": 123456789}',
        f'{{"inference": {{"kee": "{SECRET}"}}}}',
        f'{{"inference": "{SECRET} {SECRET}"}}',
        f'{{"inference": "{SECRET}é"}}',
        f'{{"inference": "{SECRET}\\u0000"}}',
        json.dumps({"inference": "x" * 5000}),
        json.dumps({"inference": [f"{SECRET}{number}" for number in range(KEYS_MAX + 1)]}),
        f'{{"inference": {{"key": "{SECRET}", "expiration time": "soon"}}}}',
        "[" * 100_000,
    ],
)
def test_what_is_no_key_file_is_refused_without_a_key_in_the_message(text: str) -> None:
    with pytest.raises(BadKeys) as caught:
        parse_key_file(text)
    assert SECRET not in str(caught.value)


def test_a_secret_is_not_shown_by_accident() -> None:
    assert SECRET not in repr(Key(SECRET.encode())) + str(parse_key_lines(KeyKind.API, SECRET))


# --- files


def test_a_directory_has_a_file_for_each_kind(tmp_path: Path) -> None:
    (tmp_path / "inference").write_text("first-key\n\n  second-key  \r\n")
    (tmp_path / "API").write_text("third-key")
    (tmp_path / "README").write_text("not a key")
    keys = read_keys(tmp_path)
    assert {kind: [key.secret for key in ones] for kind, ones in keys.items()} == {
        KeyKind.INFERENCE: [b"first-key", b"second-key"],
        KeyKind.API: [b"third-key"],
    }


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds no key of that kind"),
        (b"short", "inference key 1 has 5 characters"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"x" * (FILE_BYTES_MAX + 1), "larger than"),
    ],
)
def test_files_that_hold_no_keys(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "inference").write_bytes(content)
    with pytest.raises(BadKeys, match=says) as caught:
        read_keys(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_directory_without_keys_and_a_path_without_anything(tmp_path: Path) -> None:
    with pytest.raises(BadKeys, match="holds no key; the files are named"):
        read_keys(tmp_path)
    with pytest.raises(BadKeys, match="can't be read: No such file"):
        read_keys(tmp_path / "missing")
    (tmp_path / "inference").mkdir()
    with pytest.raises(BadKeys, match="it is no file|Is a directory"):
        read_keys(tmp_path)


def test_keys_of_several_sources_all_count_once() -> None:
    keys = joined(
        {KeyKind.API: (Key(b"a", 1.0),)}, {KeyKind.API: (Key(b"a", 2.0), Key(b"b")), KeyKind.INFERENCE: (Key(b"c"),)}
    )
    assert keys == {KeyKind.API: (Key(b"a", 1.0), Key(b"b")), KeyKind.INFERENCE: (Key(b"c"),)}


# --- the log


def test_refusals_are_all_counted_and_some_are_told() -> None:
    refusals = Refusals()
    told = [refusals.line("inference", f"10.0.0.1:{port}", "it sent no key", port / 1000) for port in range(100)]
    assert [line is not None for line in told] == [True] * LINES_MAX + [False] * (100 - LINES_MAX)
    assert told[0] == "Refused a call to the inference API from 10.0.0.1:0: it sent no key"
    later = refusals.line("management", "", "it sent no key", PERIOD_S)
    assert later is not None
    assert later.endswith(f"from a Unix socket: it sent no key ({100 - LINES_MAX} earlier refusals weren't logged)")
    assert refusals.counts == {"inference": 100, "management": 1}
