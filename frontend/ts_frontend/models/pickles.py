"""Files of Python objects: pickled modules of torch, scikit-learn's models. Loading one runs any code, so that only a
handler may do it. They are recognised by the names in their opcodes, and nothing of them is loaded."""

from __future__ import annotations

import io
import pickletools
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
