"""docs/errors.md has every kind of error, as the code has it."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest

from support import module_of


@pytest.fixture(scope="module")
def script(root: Path) -> ModuleType:
    return module_of(root / "ts_scripts/list_errors.py")


def test_the_page_is_current_and_every_kind_says_what_to_do(script: ModuleType, root: Path) -> None:
    listed = script.kinds(script.trees())
    generated = "\n".join(script.page(listed))
    page = (root / "docs/errors.md").read_text().partition(script.BEGIN)[2].partition(script.END)[0]
    assert page == generated + "\n", "run ts_scripts/list_errors.py"
    assert not [one.name for one in listed.values() if not one.remedy]
    assert listed["ModelNotFound"].http_status == "404" and listed["QueueFull"].code == "RESOURCE_EXHAUSTED"
    assert listed["WorkerDied"].http_status == "varies"
    assert "Model not found: {name}" in listed["ModelNotFound"].forms


@pytest.mark.parametrize(
    ("call", "forms"),
    [
        ("Kind('no such thing here')", ["no such thing here"]),
        ("Kind(f'{name} is {1 + 1}, {self._limit} at most')", ["{name} is {…}, {limit} at most"]),
        ("Kind(given or f'a text for {a.b}')", ["a text for {b}"]),
        ("Kind('the first one' if x else 'the second one')", ["the first one", "the second one"]),
        ("Kind(f'{a}: {b()}')", []),
        ("Kind(text)", []),
        ("Kind()", []),
    ],
)
def test_messages_are_read_from_calls(script: ModuleType, call: str, forms: list[str]) -> None:
    tree = ast.parse(call, mode="eval").body
    assert isinstance(tree, ast.Call) and list(script.forms(tree)) == forms
