"""Keys: headers and files that are good or aren't, and that no message shows one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ts_frontend.authorization.authorization import FILE_BYTES_MAX, LINES_MAX, PERIOD_S, Refusals, read_keys
from ts_frontend.config.keys import (
    KEYS_MAX,
    BadKeys,
    Key,
    KeyKind,
    bearer,
    parse_key_file,
    why_refused,
)

SECRET = "hush-hush-hush"
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


# --- files


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
