"""What the doors of the Open Inference Protocol ask of the served models, whatever their transport."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from ts.protocol.frames import Input, Pairs
from ts_frontend.errors import Code, HandlerFailed, ModelNotFound, ModelVersionNotFound
from ts_frontend.models.signature import Signature
from ts_frontend.models.statistics import Statistics
from ts_frontend.services import served
from ts_frontend.services.served import Answer

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


class Stream(Answer, Protocol):
    """One that takes further requests (`ts_frontend.fed_job.FedJob`)."""

    async def feed(self, inputs: Sequence[Input], last: bool = False) -> None: ...


class ModelRoute(Protocol):
    """An HTTP path of a model's own (`ts_frontend.models.model.Route`)."""

    @property
    def method(self) -> str: ...
    def fits(self, path: str) -> bool: ...


class Served(served.Served, Protocol):
    """One that may take tensors."""

    version: str

    @property
    def stateful(self) -> bool: ...
    @property
    def ranked(self) -> bool: ...
    @property
    def ready(self) -> bool: ...
    @property
    def signature(self) -> Signature: ...
    @property
    def adapter(self) -> str: ...
    @property
    def streams(self) -> bool: ...
    @property
    def takes_streams(self) -> bool: ...
    @property
    def takes_tensors(self) -> bool: ...
    @property
    def routes(self) -> Sequence[ModelRoute]: ...
    def open_stream(
        self, inputs: Sequence[Input], *, headers: Pairs, deadline_s: float, request_id: str, version_named: bool
    ) -> Stream: ...
    @property
    def statistics(self) -> Statistics: ...
    def triton_config(self) -> dict[str, Any]: ...


class Models(Protocol):
    """Where models are found by name (`ts_frontend.models.registry.Registry`)."""

    def find(self, name: str, version: str | None = None) -> Served: ...
    def versions(self, name: str) -> Sequence[Served]: ...
    def defaults(self) -> Sequence[Served]: ...
    def __iter__(self) -> Iterator[Served]: ...


class Regions(Protocol):
    """Where clients may have their tensors (`ts_frontend.services.shared_memory.Regions`)."""

    @property
    def allowed(self) -> bool: ...
    def option(self, data: bytes) -> str: ...


class Health(Protocol):
    """Whether the server can serve (`ts_frontend.health.Health`)."""

    @property
    def ready(self) -> bool: ...


def extensions(regions: Regions) -> list[str]:
    """Of the protocol, as the server's metadata lists them."""
    return [*EXTENSIONS, *(("system_shared_memory",) if regions.allowed else ())]


def find(models: Models, name: str, version: str) -> Served:
    """The model version that a client means. Raises ModelNotFound, ModelVersionNotFound."""
    if version != ANY_VERSION:
        return models.find(name, version or None)
    try:
        return models.find(name, version)
    except ModelVersionNotFound:
        return models.find(name)


def is_ready(models: Models, name: str, version: str) -> bool:
    """False for what isn't there, too."""
    try:
        return find(models, name, version).ready
    except (ModelNotFound, ModelVersionNotFound):
        return False
