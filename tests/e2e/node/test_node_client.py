"""The whole server under a client of another implementation: @grpc/grpc-js, on both engines."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import GUARD_S

pytestmark = pytest.mark.external

HERE = Path(__file__).parent
SERVING = 1
INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND, ALREADY_EXISTS, RESOURCE_EXHAUSTED, CANCELLED = 3, 4, 5, 6, 8, 1

Ask = Callable[[str], Any]


@pytest.fixture(scope="session")
def node() -> str:
    found = shutil.which("node")
    if found is None or not (HERE / "node_modules").exists():
        pytest.skip("Node or its packages are not installed: make test-external installs them")
    return found


@pytest.fixture
def ask(node: str, root: Path, store: Path, start: Callable[..., Any]) -> Ask:
    """Runs a scenario of client.js against a server with the example models, and returns its output."""
    for archive in (root / "model_store").glob("*.mar"):
        shutil.copy(archive, store)
    server = start()
    for name in ("digits.mar", "hello_stream.mar", "text_stream.mar"):
        server.register(name)

    def run(scenario: str) -> Any:
        command = [node, str(HERE / "client.js"), scenario, server.inference, server.management, str(root)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_a_node_client_predicts_streams_cancels_and_manages(ask: Ask) -> None:
    """One server for all scenarios: none may spoil the next one."""
    assert ask("ping") == {"status": "Healthy"}
    assert ask("health") == [SERVING, SERVING, NOT_FOUND]
    assert ask("classify") == [str(digit) for digit in range(10)] * 5
    assert ask("stream") == {"pieces": ["intermediate_response"] * 3 + ["hello world "], "code": 0}
    assert ask("cancel") == {"cancelled": CANCELLED, "after": list(" burn")}
    assert ask("deadline")["code"] == DEADLINE_EXCEEDED
    answers = ask("errors")
    assert [answer["code"] for answer in answers] == [
        NOT_FOUND,
        NOT_FOUND,
        INVALID_ARGUMENT,
        RESOURCE_EXHAUSTED,
        ALREADY_EXISTS,
        NOT_FOUND,
    ]
    assert "Model not found: nothing" in answers[0]["details"]
    managed = ask("manage")
    assert managed["said"] == [
        'Model "digits" Version: 2.0 registered with 1 initial workers',
        "Workers scaled to 2 for model: digits, version: 2.0",
        'Default version successfully updated for model "digits" to "2.0"',
        "4",
        'Model "digits" unregistered',
    ]
    assert (managed["version"], managed["workers"]) == ("2.0", 2)
