# Generated from protos/inference.proto by ts_scripts/gen_protos.py: change that file, not this one.
from collections.abc import Mapping

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.internal.containers import ScalarMap
from google.protobuf.message import Message

from ts_frontend.protos import google_rpc_status_pb2

DESCRIPTOR: FileDescriptor

class PredictionsRequest(Message):
    model_name: str
    model_version: str
    input: ScalarMap[str, bytes]
    sequence_id: str
    def __init__(
        self,
        *,
        model_name: str | None = ...,
        model_version: str | None = ...,
        input: Mapping[str, bytes] | None = ...,
        sequence_id: str | None = ...,
    ) -> None: ...

class PredictionResponse(Message):
    prediction: bytes
    sequence_id: str
    status: google_rpc_status_pb2.Status
    def __init__(
        self,
        *,
        prediction: bytes | None = ...,
        sequence_id: str | None = ...,
        status: google_rpc_status_pb2.Status | None = ...,
    ) -> None: ...

class TorchServeHealthResponse(Message):
    health: str
    def __init__(
        self,
        *,
        health: str | None = ...,
    ) -> None: ...
