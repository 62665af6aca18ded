# Generated from protos/grpc/health/v1/health.proto by ts_scripts/gen_protos.py: change that file, not this one.
from typing import Any

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import Message

DESCRIPTOR: FileDescriptor

class HealthCheckRequest(Message):
    service: str
    def __init__(
        self,
        *,
        service: str | None = ...,
    ) -> None: ...

class HealthCheckResponse(Message):
    ServingStatus: Any
    UNKNOWN: int
    SERVING: int
    NOT_SERVING: int
    SERVICE_UNKNOWN: int
    status: int
    def __init__(
        self,
        *,
        status: int | None = ...,
    ) -> None: ...
