# Generated from protos/rollouts.proto by ts_scripts/gen_protos.py: change that file, not this one.

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import Message

DESCRIPTOR: FileDescriptor

class RolloutRequest(Message):
    model_name: str
    action: str
    settings: str
    def __init__(
        self,
        *,
        model_name: str | None = ...,
        action: str | None = ...,
        settings: str | None = ...,
    ) -> None: ...

class RolloutResponse(Message):
    msg: str
    def __init__(
        self,
        *,
        msg: str | None = ...,
    ) -> None: ...
