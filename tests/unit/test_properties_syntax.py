"""Java properties text. Expectations follow java.util.Properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ts_frontend.config.properties import PropertiesError, Property, decode, parse, render


def pairs(text: str) -> list[tuple[str, str]]:
    return [(entry.key, entry.value) for entry in parse(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=1", [("a", "1")]),
        ("a:1", [("a", "1")]),
        ("a 1", [("a", "1")]),
        ("  a \t = \t 1 ", [("a", "1 ")]),
        ("a = : 1", [("a", ": 1")]),
        ("a", [("a", "")]),
        ("=1", [("", "1")]),
        ("# a=1\n! b=2\n\n  # c=3\nd=4", [("d", "4")]),
        ("a=1\\\n   2\\\n\t3", [("a", "123")]),
        ("a=1\\\n\nb=2", [("a", "1"), ("b", "2")]),
        ("a=1\\\n#2", [("a", "1#2")]),
        ("a=1\\\\\nb=2", [("a", "1\\"), ("b", "2")]),
        ("a=1\\", [("a", "1")]),
        ("a=1\r\nb=2\rc=3", [("a", "1"), ("b", "2"), ("c", "3")]),
        ("a\\ b\\:c\\=d=1", [("a b:c=d", "1")]),
        ("a=\\u00e9\\t\\q\\\\", [("a", "é\tq\\")]),
        ("a=\\ud83d\\ude00", [("a", "\N{GRINNING FACE}")]),
        ("a=1\na=2", [("a", "1"), ("a", "2")]),
        ("\\\n\nb=1", [("b", "1")]),
    ],
)
def test_syntax(text: str, expected: list[tuple[str, str]]) -> None:
    assert pairs(text) == expected


def test_entries_know_where_they_begin() -> None:
    assert parse("# first\na=1\\\n2\n\nb=3") == [Property("a", "12", 2), Property("b", "3", 5)]


@given(st.lists(st.tuples(st.text(), st.text())), st.lists(st.text(st.characters(min_codepoint=32, max_codepoint=126))))
def test_what_is_written_reads_back(given_pairs: list[tuple[str, str]], comments: list[str]) -> None:
    written = render([pair for pair in given_pairs if pair != ("", "")], comments)
    assert written.isascii()
    assert pairs(written) == [pair for pair in given_pairs if pair != ("", "")]


@given(st.text(alphabet="a\\=: \t\n\r#!u0f\f"))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        entries = parse(text)
    except PropertiesError:
        return
    assert pairs(render([(entry.key, entry.value) for entry in entries])) == [(e.key, e.value) for e in entries]


def test_files_are_utf8_or_latin1() -> None:
    assert decode("\ufeffé".encode()) == "é"
    assert decode("é".encode("latin-1")) == "é"
