# Generated from protos/rollouts.proto by ts_scripts/gen_protos.py: change that file, not this one.
from typing import Any

class RolloutsStub:
    Rollout_PATH: str
    Rollout: Any
    def __init__(self, channel: Any) -> None: ...
