"""The names under which pages and programs of other systems import the stubs, for whom the real ones don't exist:

- `grpc_kserve.grpc_predict_v2_pb2`, `…_pb2_grpc` (MAX)
- `dynamo_grpc.inference_pb2`, `…_pb2_grpc` (Dynamo)
- `grpc_predict_v2_pb2`, `grpc_predict_v2_pb2_grpc`

`offer()` makes them importable, last of all: a module of that name that can be found otherwise is taken instead.
`python -m torchrelay_client.names PROGRAM.py ARGUMENTS` runs an unchanged program so.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

MESSAGES, STUB = "torchrelay_client.grpc_predict_v2_pb2", "torchrelay_client.grpc_predict_v2_pb2_grpc"
#: Name -> the module that it is; "" for a package that only holds others.
NAMES = {
    "grpc_predict_v2_pb2": MESSAGES,
    "grpc_predict_v2_pb2_grpc": STUB,
    "grpc_kserve": "",
    "grpc_kserve.grpc_predict_v2_pb2": MESSAGES,
    "grpc_kserve.grpc_predict_v2_pb2_grpc": STUB,
    "dynamo_grpc": "",
    "dynamo_grpc.inference_pb2": MESSAGES,
    "dynamo_grpc.inference_pb2_grpc": "torchrelay_client.streaming_stub",
}


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds only the modules in NAMES."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in NAMES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=not NAMES[fullname])

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        source = NAMES[module.__name__]
        if source:
            found = importlib.import_module(source)
            public = {name: value for name, value in vars(found).items() if not name.startswith("_")}
            module.__dict__.update(public, __doc__=found.__doc__)


def offer() -> None:
    """Makes the names importable in this process unless other modules have them; a second call does nothing."""
    if not any(isinstance(finder, StandIns) for finder in sys.meta_path):
        sys.meta_path.append(StandIns())


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: python -m torchrelay_client.names PROGRAM.py [ARGUMENTS...]")
    program = sys.argv[1]
    if not Path(program).exists():
        sys.exit(f"there is no program {program}")
    offer()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(program).resolve().parent)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
