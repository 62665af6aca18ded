"""Path templates match like Starlette's regular expressions, but in bounded time."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ts.protocol.path_template import CONVERTERS, BadTemplate, PathTemplate

#: Starlette's own (starlette.convertors), the oracle for short paths.
_UUID = "[0-9a-fA-F]{8}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{12}"
_EXPRESSIONS = {"str": "[^/]+", "path": ".*", "int": "[0-9]+", "float": r"[0-9]+(?:\.[0-9]+)?", "uuid": _UUID}
UUID = "12345678-1234-1234-1234-1234567890ab"

Part = str | tuple[str, str]
parts = st.lists(st.one_of(st.text("/a1.-", max_size=3), st.sampled_from(CONVERTERS).map(lambda it: ("p", it))))
pieces = st.one_of(st.text("/a1.-", max_size=4), st.sampled_from([UUID, UUID.replace("-", ""), "1.5", "12"]))


def template_of(found: list[Part]) -> str:
    texts = [one if isinstance(one, str) else f"{{p{at}:{one[1]}}}" for at, one in enumerate(found)]
    return "/" + "".join(texts)


def expression_of(found: list[Part]) -> re.Pattern[str]:
    texts = [re.escape(one) if isinstance(one, str) else f"(?:{_EXPRESSIONS[one[1]]})" for one in found]
    return re.compile("/" + "".join(texts))


@given(parts.filter(lambda found: len(found) < 7), st.lists(pieces, max_size=5).map("".join))
@example([("p", "path"), "/", ("p", "path")], "a/a/a")
@example([("p", "float"), ".", ("p", "int")], "1.1.1")
@example([("p", "float"), ("p", "float")], "11.11.1")
@example([("p", "str"), ("p", "str"), "a"], "aaaa")
@example([("p", "uuid"), ("p", "path")], UUID)
def test_matches_are_those_of_starlettes_expressions(found: list[Part], rest: str) -> None:
    path = "/" + rest
    assert PathTemplate(template_of(found)).fits(path) is (expression_of(found).fullmatch(path) is not None)


@pytest.mark.parametrize(
    ("text", "path", "fits"),
    [
        ("/greet/{name}", "/greet/Ann", True),
        ("/greet/{name}", "/greet/Ann/Lee", False),
        ("/files/{rest:path}", "/files/a/b", True),
        ("/files/{rest:path}", "/files/", True),
        ("/m/{name}:predict", "/m/echo:predict", True),
        ("/v/{major:int}.{minor:int}", "/v/12.3", True),
        ("/{not a name}", "/{not a name}", True),
        ("/a", "/a\n", False),
    ],
)
def test_templates(text: str, path: str, fits: bool) -> None:
    assert PathTemplate(text).fits(path) is fits


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("greet", "'greet' does not begin with a slash"),
        ("", "'' does not begin with a slash"),
        ("/{a}/{a}", "'/{a}/{a}' names the parameter 'a' twice"),
        ("/{a:word}", "'/{a:word}' has the unknown converter 'word'; there are str, path, int, float, uuid"),
    ],
)
def test_what_no_path_can_be_matched_with_is_refused_by_name(text: str, complaint: str) -> None:
    with pytest.raises(BadTemplate, match=re.escape(complaint)):
        PathTemplate(text)


@pytest.mark.parametrize("converter", ["path", "str", "int", "float"])
def test_time_does_not_explode(converter: str) -> None:
    """Five parameters over 64 KiB that fit until the last character: an expression would try billions of splits."""
    letter = "1" if converter in ("int", "float") else "a"
    template = PathTemplate("/" + letter.join(f"{{p{at}:{converter}}}" for at in range(5)) + "!")
    begun_s = time.thread_time()
    assert not template.fits("/" + letter * 65_536)
    assert template.fits("/" + letter * 65_536 + "!")
    assert time.thread_time() - begun_s < 10
