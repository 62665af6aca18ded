"""Every handler in docs/handlers.md, run in a real worker."""

from __future__ import annotations

import re

import pytest

from ts.protocol.frames import Input


@pytest.fixture
def documented(root, tmp_path, start_worker):
    """Starts a worker with the n-th Python block of the page."""
    blocks = re.findall(r"```python\n(.*?)```", (root / "docs" / "handlers.md").read_text(), re.DOTALL)
    assert len(blocks) == 3, "a new example needs its test here"

    def start(number):
        (tmp_path / "documented.py").write_text(blocks[number])
        return start_worker("documented.py", model_dir=str(tmp_path), batch_size=2)

    return start


def test_a_class(documented):
    assert documented(0).ask([Input("name", "", b"Ada")]) == b"hello Ada"


def test_streaming(documented):
    assert documented(1).ask(b"x", b"y") == [b"hello big world"] * 2


def test_a_generator(documented):
    assert documented(2).ask(b"1", b"2") == [b"0 counted to 1", b"0 1 counted to 2"]
