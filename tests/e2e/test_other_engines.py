"""Handlers that need other packages: vLLM behind OpenAI's interface (with a stand-in engine), and missing packages."""

from __future__ import annotations

import http.client
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from support import GUARD_S

STAND_INS = Path(__file__).parents[1] / "data" / "stand_ins"
CONFIG = """
handler:
  model_path: weights
  vllm_engine_config: {served_model_name: echo}
  adapters: {tuned: adapters/tuned}
  chat_template: "[{}]"
"""


def add(store: Path, name: str, handler: str, config: str = "", **names: str) -> Path:
    folder = store / name
    (folder / "MAR-INF").mkdir(parents=True)
    model = {"modelName": name, "handler": handler, **names}
    if config:
        (folder / "model-config.yaml").write_text(config)
        model["configFile"] = "model-config.yaml"
    (folder / "MAR-INF" / "MANIFEST.json").write_text(json.dumps({"model": model}))
    return folder


@pytest.fixture(scope="module")
def served(serving: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    store = tmp_path_factory.mktemp("engines") / "store"
    folder = add(store, "llm", "vllm_handler", CONFIG)
    for file in STAND_INS.glob("vllm*.*"):
        shutil.copy(file, folder)
    add(store, "without", "vllm_handler", CONFIG)
    (store / "without" / "vllm.py").write_text("raise ImportError('not here')\n")
    add(store, "dali", "dali_image_classifier")
    add(store, "trt", "trt_llm_handler")
    add(store, "onnx", "base_handler", serializedFile="net.onnx")
    (store / "onnx" / "net.onnx").touch()
    (store / "onnx" / "onnxruntime.py").write_text("raise ImportError('not here')\n")
    with serving(tmp_path_factory.mktemp("server"), store, {"preload_torch": "true"}, ["--ncs"]) as server:
        server.register("llm")
        yield server


def ask(server: Any, path: str, body: object) -> tuple[int, str, bytes]:
    """Status, content type and body of a POST below /predictions/llm."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port("http_inference"), timeout=GUARD_S)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", f"/predictions/llm/1.0/{path}", json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.getheader("content-type", ""), answer.read()
    finally:
        connection.close()


def events(body: bytes) -> list[Any]:
    """The pieces of a stream of events; the last says that it's the end."""
    *pieces, last, nothing = body.decode().split("\n\n")
    assert (last, nothing) == ("data: [DONE]", "")
    return [json.loads(piece.removeprefix("data: ")) for piece in pieces]


def test_completions(served: Any) -> None:
    status, _, body = ask(served, "v1/completions", {"model": "echo", "prompt": "one two three", "max_tokens": 2})
    answer = json.loads(body)
    assert (status, answer["object"], answer["model"]) == (200, "text_completion", "echo")
    assert answer["choices"] == [{"index": 0, "text": "one two", "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
    _, _, body = ask(served, "v1/completions", {"prompt": [7, 8]})
    assert json.loads(body)["choices"][0]["text"] == "7 8"


def test_chats_and_adapters(served: Any) -> None:
    messages = [{"role": "user", "content": "hello you"}]
    _, _, body = ask(served, "v1/chat/completions", {"model": "echo", "messages": messages})
    answer = json.loads(body)
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "[user: hello you]"}
    _, _, body = ask(served, "v1/chat/completions", {"model": "tuned", "messages": messages})
    assert json.loads(body)["choices"][0]["message"]["content"] == "<tuned> [user: hello you]"


def test_streams(served: Any) -> None:
    status, kind, body = ask(served, "v1/completions", {"prompt": "a b c", "stream": True})
    assert (status, kind) == (200, "text/event-stream")
    assert [one["choices"][0]["text"] for one in events(body)] == ["a", " b", " c", ""]
    messages = [{"role": "user", "content": "x"}]
    _, _, body = ask(served, "v1/chat/completions", {"messages": messages, "stream": True})
    found = events(body)
    assert {one["object"] for one in found} == {"chat.completion.chunk"}
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in found) == "[user: x]"
    assert [one["choices"][0]["finish_reason"] for one in found] == [None, None, "stop"]


def test_over_grpc_the_body_says_what_is_meant(served: Any) -> None:
    answer = json.loads(served.predict("llm", {"messages": [{"role": "user", "content": "x"}]}))
    assert answer["object"] == "chat.completion"
    assert json.loads(served.predict("llm", {"prompt": "a"}))["object"] == "text_completion"
    pieces = served.stream("llm", {"prompt": "a b", "stream": True})
    assert len(pieces) == 4 and pieces[-1] == b"data: [DONE]\n\n"


def openai(server: Any, path: str, body: object = None) -> tuple[int, str, bytes]:
    """Status, content type and body of a call of OpenAI's API."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port("http_inference"), timeout=GUARD_S)
    try:
        text = None if body is None else json.dumps(body)
        connection.request("GET" if text is None else "POST", path, text, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.getheader("content-type", ""), answer.read()
    finally:
        connection.close()


def test_openais_api_has_the_handlers_models(served: Any) -> None:
    found = json.loads(openai(served, "/v1/models")[2])
    assert [one["id"] for one in found["data"]] == ["echo", "llm", "tuned"] and found["models"] == ["llm"]
    assert json.loads(openai(served, "/v1/models/tuned")[2])["ready"] is True
    assert openai(served, "/v1/models/other")[0] == 404


@pytest.mark.parametrize("model", ["llm", "echo", "tuned"])
def test_openais_api_reaches_the_handler(served: Any, model: str) -> None:
    begin = "<tuned> " if model == "tuned" else ""
    status, kind, body = openai(served, "/v1/completions", {"model": model, "prompt": ["a b", "c"], "max_tokens": 9})
    answer = json.loads(body)
    assert (status, kind, answer["object"]) == (200, "application/json", "text_completion")
    assert [one["text"] for one in answer["choices"]] == [f"{begin}a b", f"{begin}c"]
    messages = [{"role": "user", "content": "x"}]
    chat = {"model": model, "messages": messages}
    status, _, body = openai(served, "/v1/chat/completions", chat)
    assert json.loads(body)["choices"][0]["message"]["content"] == f"{begin}[user: x]"
    more = {"stream": True, "stream_options": {"include_usage": True}}
    status, kind, body = openai(served, "/v1/chat/completions", chat | more)
    *pieces, usage = events(body)
    assert (status, kind) == (200, "text/event-stream")
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in pieces) == f"{begin}[user: x]"
    assert usage["usage"]["prompt_tokens"] == 2


def test_openais_api_tells_what_the_handler_refuses(served: Any) -> None:
    for more, parameter, words in (
        ({"tools": [{}]}, "tools", "tools is"),
        ({"min_tokens": -1}, None, "min_tokens must be"),
        ({"min_tokens": -1, "stream": True}, None, "min_tokens must be"),
    ):
        status, _, body = openai(served, "/v1/completions", {"model": "llm", "prompt": "a", **more})
        error = json.loads(body)["error"]
        assert (status, error["type"], error["param"]) == (400, "invalid_request_error", parameter)
        assert words in error["message"]


def test_models_and_mistakes(served: Any) -> None:
    _, _, body = ask(served, "v1/models", {})
    assert [one["id"] for one in json.loads(body)["data"]] == ["echo", "tuned"]
    for path, sent, status, words in (
        ("v1/embeddings", {}, 404, "Unknown API endpoint: v1/embeddings"),
        ("v1/completions", {"prompt": "a", "model": "other"}, 404, "no model 'other', only echo, tuned"),
        ("v1/completions", {"prompt": 1}, 400, "prompt is a text or a list of texts, not 1"),
        ("v1/completions", {"prompt": "a", "n": 2}, 400, "n is 2: the model does not support this parameter"),
        ("v1/completions", {"prompt": "a", "temperature": -1}, 400, "temperature is a number, from 0 to 2, not -1"),
        ("v1/completions", [1], 400, "the body must be a JSON object, not list"),
    ):
        found, _, body = ask(served, path, sent)
        assert (found, words in json.loads(body)["message"]) == (status, True), body


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("without", "vllm_handler needs the package vllm, which can't be imported (not here)"),
        ("dali", "DALI isn't part of this server: use the handler image_classifier"),
        ("trt", "TensorRT-LLM isn't part of this server: use the handler vllm_handler"),
        ("onnx", "net.onnx needs ONNX Runtime: add `onnxruntime`"),
    ],
)
def test_what_is_missing_is_said_when_a_model_is_registered(served: Any, model: str, words: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        served.register(model)
    assert words in refused.value.details()
