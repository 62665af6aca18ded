"""The imports of a handler: torch counts as needed unless it is known that it isn't."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ts_frontend.models.inspection import (
    FILE_BYTES_MAX,
    FILES_MAX,
    WITHOUT_TORCH,
    may_need_torch,
    module_may_need_torch,
)


def needs(directory: Path, **files: str) -> bool:
    for name, text in files.items():
        (directory / f"{name}.py").write_text(text)
    return may_need_torch(directory, "handler.py:handle")


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "import json, torch.nn as nn",
        "def load():\n\tfrom torch import nn",
        "if True: import torch",
        "x = 1; import torch",
        "from torch \\\n  import nn",
        "import \\\n  torch",
        "import transformers",
        "from ts.torch_handler.base_handler import BaseHandler",
        "from ts import context",
        "import importlib",
        "import pickle",
        "torch = __import__('torch')",
        "exec(open('more').read())",
        "from . import other",
        "from .other import more",
        "# " + "x" * FILE_BYTES_MAX,
    ],
)
def test_torch_counts_as_needed_where_it_may_be(tmp_path: Path, source: str) -> None:
    assert needs(tmp_path, handler=source)


def test_modules_beside_the_handler_are_read_too(tmp_path: Path) -> None:
    assert not needs(tmp_path, handler="import one", one="from two import x", two="import handler, json")
    assert needs(tmp_path, two="import torch")
    (tmp_path / "json").mkdir()
    assert needs(tmp_path, two="import json"), "the model's own package of that name comes first"


def test_what_cannot_be_read_may_need_torch(tmp_path: Path) -> None:
    assert may_need_torch(tmp_path, "image_classifier")
    assert may_need_torch(tmp_path / "model", "../handler.py")
    (tmp_path / "handler.py").write_bytes(b"\xff\xfe")
    assert may_need_torch(tmp_path, "handler")
    for number in range(FILES_MAX + 1):
        (tmp_path / f"m{number}.py").write_text(f"import m{number + 1}")
    assert may_need_torch(tmp_path, "m0")


def test_a_module_is_read_where_it_lies_and_judged_by_its_name_where_it_is_installed(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    folders = (tmp_path, tmp_path / "store")
    (tmp_path / "store" / "runtimes.py").write_text("import mlserver, numpy")
    assert not module_may_need_torch("runtimes", folders)
    assert not module_may_need_torch("mlserver_sklearn", folders)
    assert module_may_need_torch("mlserver_huggingface", folders)
    (tmp_path / "mlserver_sklearn").mkdir()
    assert module_may_need_torch("mlserver_sklearn", folders), "the model's own package of that name comes first"
    (tmp_path / "store" / "runtimes.py").write_text("import torch")
    assert module_may_need_torch("runtimes", folders)


MODULES = (
    "torch",
    "torchvision",
    "json",
    "os.path",
    "numpy",
    "ts.context",
    "ts.torch_handler",
    "local",
    "unknown.more",
)
LINES = some.one_of(
    some.builds("import {}".format, some.sampled_from(MODULES)),
    some.builds("import {} as x, {}".format, some.sampled_from(MODULES), some.sampled_from(MODULES)),
    some.builds("from {} import x".format, some.sampled_from(MODULES)),
    some.builds("from {} import (x,\n    y)".format, some.sampled_from(MODULES)),
    some.builds("def f(): import {}".format, some.sampled_from(MODULES)),
    some.builds("if x:\n    pass; from {} import \\\n  x".format, some.sampled_from(MODULES)),
    some.sampled_from(["x = 'import'", '"""import this\nfrom that import it"""', "# import torch", "x = {1: 2}"]),
)


@given(lines=some.lists(LINES, max_size=5))
def test_python_finds_nothing_that_this_does_not(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    """The syntax tree names the imports of the source: if torch counts as not needed, all of them are known."""
    source = "\n".join(lines)
    found = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    directory = tmp_path_factory.mktemp("model")
    (directory / "local.py").write_text("")
    if not needs(directory, handler=source):
        assert found <= {"json", "os.path", "numpy", "ts.context", "local"}


@pytest.mark.long
def test_modules_that_count_as_without_torch_are() -> None:
    """Looked for by the program itself: other tests' paths don't count there."""
    program = (
        "import importlib.util, json, sys\n"
        f"there = [name for name in {sorted(WITHOUT_TORCH)} if importlib.util.find_spec(name)]\n"
        "for name in there: importlib.import_module(name)\n"
        "print(json.dumps([there, 'torch' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    there, has_torch = json.loads(done.stdout)
    assert {"numpy", "ts.context", "ts.metrics"} <= set(there) and not has_torch
