"""A program that starts a server of aiSSEMBLE's or KServe's, as an archive: what it serves is known when it is run.
Blocking."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ts_frontend.models.formats import mlserver as mlserver_model

#: What makes a folder a program, when it has neither a manifest nor a model-settings.json.
FILE = "main.py"
SUFFIX = ".py"
ADAPTER = "program"
_TEXT_BYTES_MAX = 1 << 20
_STARTS_A_SERVER = re.compile(rb"^\s*(from|import)\s+(kserve|aissemble_open_inference_protocol_kserve)\b", re.MULTILINE)


_MANIFEST = Path("MAR-INF", "MANIFEST.json")


def is_program(path: Path) -> bool:
    """Whether that is one: a file of Python, or a folder with one and nothing that says otherwise."""
    if path.is_dir():
        return is_one(path) and not (path / _MANIFEST).exists() and not mlserver_model.is_one(path)
    return path.suffix == SUFFIX and path.is_file()


def is_one(directory: Path) -> bool:
    """Whether it has a main.py that imports one of their servers."""
    try:
        with (directory / FILE).open("rb") as file:
            return _STARTS_A_SERVER.search(file.read(_TEXT_BYTES_MAX)) is not None
    except OSError:
        return False


def described(program: Path, argv: Sequence[str] = (), directory: Path | None = None) -> dict[str, Any]:
    """The fields of an `Archive`, but for `dir` and `owned`; it has no name: the program knows. `directory`: where it
    is run, its own without one."""
    folder = program.parent
    settings = {
        "program": str(program),
        "module": "",
        "argv": list(argv),
        "path": [str(folder)],
        "directory": str(directory or folder),
        "stand_in": True,
    }
    return {
        "manifest": {"runtime": "python", "model": {"handler": program.name}},
        "handler": program.name,
        "requirements_file": "requirements.txt" if (folder / "requirements.txt").is_file() else None,
        "adapter": ADAPTER,
        "adapter_settings": settings,
    }
