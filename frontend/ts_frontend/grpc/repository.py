"""The Open Inference Protocol's repository methods over gRPC: index, load, unload, and a model's configuration.

KServe's clients put the model's name into the field that is the repository's name for Triton's. Both get the answer of
KServe, whose additional fields Triton's clients skip.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ts.protocol import open_inference_pb2 as pb
from ts_frontend.errors import InvalidArgument
from ts_frontend.grpc.call import Call, Method, Shape
from ts_frontend.grpc.open_inference import SERVICE, message
from ts_frontend.models.registry import Registry
from ts_frontend.models.repository import Repository
from ts_frontend.open_inference.heads import check_fields
from ts_frontend.open_inference.models import (
    LoadParameters,
    config_of,
    load_parameters,
    unloads_dependents,
)

#: MLServer's separate service with the same methods.
MLSERVER_SERVICE = "inference.model_repository.ModelRepositoryService"


class RepositoryService:
    """The repository's methods; `managing` are those that change the served models."""

    def __init__(self, repository: Repository, models: Registry) -> None:
        self._repository = repository
        self._models = models

    def methods(self) -> tuple[Method, ...]:
        index = tuple(
            Method(f"/{service}/RepositoryIndex", Shape.UNARY, self.index) for service in (SERVICE, MLSERVER_SERVICE)
        )
        return (*index, Method(f"/{SERVICE}/ModelConfig", Shape.UNARY, self.config))

    def managing(self) -> tuple[Method, ...]:
        return tuple(
            Method(f"/{service}/{name}", Shape.UNARY, run)
            for service in (SERVICE, MLSERVER_SERVICE)
            for name, run in (("RepositoryModelLoad", self.load), ("RepositoryModelUnload", self.unload))
        )

    async def index(self, call: Call, data: bytes) -> bytes:
        request = message(pb.RepositoryIndexRequest, data)
        found = [
            pb.RepositoryIndexResponse.ModelIndex(
                name=one.name, version=one.version, state=one.state, reason=one.reason
            )
            for one in await self._repository.index(request.ready)
        ]
        return pb.RepositoryIndexResponse(models=found).SerializeToString()

    async def config(self, call: Call, data: bytes) -> bytes:
        request = message(pb.ModelConfigRequest, data)
        found = config_of(self._models, request.name, request.version)
        return pb.ModelConfigResponse(config=found).SerializeToString()

    async def load(self, call: Call, data: bytes) -> bytes:
        name, parameters = await asyncio.to_thread(load_asked, data)
        await self._repository.load(name, *parameters)
        return pb.RepositoryModelLoadResponse(model_name=name, isLoaded=True).SerializeToString()

    async def unload(self, call: Call, data: bytes) -> bytes:
        request = message(pb.RepositoryModelUnloadRequest, data)
        name = _name(request)
        given = {key: _value(parameter) for key, parameter in request.parameters.items()}
        await self._repository.unload(name, dependents=unloads_dependents(given))
        return pb.RepositoryModelUnloadResponse(model_name=name, isUnloaded=True).SerializeToString()


def load_asked(data: bytes) -> tuple[str, LoadParameters]:
    """Returns the model's name and the load parameters of a RepositoryModelLoadRequest. Raises InvalidArgument,
    MessageTooLarge. To be called in a thread, since its files may be large."""
    check_fields(data, "RepositoryModelLoadRequest")
    request = message(pb.RepositoryModelLoadRequest, data, bytes_max=len(data))
    given = {key: _value(parameter) for key, parameter in request.parameters.items()}
    return _name(request), load_parameters(given)


def _name(request: pb.RepositoryModelLoadRequest | pb.RepositoryModelUnloadRequest) -> str:
    name = request.model_name or request.repository_name
    if not name:
        raise InvalidArgument("model_name is empty: name the model")
    return name


def _value(parameter: pb.ModelRepositoryParameter) -> Any:
    choice = parameter.WhichOneof("parameter_choice")
    return getattr(parameter, choice) if choice else None
