"""How a program that makes its own server (aiSSEMBLE's `start_server`, KServe's `ModelServer.start`) comes to this one.

The process that the user started becomes the server: it is replaced by the frontend, which gets the program's file and
arguments. Each worker runs the program again, up to the same call, and serves the objects that the program made: no
object is sent from one process to another, so that any handler will do (docs/aissemble.md).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

#: In the namespace of a program that a worker runs: it is to hand over what it serves.
MARK = "__torchrelay_worker__"
#: The same of one that `ts.compat.run` runs: this server's packages stand in for installed ones.
STAND_IN = "__torchrelay_stand_in__"
#: And what it was told to serve beside the program, as words of a command line.
BESIDE = "__torchrelay_beside__"
_CODE = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "from ts_frontend.{module} import main; sys.exit(main()) # torchserve"
)


class Reached(BaseException):
    """A program run by a worker came to its server's start: `models` by name are what it serves, and `kind` (an
    adapter) knows how to call them. No Exception, so that the program doesn't take it for a failure."""

    def __init__(self, kind: str, models: Mapping[str, Any]) -> None:
        super().__init__("the program started its server")
        self.kind, self.models = kind, models


class NoProgram(RuntimeError):
    """The server can't be started from here; the message says why."""


def serve(kind: str, models: Mapping[str, Any], options: Mapping[str, Any]) -> NoReturn:
    """Serves `models`, which `kind` (an adapter) knows how to call. `options` were given in the program; they are by
    name in KServe's list, and the command line's are stronger.

    This process becomes the server: nothing after the call runs. Raises NoProgram where there is no program to run
    again.
    """
    main = sys.modules["__main__"]
    if getattr(main, MARK, False):
        raise Reached(kind, models)
    told = {
        "kind": kind,
        "models": list(models),
        "options": dict(options),
        "program": _file_of(main),
        "module": _module_of(main),
        "argv": sys.argv[1:],
        "beside": list(getattr(main, BESIDE, ())),
        "path": [os.path.abspath(one) for one in sys.path if one],
        "directory": os.getcwd(),
        "stand_in": bool(getattr(main, STAND_IN, False)),
    }
    _become("cli.program", json.dumps(told), *sys.argv[1:])


def torchserve(*words: str) -> NoReturn:
    """This process becomes the command `torchserve` with these words."""
    _become("cli.main", *words)


def _become(module: str, *words: str) -> NoReturn:
    _flush()
    os.execv(sys.executable, [sys.executable, "-c", _CODE.format(module=module), *words])


def _file_of(main: ModuleType) -> str:
    file: str | None = getattr(main, "__file__", None)
    if not file or not os.path.isfile(file):
        raise NoProgram(
            "the server's workers run the program again, and there is no file to run: put it into one, instead of "
            "python -c, standard input or a notebook"
        )
    return os.path.abspath(file)


def _module_of(main: ModuleType) -> str:
    """The module's name when it was started with `python -m`, "" for a file."""
    spec = getattr(main, "__spec__", None)
    name = "__main__" if spec is None else str(spec.name)
    return "" if name == "__main__" else name


def _flush() -> None:
    streams: Sequence[Any] = (sys.stdout, sys.stderr)
    for stream in streams:
        if stream is not None:
            stream.flush()
