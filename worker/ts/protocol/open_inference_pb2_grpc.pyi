# Generated from protos/open_inference.proto by ts_scripts/gen_protos.py: change that file, not this one.
from collections.abc import Callable
from typing import Any

class GRPCInferenceServiceStub:
    ServerLive_PATH: str
    ServerReady_PATH: str
    ModelReady_PATH: str
    ServerMetadata_PATH: str
    ModelMetadata_PATH: str
    ModelConfig_PATH: str
    ModelStatistics_PATH: str
    ModelInfer_PATH: str
    ModelStreamInfer_PATH: str
    ModelInferStream_PATH: str
    RepositoryIndex_PATH: str
    RepositoryModelLoad_PATH: str
    RepositoryModelUnload_PATH: str
    SystemSharedMemoryStatus_PATH: str
    SystemSharedMemoryRegister_PATH: str
    SystemSharedMemoryUnregister_PATH: str
    CudaSharedMemoryStatus_PATH: str
    CudaSharedMemoryRegister_PATH: str
    CudaSharedMemoryUnregister_PATH: str
    TraceSetting_PATH: str
    LogSettings_PATH: str
    ServerLive: Callable[..., Any]
    ServerReady: Callable[..., Any]
    ModelReady: Callable[..., Any]
    ServerMetadata: Callable[..., Any]
    ModelMetadata: Callable[..., Any]
    ModelConfig: Callable[..., Any]
    ModelStatistics: Callable[..., Any]
    ModelInfer: Callable[..., Any]
    ModelStreamInfer: Callable[..., Any]
    ModelInferStream: Callable[..., Any]
    RepositoryIndex: Callable[..., Any]
    RepositoryModelLoad: Callable[..., Any]
    RepositoryModelUnload: Callable[..., Any]
    SystemSharedMemoryStatus: Callable[..., Any]
    SystemSharedMemoryRegister: Callable[..., Any]
    SystemSharedMemoryUnregister: Callable[..., Any]
    CudaSharedMemoryStatus: Callable[..., Any]
    CudaSharedMemoryRegister: Callable[..., Any]
    CudaSharedMemoryUnregister: Callable[..., Any]
    TraceSetting: Callable[..., Any]
    LogSettings: Callable[..., Any]
    def __init__(self, channel: Any) -> None: ...
