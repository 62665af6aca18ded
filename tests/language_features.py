"""What engines of language models do: requests to a model that generates text, and what becomes of them. The table in
docs/language-models.md is made of this one; tests/e2e/test_language_models.py asks each engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

ENGINES = ("llama.cpp", "transformers", "vllm")
YES, IGNORED = "yes", "ignored"
#: The marks around the table.
BEGIN, END = "<!-- features: made of tests/language_features.py -->\n", "<!-- end of features -->\n"


class Feature(NamedTuple):
    """`asked`: in the words of the documentation; `body`: besides the model; `has`: whether an answer shows it, given
    its JSON, or the list of its events; `outcomes`: of each engine, `yes`, `ignored`, or the status of the
    refusal."""

    asked: str
    path: str
    body: dict[str, Any]
    has: Callable[[Any], Any]
    outcomes: tuple[str, str, str]


def _message(answer: Any) -> dict[str, Any]:
    found: dict[str, Any] = answer["choices"][0]["message"]
    return found


ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Say a word."}], "max_tokens": 8, "temperature": 0}
TEXT: dict[str, Any] = {"prompt": "The sky is", "max_tokens": 4, "temperature": 0}
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
_CHAT, _COMPLETE = "v1/chat/completions", "v1/completions"
_ALL = (YES, YES, YES)

FEATURES = (
    Feature("chats", _CHAT, ASK, lambda answer: _message(answer)["content"], _ALL),
    Feature(
        "streams with usage",
        _CHAT,
        {**ASK, "stream": True, "stream_options": {"include_usage": True}},
        lambda events: len(events) > 2 and events[-1]["usage"]["completion_tokens"],
        _ALL,
    ),
    Feature("completions", _COMPLETE, TEXT, lambda answer: answer["choices"][0]["text"], _ALL),
    Feature("`n`", _CHAT, {**ASK, "n": 2, "temperature": 1}, lambda answer: len(answer["choices"]) == 2, _ALL),
    Feature(
        "`stop`",
        _COMPLETE,
        {**TEXT, "stop": [" "]},
        lambda answer: answer["choices"][0]["finish_reason"] == "stop" and " " not in answer["choices"][0]["text"],
        _ALL,
    ),
    Feature(
        "`logprobs`, `top_logprobs`",
        _CHAT,
        {**ASK, "logprobs": True, "top_logprobs": 2},
        lambda answer: len(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2,
        _ALL,
    ),
    Feature(
        "`logit_bias`",
        _COMPLETE,
        {**TEXT, "logit_bias": {"100": 100}},
        lambda answer: len(set(answer["choices"][0]["text"].split())) == 1,
        _ALL,
    ),
    Feature(
        "`response_format` with a JSON schema",
        _CHAT,
        {**ASK, "max_tokens": 40, "response_format": SCHEMA},
        lambda answer: json.loads(_message(answer)["content"]).keys() == {"city"},
        (YES, "400", YES),
    ),
    Feature(
        "`tool_choice: required`, with a chat template that has no tools",
        _CHAT,
        {**ASK, "max_tokens": 60, "tools": TOOLS, "tool_choice": "required"},
        lambda answer: _message(answer).get("tool_calls"),
        (IGNORED, "400", "400"),
    ),
    Feature(
        "`/v1/responses`",
        "v1/responses",
        {"input": "Hi", "max_output_tokens": 5},
        lambda answer: answer["object"] == "response" and answer["output"],
        _ALL,
    ),
    Feature(
        "`/v1/messages`",
        "v1/messages",
        {**ASK, "max_tokens": 5},
        lambda answer: answer["type"] == "message" and answer["content"][0]["text"],
        _ALL,
    ),
    Feature(
        "`/v1/messages/count_tokens`",
        "v1/messages/count_tokens",
        {"messages": ASK["messages"]},
        lambda answer: answer["input_tokens"],
        _ALL,
    ),
    Feature("`/tokenize`", "tokenize", {"prompt": "a b", "content": "a b"}, lambda answer: answer["tokens"], _ALL),
    Feature(
        "`/detokenize`",
        "detokenize",
        {"tokens": [100]},
        lambda answer: answer.get("prompt") or answer.get("content"),
        _ALL,
    ),
)


def outcome(feature: Feature, status: int, answer: Any) -> str:
    """`answer`: JSON, or the events of a stream."""
    if status != 200:
        return str(status)
    return YES if feature.has(answer) else IGNORED


def table() -> Iterator[str]:
    """The lines of the documentation: what every engine does, and a row for each other feature."""
    yield "Every engine does: " + ", ".join(one.asked for one in FEATURES if one.outcomes == _ALL) + ". Others:"
    yield ""
    yield "| | llama.cpp | transformers | vLLM |"
    yield "|---|---|---|---|"
    for one in FEATURES:
        if one.outcomes != _ALL:
            told = " | ".join(f"refused ({found})" if found.isdigit() else found for found in one.outcomes)
            yield f"| {one.asked} | {told} |"
