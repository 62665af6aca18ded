"""The page about tests of handlers: its handler passes its tests."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from ts.testing import ServedModel
from ts.testing.fixtures import load_model as load_model


def blocks(root: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (root / "docs/testing-handlers.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("number", [1, 2])
def test_the_tests_of_the_page_pass(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load_model: Callable[..., ServedModel], number: int
) -> None:
    handler, *tests = blocks(root)
    (tmp_path / "summing.py").write_text(handler)
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("test_page")
    file = tmp_path / "streaming_page.py"
    file.write_text(tests[number - 1])
    module.__dict__["__file__"] = str(file)
    exec(compile(tests[number - 1], str(file), "exec"), module.__dict__)  # noqa: S102 - our own page
    ran = [function for name, function in vars(module).items() if name.startswith("test_")]
    for function in ran:
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            function(lambda source, **options: load_model(tmp_path / source, **options))
    assert len(ran) == (3, 1)[number - 1]
