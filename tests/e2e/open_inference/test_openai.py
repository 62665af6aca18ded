"""OpenAI's API with TorchServe handlers behind it. (Its own client: tests with the marker `external`.)"""

from __future__ import annotations

import json
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


def test_what_a_model_says_of_its_answer(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"model": "counted", "prompt": "a b", "max_tokens": 1}).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}


def test_models(http: httpx.Client) -> None:
    found = http.get("/v1/models").json()
    assert "upper" in found["models"] and found["object"] == "list"
    assert "upper" in [one["id"] for one in found["data"] if one["object"] == "model"]
    one = http.get("/v1/models/upper").json()
    assert (one["id"], one["object"], one["name"], one["ready"]) == ("upper", "model", "upper", True)
    missing = http.get("/v1/models/nobody")
    assert missing.status_code == 404 and "nobody" in missing.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"prompt": "x"}, 400, "model"),
        ({"model": "nobody", "prompt": "x"}, 404, "nobody"),
        ({"model": "upper"}, 400, "prompt"),
        ({"model": "upper", "prompt": ["a", "b"]}, 400, "prompt"),
        ({"model": "upper", "prompt": "x", "n": 2}, 400, "n is 2"),
        ({"model": "upper", "prompt": "x", "stream": "yes"}, 400, "stream is true or false"),
        ({"model": "raises", "prompt": "x"}, 500, "Prediction failed"),
        ({"model": "raises", "prompt": "x", "stream": True}, 500, "Prediction failed"),
    ],
)
def test_errors_have_openais_form(http: httpx.Client, body: dict[str, Any], status: int, word: str) -> None:
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == status, answer.text
    assert word in answer.json()["error"]["message"] and answer.json()["error"]["code"] == status


def test_a_body_that_is_no_json(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", content=b"{")
    assert answer.status_code == 400 and "JSON" in answer.json()["error"]["message"]
    assert http.get("/v1/completions").status_code == 405
