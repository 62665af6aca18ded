"""Fields of urlencoded forms: bytes, as a browser or curl sends them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ts.protocol import forms


@given(st.binary(max_size=100))
def test_any_bytes_are_fields(body: bytes) -> None:
    forms.parts(forms.URLENCODED, body)


def test_too_many_fields() -> None:
    with pytest.raises(forms.MalformedForm, match="4096"):
        forms.parts(forms.URLENCODED, b"&".join([b"a=1"] * 4097))
