"""The bytecode of the package `ts` for nodes. Without it, the first worker of a node compiles the modules, and every
worker does so where Python writes no bytecode, as in most container images."""

from __future__ import annotations

import importlib.util
import marshal
import sys
from pathlib import Path

#: The folders with the modules that every worker imports.
PARTS = ("", "protocol", "runtime", "utils")
#: PEP 552: Python compares the bytecode with a hash of its source, not with the source's time.
CHECKED_HASH = (0b11).to_bytes(4, "little")


def compiled(root: Path, below: str) -> dict[str, bytes]:
    """The bytecode files of the modules in `root`, by their names in a package whose names of the folder's files begin
    with `below`. Raises OSError, SyntaxError."""
    found = {}
    for part in PARTS:
        for path in sorted((root / part).glob("*.py")):
            source = path.read_bytes()
            code = compile(source, str(path), "exec", dont_inherit=True, optimize=0)
            head = importlib.util.MAGIC_NUMBER + CHECKED_HASH + importlib.util.source_hash(source)
            folder = f"{below}{part}/__pycache__" if part else f"{below}__pycache__"
            found[f"{folder}/{path.stem}.{sys.implementation.cache_tag}.pyc"] = head + marshal.dumps(code)
    return found
