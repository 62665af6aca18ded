"""The names that an error about something unknown ends with."""

from __future__ import annotations

import pytest

from ts_frontend.config.kinds import NAMES_COMPARED_MAX, NAMES_SHOWN_MAX, names_there
from ts_frontend.errors import ModelNotFound, ModelVersionNotFound

MANY = [f"m{number:03}" for number in range(NAMES_COMPARED_MAX + 9)]


@pytest.mark.parametrize(
    ("names", "word", "expected"),
    [
        ([], "x", ". Models here: none."),
        (["a", "b"], "x", ". Models here: a, b."),
        (["digits", "resnet"], "Digit", "; did you mean digits? Models here: digits, resnet."),
        (["1.0", "2.0"], "", ". Models here: 1.0, 2.0."),
        (MANY[:NAMES_SHOWN_MAX], "", f". Models here: {', '.join(MANY[:NAMES_SHOWN_MAX])}."),
        (MANY, "m19", f"; did you mean m199? Models here: {', '.join(MANY[:NAMES_SHOWN_MAX])} and 199 more."),
        (["a\udcff"], "", ". Models here: a?."),
    ],
)
def test_the_nearest_comes_first_then_the_first_names(names: list[str], word: str, expected: str) -> None:
    assert names_there("Models here", names, word) == expected


def test_names_beyond_the_limit_are_not_compared() -> None:
    names = ["a"] * NAMES_COMPARED_MAX
    assert names_there("Models here", names, "digits").startswith(". Models here: a, a")
    assert names_there("Models here", [*names, "digits"], "digits").startswith(". Models here: a, a")
    assert names_there("Models here", [*names[1:], "digits"], "digits").startswith("; did you mean digits?")


def test_only_what_is_told_has_the_names() -> None:
    """Logs, and callers that may not see the names, have the sentence alone, also after the error was kept."""
    unknown = ModelNotFound("a", lambda: ". Models here: b.")
    version = ModelVersionNotFound("a", "2", hint=lambda: ". Versions of a: 1.")
    assert unknown.message == str(unknown) == "Model not found: a"
    assert unknown.ending().error().told() == unknown.told() == "Model not found: a. Models here: b."
    assert version.told() == "Model version: 2 does not exist for model: a. Versions of a: 1."
    assert ModelNotFound("a").told() == "Model not found: a"
