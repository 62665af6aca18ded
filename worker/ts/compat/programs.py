"""Runs a user's program as `__main__`, in a worker or for `python -m ts.compat.run`."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from ts.compat.start import BESIDE, MARK, STAND_IN


def run(
    file: str,
    module: str,
    argv: Sequence[str],
    *,
    in_worker: bool = False,
    stand_in: bool = False,
    beside: Sequence[str] = (),
) -> None:
    """Runs the program in `file`, which is `module` when it was started by name. What it raises passes through."""
    main = _made(file, module)
    setattr(main, MARK, in_worker)
    setattr(main, STAND_IN, stand_in)
    setattr(main, BESIDE, beside)
    sys.argv = [file, *argv]
    sys.modules["__main__"] = main
    loader = main.__loader__
    assert isinstance(loader, importlib.machinery.SourceFileLoader)
    loader.exec_module(main)


def _made(file: str, module: str) -> ModuleType:
    """The module `__main__`, not yet run. Relative imports of one started by name work."""
    loader = importlib.machinery.SourceFileLoader("__main__", file)
    spec = importlib.util.spec_from_file_location("__main__", file, loader=loader)
    assert spec is not None
    main = importlib.util.module_from_spec(spec)
    parts = module.rpartition(".")
    main.__package__ = parts[0] if module else ""
    if not module and os.path.dirname(file) not in sys.path:
        sys.path.insert(0, os.path.dirname(file))
    return main
