"""The imports of a handler, read from its source, to decide whether its workers are forked with torch loaded, and
whether it is a program that starts a server.

A wrong guess only costs time: a worker forked without torch imports it when its handler does. Torch is assumed to be
needed unless every import of the handler is known to work without it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from ts_frontend.config.files import read_text

FILES_MAX = 16
FILE_BYTES_MAX = 128 * 1024

_IMPORT = re.compile(
    r"(?:^|[;:])[ \t]*(?:import[ \t]+(?P<names>[^#;\n]*)|from[ \t]+(?P<module>[\w.]+)[ \t]*(?:import\b|\\))",
    re.MULTILINE,
)
_NAME = re.compile(r"\s*(\w+(?:\.\w+)*)(?:\s+as\s+\w+)?\s*")
_STARTS_A_SERVER = re.compile(rb"^\s*(from|import)\s+(kserve|aissemble_open_inference_protocol_kserve)\b", re.MULTILINE)
_SERVER_BYTES_MAX = 1 << 20
#: Calls that import modules by a computed name.
_HIDDEN = re.compile(r"\b(?:__import__|import_module|exec|eval)\b")
_HIDDEN_IN = frozenset({"importlib", "pickle", "pkgutil", "runpy", "shelve", "zipimport"})
#: Modules of others that import no torch, and of ours.
WITHOUT_TORCH = frozenset(
    {
        *("PIL", "cv2", "google", "grpc", "lightgbm", "msgspec", "numpy", "onnxruntime", "orjson", "pandas", "psutil"),
        *("requests", "scipy", "sklearn", "xgboost", "yaml"),
        *("ts.context", "ts.metrics"),
        *("kserve", "aissemble_open_inference_protocol_kserve", "aissemble_open_inference_protocol_shared"),
        *("mlserver", "mlserver_lightgbm", "mlserver_sklearn", "mlserver_xgboost", "triton_python_backend_utils"),
    }
)


def starts_a_server(path: Path) -> bool:
    """Whether a Python file imports one of the servers whose programs are run."""
    try:
        with path.open("rb") as file:
            return _STARTS_A_SERVER.search(file.read(_SERVER_BYTES_MAX)) is not None
    except OSError:
        return False


def may_need_torch(directory: Path, handler: str) -> bool:
    """Whether the handler `[dir/]name[.py][:function]` of the model in `directory` may import torch. Blocking."""
    path = Path(handler.partition(":")[0])
    if ".." in path.parts:
        return True
    return _may_need_torch(path.name.removesuffix(".py"), dict.fromkeys((directory, directory / path.parent)))


def module_may_need_torch(name: str, folders: Collection[Path]) -> bool:
    """The same for the module `package.module`, which may lie in these folders or be installed. Blocking.

    os.path's functions say no to a name that no file can have; pathlib's raise OSError."""
    if any(os.path.isfile(folder / f"{name}.py") for folder in folders):
        return _may_need_torch(name, folders)
    return any(os.path.isdir(folder / name.partition(".")[0]) for folder in folders) or not _without_torch(name)


def _may_need_torch(name: str, folders: Collection[Path]) -> bool:
    pending, seen = [name], set[str]()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        file = next((found for folder in folders if os.path.isfile(found := folder / f"{name}.py")), None)
        text = _source(file) if file is not None and len(seen) <= FILES_MAX else None
        if text is None or _HIDDEN.search(text):
            return True
        for module in _imported(text):
            first = module.partition(".")[0]
            if any(os.path.isfile(folder / f"{first}.py") for folder in folders):
                pending.append(first)
            elif not _without_torch(module) or any(os.path.isdir(folder / first) for folder in folders):
                return True
    return False


def _source(file: Path) -> str | None:
    try:
        return read_text(file, FILE_BYTES_MAX)
    except (OSError, UnicodeDecodeError):
        return None


def _imported(text: str) -> Iterator[str]:
    """The modules that are imported anywhere in a source; "" for a name that is computed."""
    for found in _IMPORT.finditer(text):
        if found["module"] is not None:
            yield found["module"]
        else:
            for part in found["names"].split(","):
                name = _NAME.fullmatch(part)
                yield name[1] if name is not None else ""


def _without_torch(module: str) -> bool:
    first, *rest = module.split(".")
    if first in _HIDDEN_IN:
        return False
    return first in sys.stdlib_module_names or bool({first, f"{first}.{rest[0]}" if rest else ""} & WITHOUT_TORCH)
