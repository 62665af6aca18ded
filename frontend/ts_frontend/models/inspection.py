"""What a model's files say without being run: the imports of a handler, read from its source, to decide whether its
workers are forked with torch loaded, and whether it is a program that starts a server; and files of Python objects
(pickled modules of torch, scikit-learn's models), which are recognised by the names in their opcodes. Loading those
runs any code, so that only a handler may do it.

A wrong guess about torch only costs time: a worker forked without torch imports it when its handler does. Torch is
assumed to be needed unless every import of the handler is known to work without it.
"""

from __future__ import annotations

import io
import os
import pickletools
import re
import sys
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

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


SUFFIXES = (".joblib", ".pkl", ".pickle")
_READ_BYTES = 1 << 20
_OPCODES_MAX = 100_000
#: A file of torch's old form is several pickles.
_PICKLES_MAX = 5
_NAME_CHARS_MAX = 200
#: A file of TorchScript has this entry.
_SCRIPT = "/constants.pkl"
#: The packages of what is beside the model in such a file.
_PLAIN = ("torch", "collections", "numpy", "builtins", "_codecs", "joblib", "copyreg", "argparse")
_LINES = """a pickled {what}: loading it runs any code, so that only a handler may do it. Put this {file} next to it:

import {package}
model = {loaded}
def handle(data, context):
    return data and [{answer} for row in data]

and try it with `torchserve dev FOLDER`, or pack both: torch-model-archiver --handler {file} --serialized-file {name}"""
_BODY = 'row.get("data") or row.get("body")'
_SCRIPTS = """a pickled {what}, whose class was defined in a script (__main__), where no server finds it. Save \
model.state_dict() instead, and put the class into a model.py next to it"""


def how_to_serve(path: Path) -> str:
    """What a file of Python objects is and the handler that serves it, "" for a file of weights. Blocking."""
    names = list(_names(path))
    kind = next((name for name in names if name.split(".")[0] not in _PLAIN or name.startswith("torch.nn.")), "")
    of_torch = any(name.startswith("torch.nn.") or name.endswith("._rebuild_parameter") for name in names)
    if not of_torch and path.suffix not in SUFFIXES:
        return ""
    what = ascii(kind[:_NAME_CHARS_MAX]) if kind else "object"
    if kind.startswith("__main__."):
        return _SCRIPTS.format(what=what)
    package, answer = "joblib", f"model.predict({_BODY}).tolist()"
    loaded = f"joblib.load({path.name!r})"
    if of_torch:
        package, answer = "torch", f"model(torch.tensor({_BODY}, dtype=torch.float)).tolist()"
        loaded = f"torch.load({path.name!r}, weights_only=False).eval()"
    file = "handler.py"
    return _LINES.format(what=what, file=file, name=path.name, package=package, loaded=loaded, answer=answer)


def _names(path: Path) -> Iterator[str]:
    """The names of classes and functions in a file, in its order, as far as it can be read."""
    stream = io.BytesIO(_head(path))
    try:
        for _ in range(_PICKLES_MAX):
            yield from _of_pickle(stream)
    except (ValueError, IndexError, KeyError, UnicodeDecodeError):  # no pickle, or raw data between its opcodes
        return


def _of_pickle(stream: io.BytesIO) -> Iterator[str]:
    texts: list[str] = []
    memo: dict[Any, str] = {}
    last, stored = "", 0
    for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
        if count > _OPCODES_MAX:
            return
        if opcode.name == "GLOBAL":
            yield str(argument).replace(" ", ".")
        elif opcode.name == "STACK_GLOBAL":
            yield ".".join(texts[-2:])
        elif "UNICODE" in opcode.name:
            texts.append(str(argument))
        elif opcode.name in ("BINGET", "LONG_BINGET"):
            texts.append(memo.get(argument, ""))
        elif opcode.name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            memo[stored if argument is None else argument] = texts[-1] if "UNICODE" in last else ""
            stored += 1
        last = opcode.name


def _head(path: Path) -> bytes:
    """The beginning of the pickle in a file; b"" for TorchScript and for what can't be read."""
    try:
        if not zipfile.is_zipfile(path):
            with path.open("rb") as file:
                return file.read(_READ_BYTES)
        with zipfile.ZipFile(path) as package:
            names = package.namelist()
            found = [name for name in names if name.endswith("/data.pkl")]
            if not found or any(name.endswith(_SCRIPT) for name in names):
                return b""
            with package.open(found[0]) as file:
                return file.read(_READ_BYTES)
    except (OSError, ValueError, RuntimeError, NotImplementedError, zipfile.BadZipFile):
        return b""
