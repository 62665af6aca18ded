"""KServe's command line, and its server."""

from typing import Any

from ts.compat.kserve_api import model_server
from ts.compat.kserve_api.arguments import parser
from ts.compat.kserve_api.model_server import ModelServer

__all__ = ["ModelServer", "parser"]


def __getattr__(name: str) -> Any:
    return getattr(model_server, name)
