"""The start of this server by a program that starts its own: aiSSEMBLE's `start_server`, KServe's `ModelServer.start`,
and modules of other servers that are started by name.

The process that the user started becomes the server: it is replaced by the frontend, which gets the program's file and
arguments. Each worker runs the program again up to the same call, and serves the objects that the program made. No
object is sent between processes, so any handler works (docs/aissemble.md).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

#: The name in the namespace of a program that a worker runs: the program passes on its models instead of serving them.
MARK = "__torchrelay_worker__"
#: The same for a program that `ts.compat.run` runs: this server's packages replace installed ones.
STAND_IN = "__torchrelay_stand_in__"
#: The name, in the same namespace, of further models to serve, as words of a command line.
CO_SERVED = "__torchrelay_co_served__"
_CODE = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "from ts_frontend.{module} import main; sys.exit(main()) # torchserve"
)


class Reached(BaseException):
    """A program run by a worker has reached its server's start. `models`: its models by name; `kind`: their adapter.
    It is not an Exception, so that the program doesn't handle it as a failure."""

    def __init__(self, kind: str, models: Mapping[str, Any]) -> None:
        super().__init__("the program started its server")
        self.kind, self.models = kind, models


class NoProgram(RuntimeError):
    """The server can't be started from here; the message has the reason."""


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
        "co_served": list(getattr(main, CO_SERVED, ())),
        "path": [os.path.abspath(one) for one in sys.path if one],
        "directory": os.getcwd(),
        "stand_in": bool(getattr(main, STAND_IN, False)),
        "torch": "torch" in sys.modules,
    }
    _become("cli.program", json.dumps(told), *sys.argv[1:])


def torchserve(*words: str) -> NoReturn:
    _become("cli.main", *words)


def _become(module: str, *words: str) -> NoReturn:
    streams: Sequence[Any] = (sys.stdout, sys.stderr)
    for stream in streams:
        if stream is not None:
            stream.flush()
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
    """The module's name if it was started with `python -m`, "" for a file."""
    spec = getattr(main, "__spec__", None)
    name = "__main__" if spec is None else str(spec.name)
    return "" if name == "__main__" else name


# --- modules of other servers
#
# Dynamo's frontend is told its models by others, MAX's server has one; this one serves folders. Without an option about
# them it takes those that the page about Dynamo draws, and that KServe mounts.

#: Options that name the models to serve.
_SOURCES = {"--model-store", "--model-repository", "--model-dir", "--model", "--model-path", "--program"}
MOUNTED = Path("/mnt/models")
_START = ("--start", "--foreground")


def dynamo_words(argv: Sequence[str], directory: Path, mounted: Path = MOUNTED) -> list[str]:
    """The words of the `torchserve` command for `python -m dynamo.frontend`, with Dynamo's ports. `directory`: the
    working directory; `mounted`: KServe's folder of models."""
    given = _given(argv)
    profile = [] if "--profile" in given else ["--profile", "dynamo"]
    return [*_START, *profile, *([] if _SOURCES & given else _sources(directory, mounted)), *argv]


def max_words(argv: Sequence[str]) -> list[str]:
    """The words for `python -m max.serve.grpc_server`. `--model` implies MAX's profile."""
    named = {"--model", "--model-path", "--profile"} & _given(argv)
    return [*_START, *([] if named else ["--profile", "max"]), *argv]


def _given(argv: Sequence[str]) -> set[str]:
    return {word.partition("=")[0].replace("_", "-") for word in argv if word.startswith("--")}


def _sources(directory: Path, mounted: Path) -> list[str]:
    if (directory / "model_repository").is_dir():
        return ["--model-repository", "model_repository"]
    if (directory / "model_store").is_dir():
        return ["--model-store", "model_store", "--models", "all"]
    if not mounted.is_dir():
        return []
    if any(mounted.glob("*/config.pbtxt")):
        return ["--model-repository", str(mounted)]
    return ["--model-store", str(mounted), "--models", "all"]
