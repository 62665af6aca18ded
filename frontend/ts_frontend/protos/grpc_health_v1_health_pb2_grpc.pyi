# Generated from protos/grpc/health/v1/health.proto by ts_scripts/gen_protos.py: change that file, not this one.
from collections.abc import Callable
from typing import Any

class HealthStub:
    Check_PATH: str
    Watch_PATH: str
    Check: Callable[..., Any]
    Watch: Callable[..., Any]
    def __init__(self, channel: Any) -> None: ...
