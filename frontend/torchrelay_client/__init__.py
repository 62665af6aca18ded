"""A client for torchrelay, and for the other servers of the Open Inference Protocol over gRPC: a pool of connections,
streams, retries, numpy arrays in and out; blocking (`Client`) and asyncio (`AsyncClient`).

    from torchrelay_client import Client

    with Client("localhost:7070") as client:
        print(client.infer("sum", {"a": [1.0, 2.0], "b": [3.0, 4.0]})["sum"])

The messages themselves are in `grpc_predict_v2_pb2`, the stubs in `grpc_predict_v2_pb2_grpc`; both can be imported
beside those of other systems.
"""

from torchrelay_client.aio import AsyncClient
from torchrelay_client.answers import Answer, BadTensor, ModelMetadata, ModelState, ServerMetadata, TensorSpec, Typed
from torchrelay_client.calls import Request
from torchrelay_client.client import Client
from torchrelay_client.connecting import (
    TLS,
    AlreadyThere,
    CallFailed,
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    Refused,
    Retry,
    ServerError,
    Unavailable,
)

__all__ = [
    "TLS",
    "AlreadyThere",
    "Answer",
    "AsyncClient",
    "BadTensor",
    "CallFailed",
    "Cancelled",
    "Client",
    "DeadlineExceeded",
    "InvalidArgument",
    "ModelMetadata",
    "ModelState",
    "NotFound",
    "Refused",
    "Request",
    "Retry",
    "ServerError",
    "ServerMetadata",
    "TensorSpec",
    "Typed",
    "Unavailable",
]
