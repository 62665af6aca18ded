# Generated from protos/management.proto by ts_scripts/gen_protos.py: change that file, not this one.
from typing import Any

class ManagementAPIsServiceStub:
    DescribeModel_PATH: str
    ListModels_PATH: str
    RegisterModel_PATH: str
    ScaleWorker_PATH: str
    SetDefault_PATH: str
    UnregisterModel_PATH: str
    DescribeModel: Any
    ListModels: Any
    RegisterModel: Any
    ScaleWorker: Any
    SetDefault: Any
    UnregisterModel: Any
    def __init__(self, channel: Any) -> None: ...
