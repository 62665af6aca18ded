"""The page about the package `ts` names its content, and the example works."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import types
from pathlib import Path

import pytest


def test_every_module_of_the_table_is_there(root: Path) -> None:
    text = (root / "docs/ts-package.md").read_text().partition("## Names that are absent")[0]
    table = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    names = [name for cell in table for name in re.findall(r"`([a-z_.]+[a-z_])`", cell) if "…" not in name]
    assert len(names) > 20
    missing = [name for name in names if not name.startswith("__") and not _found(name)]
    assert not missing


def _found(name: str) -> bool:
    packages = ("ts", "ts.torch_handler", "ts.handler_utils")
    return any(importlib.util.find_spec(f"{package}.{name}") is not None for package in packages)


def test_the_example_loads_a_handler(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "MAR-INF").mkdir()
    (tmp_path / "MAR-INF" / "MANIFEST.json").write_text(json.dumps({"model": {"handler": "doubling_example.py"}}))
    source = "def handle(data, context):\n    return None if data is None else [2 * row['data'] for row in data]\n"
    (tmp_path / "doubling_example.py").write_text(source)
    (block,) = re.findall(r"```python\n(.*?)```", (root / "docs/ts-package.md").read_text(), re.DOTALL)
    module = types.ModuleType("block")
    exec(compile(block, "ts-package.md", "exec"), module.__dict__)  # noqa: S102 - our own page
    assert module.answer(str(tmp_path), 21) == 42
