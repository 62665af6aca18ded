"""`import mlserver`, as far as inference runtimes need it (docs/mlserver.md). An installed mlserver comes before it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

if find_spec("pydantic") is None:
    raise ImportError("the types of MLServer's models need pydantic: pip install 'torchrelay[mlserver]'")

from . import errors
from .metrics import log, register
from .model import MLModel
from .settings import ModelParameters, ModelSettings, Settings

__version__ = "1.7.1"


class MLServer:
    """The server is the one that runs the model; another can't be started from inside it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("mlserver.MLServer needs the package mlserver: install it where this model runs")


__all__ = [
    "MLModel",
    "MLServer",
    "ModelParameters",
    "ModelSettings",
    "Settings",
    "__version__",
    "errors",
    "log",
    "register",
]
