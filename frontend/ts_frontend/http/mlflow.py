"""MLflow's paths beside /invocations and /ping: /health and /version (docs/platforms.md)."""

from __future__ import annotations

from importlib import metadata

import ts.version
from ts_frontend.http.request import JSON, HttpAnswer, HttpRequest

#: The packages that have MLflow's version, whole and without the parts for training.
_PACKAGES = ("mlflow", "mlflow-skinny")


class HttpMLflow:
    """The version that MLflow's clients ask for: that of the package mlflow, or the server's own without one."""

    def __init__(self) -> None:
        self._version = next(filter(None, map(_installed, _PACKAGES)), ts.version.__version__)

    async def version(self, request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(200, (JSON,), self._version.encode())


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
