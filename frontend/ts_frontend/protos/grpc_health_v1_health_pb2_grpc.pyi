# Generated from protos/grpc/health/v1/health.proto by ts_scripts/gen_protos.py: change that file, not this one.
from typing import Any

class HealthStub:
    Check_PATH: str
    Watch_PATH: str
    Check: Any
    Watch: Any
    def __init__(self, channel: Any) -> None: ...
