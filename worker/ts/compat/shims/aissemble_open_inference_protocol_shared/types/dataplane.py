"""Requests, answers and metadata."""

from ts.compat.aissemble_api.types import (
    Datatype,
    InferenceRequest,
    InferenceResponse,
    MetadataTensor,
    ModelMetadataErrorResponse,
    ModelMetadataResponse,
    ModelReadyResponse,
    Parameters,
    RequestInput,
    RequestOutput,
    ResponseOutput,
    ServerLiveResponse,
    ServerMetadataErrorResponse,
    ServerMetadataResponse,
    ServerReadyResponse,
    TensorData,
)

__all__ = [
    "Datatype",
    "InferenceRequest",
    "InferenceResponse",
    "MetadataTensor",
    "ModelMetadataErrorResponse",
    "ModelMetadataResponse",
    "ModelReadyResponse",
    "Parameters",
    "RequestInput",
    "RequestOutput",
    "ResponseOutput",
    "ServerLiveResponse",
    "ServerMetadataErrorResponse",
    "ServerMetadataResponse",
    "ServerReadyResponse",
    "TensorData",
]
