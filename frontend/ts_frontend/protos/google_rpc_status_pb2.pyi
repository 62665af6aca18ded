# Generated from protos/google/rpc/status.proto by ts_scripts/gen_protos.py: change that file, not this one.
from collections.abc import Iterable

from google.protobuf import any_pb2
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.internal.containers import RepeatedCompositeFieldContainer
from google.protobuf.message import Message

DESCRIPTOR: FileDescriptor

class Status(Message):
    code: int
    message: str
    details: RepeatedCompositeFieldContainer[any_pb2.Any]
    def __init__(
        self,
        *,
        code: int | None = ...,
        message: str | None = ...,
        details: Iterable[any_pb2.Any] | None = ...,
    ) -> None: ...
