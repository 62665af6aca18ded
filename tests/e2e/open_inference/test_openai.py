"""OpenAI's API with TorchServe handlers behind it. (Its own client: tests with the marker `external`.)"""

from __future__ import annotations

import ast
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support import GUARD_S


@pytest.fixture
def http(served: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.http, timeout=GUARD_S) as client:
        yield client


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    found = [one.removeprefix("data: ") for one in answer.text.split("\n\n") if one]
    assert found.pop() == "[DONE]"
    return [json.loads(one) for one in found]


def test_completion(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"model": "upper", "prompt": "ab", "max_tokens": 5}).json()
    assert answer["object"] == "text_completion" and answer["model"] == "upper" and answer["id"].startswith("cmpl-")
    assert answer["choices"] == [{"index": 0, "text": "AB", "logprobs": None, "finish_reason": "stop"}]


def test_streamed_completion(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"model": "words", "prompt": "a b", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    choices = [one["choices"][0] for one in events(answer)]
    assert [one["text"] for one in choices] == ["a ", "b ", ""]
    assert [one["finish_reason"] for one in choices] == [None, None, "stop"]


def test_chat(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    answer = http.post("/v1/chat/completions", json={"model": "upper", "messages": messages}).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "USER: HI\nASSISTANT:"}


def test_streamed_chat(http: httpx.Client) -> None:
    body = {"model": "words", "messages": [{"role": "user", "content": "a"}], "stream": True}
    found = events(http.post("/v1/chat/completions", json=body | {"stream_options": {"include_usage": True}}))
    assert {one["object"] for one in found} == {"chat.completion.chunk"}
    deltas = [one["choices"][0]["delta"] for one in found[:-1]]
    assert deltas[0] == {"role": "assistant", "content": "user: "} and deltas[-1] == {}
    assert found[-1]["choices"] == [] and found[-1]["usage"] is None


def test_models(http: httpx.Client) -> None:
    found = http.get("/v1/models").json()
    assert "upper" in found["models"] and found["object"] == "list"
    assert "upper" in [one["id"] for one in found["data"] if one["object"] == "model"]
    one = http.get("/v1/models/upper").json()
    assert (one["id"], one["object"], one["name"], one["ready"]) == ("upper", "model", "upper", True)
    assert 0 < one["created"] <= time.time()
    assert [model["created"] for model in found["data"] if model["id"] == "upper"] == [one["created"]]
    missing = http.get("/v1/models/nobody")
    assert missing.status_code == 404 and "nobody" in missing.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "word", "parameter", "code"),
    [
        ({"prompt": "x"}, 400, "model", "model", None),
        ({"model": "nobody", "prompt": "x"}, 404, "nobody", "model", "model_not_found"),
        ({"model": "upper"}, 400, "prompt", "prompt", None),
        ({"model": "upper", "prompt": ["a", 1]}, 400, "prompt", "prompt", None),
        ({"model": "upper", "prompt": "x", "n": 2}, 400, "n is 2", "n", "unsupported_parameter"),
        ({"model": "upper", "prompt": "x", "logprobs": 0}, 400, "logprobs is 0", "logprobs", "unsupported_parameter"),
        ({"model": "biased", "prompt": "x", "tools": [1]}, 400, "tools is", "tools", "unsupported_parameter"),
        ({"model": "upper", "prompt": "x", "max_tokens": 0}, 400, "max_tokens is a whole number", "max_tokens", None),
        ({"model": "upper", "prompt": "x", "stream": "yes"}, 400, "stream is true or false", "stream", None),
        ({"model": "raises", "prompt": "x"}, 500, "Prediction failed", None, None),
        ({"model": "raises", "prompt": ["x", "y"]}, 500, "Prediction failed", None, None),
        ({"model": "raises", "prompt": "x", "stream": True}, 500, "Prediction failed", None, None),
        ({"model": "raises", "prompt": ["x", "y"], "stream": True}, 500, "Prediction failed", None, None),
    ],
)
def test_errors_have_openais_form(
    http: httpx.Client, body: dict[str, Any], status: int, word: str, parameter: str | None, code: str | None
) -> None:
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert word in error["message"] and (error["param"], error["code"]) == (parameter, code)
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")


def test_several_prompts_get_an_answer_each(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"model": "counted", "prompt": ["a b", "c"], "max_tokens": 1}).json()
    assert [(one["index"], one["text"]) for one in answer["choices"]] == [(0, "a"), (1, "c")]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    body = {"model": "words", "prompt": ["a b", "c", "d e"], "stream": True}
    texts, ends = ["", "", ""], []
    for one in events(http.post("/v1/completions", json=body)):
        (choice,) = one["choices"]
        texts[choice["index"]] += choice["text"]
        ends += [choice["index"]] if choice["finish_reason"] else []
    assert texts == ["a b ", "c ", "d e "] and sorted(ends) == [0, 1, 2]


def test_a_stream_ends_with_a_stop(http: httpx.Client) -> None:
    """Twice, for the first must have ended the handler too."""
    for _ in range(2):
        answer = http.post("/v1/completions", json={"model": "endless", "prompt": "x", "stop": "3 4", "stream": True})
        choices = [one["choices"][0] for one in events(answer)]
        assert "".join(one["text"] for one in choices) == "1 2 "
        assert [one["finish_reason"] for one in choices][-1] == "stop"


def test_a_handler_may_honour_more(http: httpx.Client) -> None:
    body = {"model": "biased", "response_format": {"type": "json_object"}, "stop": None, "max_completion_tokens": 3}
    messages = [{"role": "user", "content": "x"}]
    answer = http.post("/v1/chat/completions", json=body | {"messages": messages}).json()
    parameters = ast.literal_eval(answer["choices"][0]["message"]["content"])
    assert parameters.pop("messages") == json.dumps(messages)
    assert parameters == {"response_format": {"type": "json_object"}, "max_tokens": 3}


def test_a_large_body(http: httpx.Client) -> None:
    """Of a body that is too large to be parsed between other requests, the server reads only the small parts."""
    for size in (100_000, 1_000_000):
        prompt = "x" * size
        body = {"model": "upper", "prompt": prompt, "stop": "y"}
        answer = http.post("/v1/completions", json=body).json()
        assert [one["text"] for one in answer["choices"]] == [prompt.upper()]
        assert http.post("/v1/completions", json=body | {"tools": [1]}).json()["error"]["param"] == "tools"
        tools = [{"type": "function", "function": {"name": "f" * 20_000}}]
        refused = http.post("/v1/completions", json=body | {"tools": tools})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
        many = http.post("/v1/completions", json=body | {"prompt": [prompt, "y"]}).json()
        if size == 100_000:
            assert [one["text"] for one in many["choices"]] == [prompt.upper(), "Y"]
        else:
            assert "a body of this size may have one" in many["error"]["message"]


def test_a_body_that_is_no_json(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", content=b"{")
    assert answer.status_code == 400 and "JSON" in answer.json()["error"]["message"]
    assert http.get("/v1/completions").status_code == 405
