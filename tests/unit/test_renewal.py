"""New source of a loaded handler: the results of its load that stay, and its new code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ts.runtime.renewal import Loading, renew

HANDLER = '''
"""A handler."""
import json
from renewal_parts import Net, SIZE

FACTOR = 2
LABEL = "a"
LOADED = []

class Base:
    def greet(self):
        return "base"

class Handler(Base):
    kind = "plain"

    def __init__(self):
        self.loads = 0

    def initialize(self, context):
        """Loads."""
        self.net = Net(SIZE)
        self.hook = self.post
        self.loads += 1
        LOADED.append(self.helper())

    def helper(self):
        return FACTOR

    def post(self, value):
        return value + 1

    def greet(self):
        return super().greet() + " old"

    def handle(self, data):
        return self.hook(self.net.forward(data)), LABEL, list(LOADED), self.greet()
'''
PARTS = """
SIZE = 3
UNUSED = 1

class Net:
    def __init__(self, size):
        self.weights = list(range(size))

    def forward(self, value):
        return value * len(self.weights)
"""


class Loaded:
    """A handler that was loaded from two files, and its present files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write(HANDLER, PARTS)
        loading = self.loading = Loading(str(folder))
        with loading.noted():
            self.module = importlib.import_module("renewal_handler")
            self.handler: Any = self.module.Handler()
            self.handler.initialize(None)

    def write(self, handler: str = HANDLER, parts: str = PARTS) -> None:
        (self.folder / "renewal_handler.py").write_text(handler)
        (self.folder / "renewal_parts.py").write_text(parts)

    def edit(self, old: str, new: str, where: str = "handler") -> None:
        """Replaces a text in one of the files, as they were loaded."""
        texts = {"handler": HANDLER, "parts": PARTS}
        assert old in texts[where]
        self.write(**{**texts, where: texts[where].replace(old, new)})


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loaded]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield Loaded(tmp_path)
    for name in ("renewal_handler", "renewal_parts"):
        sys.modules.pop(name, None)


def test_what_is_loaded_counts_as_long_as_nothing_changes(loaded: Loaded) -> None:
    assert loaded.loading.refusal() == ""
    assert not renew(loaded.loading)
    assert loaded.handler.handle(2) == (7, "a", [2], "base old")


@pytest.mark.parametrize(
    ("old", "new", "where", "answer"),
    [
        ("return value + 1", "return value + 2", "handler", (8, "a", [2], "base old")),
        ('LABEL = "a"', 'LABEL = "b"', "handler", (7, "b", [2], "base old")),
        ('" old"', '" new"', "handler", (7, "a", [2], "base new")),
        ('return "base"', 'return "root"', "handler", (7, "a", [2], "root old")),
        ("value * len", "-value * len", "parts", (-5, "a", [2], "base old")),
        ("UNUSED = 1", "UNUSED = 2", "parts", (7, "a", [2], "base old")),
        ('"""Loads."""', '"""Loads all."""  # really', "handler", (7, "a", [2], "base old")),
        ("import json", "import json, math\n\ndef new():\n    return 1\n", "handler", (7, "a", [2], "base old")),
        ("return self.hook(", "return self.more() + self.hook(", "handler", AttributeError),
        (
            "    def handle(self, data):",
            "    @staticmethod\n    def more():\n        return 1\n\n    def handle(self, data):\n        self.more()",
            "handler",
            (7, "a", [2], "base old"),
        ),
    ],
)
def test_code_that_does_not_load_is_renewed_in_place(
    loaded: Loaded, old: str, new: str, where: str, answer: Any
) -> None:
    loaded.edit(old, new, where)
    assert loaded.loading.refusal() == ""
    net = loaded.handler.net
    assert renew(loaded.loading)
    if isinstance(answer, type):
        with pytest.raises(answer):
            loaded.handler.handle(2)
    else:
        assert loaded.handler.handle(2) == answer
    assert loaded.handler.net is net and loaded.handler.loads == 1
    assert type(loaded.handler) is loaded.module.Handler


@pytest.mark.parametrize(
    ("old", "new", "where", "words"),
    [
        ("self.net = Net(SIZE)", "self.net = Net(SIZE + 1)", "handler", "Handler.initialize in renewal_handler.py"),
        ("return FACTOR", "return FACTOR + 1", "handler", "Handler.helper in renewal_handler.py"),
        ("FACTOR = 2", "FACTOR = 3", "handler", "FACTOR in renewal_handler.py"),
        ("SIZE = 3", "SIZE = 4", "parts", "SIZE in renewal_parts.py"),
        ("list(range(size))", "[0] * size", "parts", "Net.__init__ in renewal_parts.py"),
        ('kind = "plain"', 'kind = "fancy"', "handler", "class Handler in renewal_handler.py"),
        ("class Handler(Base)", "class Handler", "handler", "class Handler in renewal_handler.py"),
        ("import json", "import json\nprint('hello')", "handler", "a statement at the top of renewal_handler.py"),
        ("    def helper(self):", "    def help(self):", "handler", "has lost helper"),
        ("class Net:", "class Net:\n    def __new__(cls, size): ...", "parts", "has got __new__"),
    ],
)
def test_code_that_loads_has_the_model_loaded_again(loaded: Loaded, old: str, new: str, where: str, words: str) -> None:
    loaded.edit(old, new, where)
    assert words in loaded.loading.refusal()


def test_a_file_that_cannot_be_parsed_keeps_what_is_loaded_and_fails_its_import(loaded: Loaded) -> None:
    loaded.edit("def handle(self, data):", "def handle(self, data:")
    assert loaded.loading.refusal() == ""
    with pytest.raises(SyntaxError, match=r"renewal_handler\.py"):
        renew(loaded.loading)


def test_a_method_that_overrides_one_that_loads_has_the_model_loaded_again(loaded: Loaded) -> None:
    loaded.loading.names.add("_load_weights")
    loaded.edit("    def handle(self, data):", "    def _load_weights(self): ...\n\n    def handle(self, data):")
    assert "has got _load_weights" in loaded.loading.refusal()


def test_a_file_that_was_saved_during_the_load_has_the_model_loaded_again(tmp_path: Path, loaded: Loaded) -> None:
    loading = Loading(str(tmp_path))
    with loading.noted():
        loaded.edit("value + 1", "value + 5")
    assert loading.refusal() == "renewal_handler.py was saved while the model was loaded"
