"""The code of docs/client.md runs against a server, block by block, with only the address changed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/client.md").read_text(), re.DOTALL)
#: What each prints; None: it needs files that are not there, and says which.
PRINTED = (
    "[4. 6.]\nHELLO\nb'HELLO'\n",
    "['TEXT 0', 'TEXT 1', 'TEXT 2']\none \ntwo \n",
    "one \ntwo \n1 {'output': array([b'FIRST'], dtype=object)}\n"
    "2 Model not found: nobody. Models here: endless, same, sum, upper, words.\n",
    "HELLO\n",
    None,
    "True\n",
)


def test_there_are_as_many() -> None:
    assert len(BLOCKS) == len(PRINTED)


@pytest.mark.parametrize("number", range(len(PRINTED)))
def test_block(served: Any, tmp_path: Path, number: int) -> None:
    code = BLOCKS[number].replace("localhost:7070", served.inference)
    env = {**os.environ, "PYTHONWARNINGS": "error"}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    if PRINTED[number] is None:
        assert "No such file or directory: 'ca.crt'" in done.stderr
    else:
        assert (done.stdout, done.stderr) == (PRINTED[number], "")
