"""`ModelHandler`, the base class of users' handlers, and `DataplaneHandler`, which calls them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ts.compat.aissemble_api.types import (
    InferenceRequest,
    InferenceResponse,
    ModelMetadataResponse,
    ModelReadyResponse,
    ServerLiveResponse,
    ServerMetadataResponse,
    ServerReadyResponse,
)


class ModelHandler(ABC):
    """A model: its load, its metadata and its predictions."""

    @abstractmethod
    def infer(
        self, payload: InferenceRequest, model_name: str, model_version: str | None = None
    ) -> InferenceResponse: ...

    @abstractmethod
    def model_metadata(self, model_name: str, model_version: str | None = None) -> ModelMetadataResponse: ...

    @abstractmethod
    def model_load(self, model_name: str) -> bool:
        """Loads the model; returns whether it is loaded."""

    def model_ready(self, model_name: str, model_version: str | None = None) -> ModelReadyResponse:
        return ModelReadyResponse(name=model_name, ready=True)


class DefaultModelHandler(ModelHandler):
    """The handler that stands in for a missing one."""

    def infer(self, payload: InferenceRequest, model_name: str, model_version: str | None = None) -> InferenceResponse:
        raise NotImplementedError

    def model_metadata(self, model_name: str, model_version: str | None = None) -> ModelMetadataResponse:
        raise NotImplementedError

    def model_load(self, model_name: str) -> bool:
        raise NotImplementedError


class DataplaneHandler:
    """A model handler whose requests and answers are checked."""

    def __init__(self, model_handler: ModelHandler | None = None) -> None:
        self.model_handler = DefaultModelHandler() if model_handler is None else model_handler

    def infer(self, payload: InferenceRequest, model_name: str, model_version: str | None = None) -> InferenceResponse:
        payload.validate_oip()
        response = self.model_handler.infer(payload, model_name, model_version)
        response.validate_oip()
        return response

    def model_metadata(self, model_name: str, model_version: str | None = None) -> ModelMetadataResponse:
        return self.model_handler.model_metadata(model_name, model_version)

    def model_load(self, model_name: str) -> bool:
        return self.model_handler.model_load(model_name)

    def model_ready(self, model_name: str, model_version: str | None = None) -> ModelReadyResponse:
        return self.model_handler.model_ready(model_name, model_version)

    def server_ready(self) -> ServerReadyResponse:
        return ServerReadyResponse(live=True)

    def server_live(self) -> ServerLiveResponse:
        return ServerLiveResponse(live=True)

    def server_metadata(self) -> ServerMetadataResponse:
        return ServerMetadataResponse(name="Inference Server", version="1.0", extensions=[])
