"""Access to the served models for the services of the Open Inference Protocol, over every transport."""

from __future__ import annotations

from typing import NamedTuple

from ts_frontend.errors import Code, HandlerFailed, ModelNotFound, ModelVersionNotFound
from ts_frontend.models.model import Model
from ts_frontend.models.registry import Registry
from ts_frontend.open_inference.shared_memory import Regions

#: Clients of MAX send version 0 for the served one.
ANY_VERSION = "0"
EXTENSIONS = (
    *("classification", "sequence", "sequence(string_id)", "model_repository", "model_repository(unload_dependents)"),
    *("model_configuration", "binary_tensor_data", "parameters", "statistics", "trace", "logging", "generate"),
)
#: gRPC codes by a handler's HTTP status in this protocol; TorchServe's are ABORTED and INTERNAL.
_CODES = {409: Code.ALREADY_EXISTS, 520: Code.UNKNOWN}


def coded(error: HandlerFailed) -> HandlerFailed:
    """Returns the error with this protocol's code."""
    error.code = _CODES.get(error.http_status, error.code)
    return error


class About(NamedTuple):
    """The server's metadata."""

    name: str
    version: str


def extensions(regions: Regions) -> list[str]:
    """Returns the protocol's extensions that the server's metadata lists."""
    return [*EXTENSIONS, *(("system_shared_memory",) if regions.allowed else ())]


def find(models: Registry, name: str, version: str) -> Model:
    """Returns the model version for a client's name and version. Raises ModelNotFound, ModelVersionNotFound."""
    if version != ANY_VERSION:
        return models.find(name, version or None)
    try:
        return models.find(name, version)
    except ModelVersionNotFound:
        return models.find(name)


def is_ready(models: Registry, name: str, version: str) -> bool:
    """Returns whether a model is ready; False for an unknown model."""
    try:
        return find(models, name, version).ready
    except (ModelNotFound, ModelVersionNotFound):
        return False
