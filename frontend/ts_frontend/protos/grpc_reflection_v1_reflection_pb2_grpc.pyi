# Generated from protos/grpc/reflection/v1/reflection.proto by ts_scripts/gen_protos.py: change that file, not this one.
from typing import Any

class ServerReflectionStub:
    ServerReflectionInfo_PATH: str
    ServerReflectionInfo: Any
    def __init__(self, channel: Any) -> None: ...
