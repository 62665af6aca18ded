"""The client stub for a `ModelStreamInfer` that answers with plain ModelInferResponses (Dynamo's page, MLServer)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torchrelay_client.grpc_predict_v2_pb2 as pb
from torchrelay_client.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub as Stub

#: The stream dialect that the client expects, so that the server need not guess.
DIALECT = ("oip-stream-dialect", "mlserver")


class GRPCInferenceServiceStub(Stub):
    """As `grpc_predict_v2_pb2_grpc`'s stub; a failure ends the stream with its status."""

    def __init__(self, channel: Any) -> None:
        super().__init__(channel)
        path = Stub.ModelStreamInfer_PATH
        plain = channel.stream_stream(
            path, request_serializer=_written, response_deserializer=pb.ModelInferResponse.FromString
        )

        def stream(requests: Any = None, *, metadata: Sequence[tuple[str, str | bytes]] = (), **more: Any) -> Any:
            return plain(requests, metadata=(*(metadata or ()), DIALECT), **more)

        self.ModelStreamInfer = stream


def _written(message: Any) -> bytes:
    return bytes(message.SerializeToString())
