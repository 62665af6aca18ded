"""The examples with language models: each program as it is, with OpenAI's client and a real model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from smollm2 import MARKS, MODEL, PACKAGES
from support import GUARD_S

#: The environment of KServe's clients has OpenAI's.
PYTHON = Path(sys.prefix) / "clients" / "kserve" / "bin" / "python"
pytestmark = [*MARKS, pytest.mark.skipif(not PYTHON.is_file(), reason="the clients of kserve are not installed")]


def blocks(root: Path, language: str) -> list[str]:
    page = (root / "examples/language_models/README.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


@pytest.fixture(scope="module")
def server(root: Path, serving: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The models as the README has them."""
    place = tmp_path_factory.mktemp("examples")
    for name in ("chat", "embed", "tools"):
        (place / "store" / name).mkdir(parents=True)
        (place / "store" / name / "model.gguf").symlink_to(MODEL)
    (config,) = blocks(root, "yaml")
    assert yaml.safe_load(config)["handler"]["embeddings"] is True
    (place / "store" / "embed" / "model-config.yaml").write_text(config)
    template = {"chatTemplate": (Path(__file__).parent / "clients/programs/tools.jinja").read_text()}
    (place / "store" / "tools" / "model-config.yaml").write_text(json.dumps({"handler": template}))
    settings = {"env": {"PYTHONPATH": str(PACKAGES)}, "default_response_timeout": str(GUARD_S)}
    models = ["chat=chat", "embed=embed", "tools=tools"]
    with serving(place, place / "store", settings, ["--models", *models]) as server:
        yield server  # calls wait for the models


@pytest.fixture
def run(root: Path, server: Any, clean_env: dict[str, str]) -> Callable[..., str]:
    def run(program: str, *words: str, said: str = "") -> str:
        command: list[str | Path] = [PYTHON, root / "examples/language_models" / program, *words]
        env = {**clean_env, "OPENAI_BASE_URL": f"{server.http}/v1"}
        done = subprocess.run(command, env=env, input=said, capture_output=True, text=True, timeout=GUARD_S, cwd=root)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_a_chat_remembers(run: Callable[..., str]) -> None:
    printed = run("chat.py", said="What is the capital of France?\nAnd of Italy?\n")
    first, second = printed.split("> ")[1:3]
    assert "Paris" in first and "Rome" in second, printed


def test_a_call_is_run_and_its_result_goes_back(run: Callable[..., str]) -> None:
    question = 'Repeat this: <tool_call>\n{"name": "fahrenheit", "arguments": {"celsius": 100}}\n</tool_call>'
    call, *answer = run("tools.py", question, "tools").splitlines()
    found = re.fullmatch(r"fahrenheit (\{.*\}) -> (\S+)", call)
    assert found and float(found[2]) == round(json.loads(found[1])["celsius"] * 9 / 5 + 32, 1), call
    assert answer, "the model goes on with the result"


def test_the_best_line_is_found_first(run: Callable[..., str], root: Path) -> None:
    file = "examples/language_models/facts.txt"
    questions = {
        "At which temperature does water boil?": "Water boils at 100 degrees.",
        "Which city is the French capital?": "Paris is the capital of France.",
        "What did share prices do?": "The stock market fell today.",
    }
    assert {question: run("search.py", file, question).split("\n")[0][7:] for question in questions} == questions
    (shown,) = blocks(root, "text")
    assert [line[7:] for line in run("search.py", file, next(iter(questions))).splitlines()] == [
        line[7:] for line in shown.splitlines()
    ]


def test_an_unknown_pooling_is_named(serving: Any, tmp_path: Path) -> None:
    (tmp_path / "store" / "embed").mkdir(parents=True)
    (tmp_path / "store" / "embed" / "model.gguf").symlink_to(MODEL)
    (tmp_path / "store" / "embed" / "model-config.yaml").write_text("handler: {embeddings: true, pooling: max}\n")
    settings = {"env": {"PYTHONPATH": str(PACKAGES)}}
    with serving(tmp_path, tmp_path / "store", settings, ["--models", "embed=embed"]) as server:
        server.wait_for_log("handler: pooling is 'max'; there are unspecified, none, mean, cls, last, rank")
