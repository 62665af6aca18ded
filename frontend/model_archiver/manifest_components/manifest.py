"""The whole of MAR-INF/MANIFEST.json."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any

from model_archiver.manifest_components.model import Model
from model_archiver.packing import Stamp
from ts.version import __version__


class RuntimeType(Enum):
    """The runtime of the handler."""

    PYTHON = "python"
    PYTHON3 = "python3"
    LSP = "LSP"


class Manifest:
    """`str()` of it is the file. ValueError for a runtime that isn't one. `stamp`: None for now."""

    def __init__(self, runtime: str | RuntimeType, model: Model, stamp: Stamp | None = None) -> None:
        self.creation_time = str(stamp or Stamp.now())
        self.runtime = RuntimeType(runtime)
        self.model = model
        self.archiver_version = __version__
        self.manifest_dict = self.__to_dict__()

    def __to_dict__(self) -> dict[str, Any]:
        return {
            "createdOn": self.creation_time,
            "runtime": self.runtime.value,
            "model": self.model.__to_dict__(),
            "archiverVersion": self.archiver_version,
        }

    def __str__(self) -> str:
        return json.dumps(self.manifest_dict, indent=2)

    __repr__ = __str__
