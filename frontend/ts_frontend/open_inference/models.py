"""What the services of the Open Inference Protocol ask of the served models, whatever their transport."""

from __future__ import annotations

from typing import NamedTuple

from ts_frontend.errors import Code, HandlerFailed, ModelNotFound, ModelVersionNotFound
from ts_frontend.models.model import Model
from ts_frontend.models.registry import Registry
from ts_frontend.open_inference.shared_memory import Regions

#: Clients of MAX ask for version 0 and mean whichever is served.
ANY_VERSION = "0"
EXTENSIONS = (
    *("classification", "sequence", "sequence(string_id)", "model_repository", "model_repository(unload_dependents)"),
    *("model_configuration", "binary_tensor_data", "parameters", "statistics", "trace", "logging", "generate"),
)
#: What these statuses of a handler are in this protocol; TorchServe's mapping has ABORTED and INTERNAL.
_CODES = {409: Code.ALREADY_EXISTS, 520: Code.UNKNOWN}


def coded(error: HandlerFailed) -> HandlerFailed:
    """The error with this protocol's code."""
    error.code = _CODES.get(error.http_status, error.code)
    return error


class About(NamedTuple):
    """What the server says of itself."""

    name: str
    version: str


def extensions(regions: Regions) -> list[str]:
    """Of the protocol, as the server's metadata lists them."""
    return [*EXTENSIONS, *(("system_shared_memory",) if regions.allowed else ())]


def find(models: Registry, name: str, version: str) -> Model:
    """The model version that a client means. Raises ModelNotFound, ModelVersionNotFound."""
    if version != ANY_VERSION:
        return models.find(name, version or None)
    try:
        return models.find(name, version)
    except ModelVersionNotFound:
        return models.find(name)


def is_ready(models: Registry, name: str, version: str) -> bool:
    """False for what isn't there, too."""
    try:
        return find(models, name, version).ready
    except (ModelNotFound, ModelVersionNotFound):
        return False
