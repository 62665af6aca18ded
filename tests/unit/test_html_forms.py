"""Fields of urlencoded forms: bytes, as a browser or curl sends them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ts.protocol import forms


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (b"a=1&b=two", [("a", b"1"), ("b", b"two")]),
        (b"data=a%20b+c%C3%A9", [("data", b"a b c\xc3\xa9")]),
        ("data=é".encode(), [("data", "é".encode())]),
        (b"data=%FF%00", [("data", b"\xff\0")]),
        (b"%C3%A9=1", [("é", b"1")]),
        (b'{"x": 1}', [('{"x": 1}', b"")]),
        (b"a=&&b=1=2", [("a", b""), ("b", b"1=2")]),
        (b"a=100%", [("a", b"100%")]),
        (b"", []),
    ],
)
def test_fields(body: bytes, fields: list[tuple[str, bytes]]) -> None:
    assert [(part.name, part.data) for part in forms.parts(forms.URLENCODED, body)] == fields


@given(st.binary(max_size=100))
def test_any_bytes_are_fields(body: bytes) -> None:
    forms.parts(forms.URLENCODED, body)


def test_too_many_fields() -> None:
    with pytest.raises(forms.MalformedForm, match="4096"):
        forms.parts(forms.URLENCODED, b"&".join([b"a=1"] * 4097))
