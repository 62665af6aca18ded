# Generated from protos/grpc/reflection/v1/reflection.proto by ts_scripts/gen_protos.py: change that file, not this one.
from collections.abc import Callable
from typing import Any

class ServerReflectionStub:
    ServerReflectionInfo_PATH: str
    ServerReflectionInfo: Callable[..., Any]
    def __init__(self, channel: Any) -> None: ...
