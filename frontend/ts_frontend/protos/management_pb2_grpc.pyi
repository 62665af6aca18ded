# Generated from protos/management.proto by ts_scripts/gen_protos.py: change that file, not this one.
from collections.abc import Callable
from typing import Any

class ManagementAPIsServiceStub:
    DescribeModel_PATH: str
    ListModels_PATH: str
    RegisterModel_PATH: str
    ScaleWorker_PATH: str
    SetDefault_PATH: str
    UnregisterModel_PATH: str
    DescribeModel: Callable[..., Any]
    ListModels: Callable[..., Any]
    RegisterModel: Callable[..., Any]
    ScaleWorker: Callable[..., Any]
    SetDefault: Callable[..., Any]
    UnregisterModel: Callable[..., Any]
    def __init__(self, channel: Any) -> None: ...
