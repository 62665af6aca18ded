# Generated from protos/open_inference.proto by ts_scripts/gen_protos.py: change that file, not this one.
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
    ServerLive: Any
    ServerReady: Any
    ModelReady: Any
    ServerMetadata: Any
    ModelMetadata: Any
    ModelConfig: Any
    ModelStatistics: Any
    ModelInfer: Any
    ModelStreamInfer: Any
    ModelInferStream: Any
    RepositoryIndex: Any
    RepositoryModelLoad: Any
    RepositoryModelUnload: Any
    SystemSharedMemoryStatus: Any
    SystemSharedMemoryRegister: Any
    SystemSharedMemoryUnregister: Any
    CudaSharedMemoryStatus: Any
    CudaSharedMemoryRegister: Any
    CudaSharedMemoryUnregister: Any
    TraceSetting: Any
    LogSettings: Any
    def __init__(self, channel: Any) -> None: ...
