"""OpenAI's completions: the options of a request, stop texts, the fields of an answer."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from ts.protocol import completions
from ts.protocol.completions import BadCompletion, ChatCompletion, Choice, Completion, read, usage


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("max_tokens", 0),
            ("max_tokens", 1.5),
            ("max_tokens", True),
            ("max_tokens", "3"),
            ("max_completion_tokens", 0),
        ),
        *(("temperature", -0.1), ("temperature", 2.1), ("temperature", math.nan), ("top_p", 1.1), ("seed", 1 << 65)),
        *(("presence_penalty", -3), ("frequency_penalty", "1"), ("stream", 1), ("stream_options", {})),
        *(("stop", 1), ("stop", [""]), ("stop", ["x"] * 17), ("stop", "x" * 257), ("stop", {"a": 1})),
        *(("prompt", None), ("prompt", []), ("prompt", {}), ("prompt", ["x", 1]), ("prompt", ["x"] * 129)),
        *(("prompt", [1, 2]), ("prompt", [[1], [2]]), ("prompt", [[]])),
    ],
)
def test_values_that_make_no_sense(name: str, value: Any) -> None:
    with pytest.raises(BadCompletion, match=name) as refused:
        read({"prompt": "x", name: value}, False)
    assert (refused.value.parameter, refused.value.reason) == (name, None)


@pytest.mark.parametrize("messages", [None, [], "x", [1], [{"content": "x"}]])
def test_messages_that_are_none(messages: Any) -> None:
    with pytest.raises(BadCompletion, match="messages"):
        read({"messages": messages}, True)
    assert completions.content([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == "ab"
    with pytest.raises(BadCompletion, match="parts of type text"):
        completions.content([{"type": "image_url"}])


def test_stream_options_are_read() -> None:
    assert not read({"prompt": "x", "stream": True, "stream_options": {}}, False).with_usage
    for options in (1, {"include_usage": 1}):
        with pytest.raises(BadCompletion):
            read({"prompt": "x", "stream": True, "stream_options": options}, False)


def test_token_numbers_for_those_who_take_them() -> None:
    honours = {completions.TOKEN_PROMPTS}
    assert read({"prompt": [1, 2]}, False, honours).prompts == ([1, 2],)
    assert read({"prompt": [[1, 2], [3], "x"]}, False, honours).prompts == ([1, 2], [3], "x")


def shown(pieces: list[str], stops: tuple[str, ...]) -> tuple[str, bool]:
    choice = Choice(stops)
    text = so_far = ""
    for piece in pieces:
        text, so_far = text + choice.add(piece, {}), so_far + piece
        # no more is held back than may be the beginning of a stop, and no less
        begun = [size for stop in stops for size in range(len(stop)) if so_far.endswith(stop[:size])]
        assert choice.cut or text == so_far[: len(so_far) - max(begun)]
    return text + choice.rest(), choice.cut


@pytest.mark.parametrize(
    ("text", "stops", "wanted"),
    [
        *(("a b c", ("b",), "a "), ("a b c", ("d",), "a b c"), ("aab", ("ab",), "a"), ("aaab", ("aab", "b"), "a")),
        *(("stop", ("stop",), ""), ("sto", ("stop",), "sto"), ("sstop!", ("stop",), "s"), ("é€x€", ("€x",), "é")),
        *(("xyz", ("z", "yz"), "x"), ("ababac", ("abac",), "ab"), ("one\n\ntwo", ("\n\n",), "one")),
    ],
)
def test_a_text_ends_before_the_first_stop(text: str, stops: tuple[str, ...], wanted: str) -> None:
    """However it comes in pieces."""
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            pieces = [text[:first], text[first:second], text[second:], ""]
            assert shown(pieces, stops) == (wanted, wanted != text)
    assert shown(list(text), stops) == (wanted, wanted != text)


def test_why_it_ended() -> None:
    def reason(said: dict[str, Any], stops: tuple[str, ...] = (), most: int | None = None) -> str:
        choice = Choice(stops, most)
        choice.add("text", said)
        return choice.finish_reason

    assert reason({}) == "stop" and reason({}, most=1) == "stop"
    assert reason({"completion_tokens": 3}, most=3) == "length"
    assert reason({"completion_tokens": 2}, most=3) == "stop"
    assert reason({"completion_tokens": 3, "finish_reason": "content_filter"}, most=3) == "content_filter"
    assert reason({"finish_reason": "length"}, ("x",)) == "stop" and reason({"finish_reason": "length"}) == "length"


def test_usage_is_told_when_it_is_known() -> None:
    one, other = Choice(), Choice()
    one.add("", {"prompt_tokens": 1, "completion_tokens": 2})
    other.add("", {"prompt_tokens": 3})
    assert usage([one, other]) is None and "usage" not in Completion("r", "m").whole(["", ""], [one, other])
    other.add("", {"completion_tokens": 4})
    told = {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}
    assert usage([one, other]) == told == Completion("r", "m").whole(["", ""], [one, other])["usage"]
    assert Completion("r", "m", True).of_usage([Choice()])["usage"] is None


def test_a_chats_first_piece_has_the_role() -> None:
    answer, choice = ChatCompletion("r", "m"), Choice()
    pieces = [answer.piece(0, choice, text) for text in ("", "a")] + [answer.end(0, choice)]
    deltas = [piece["choices"][0]["delta"] for piece in pieces]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "a"}, {}]
    assert json.loads(completions.event(pieces[0]).removeprefix(b"data: "))["id"] == "chatcmpl-r"
