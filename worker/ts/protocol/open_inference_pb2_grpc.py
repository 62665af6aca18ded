# Generated from protos/open_inference.proto by ts_scripts/gen_protos.py: change that file, not this one.

from ts.protocol import open_inference_pb2
from ts.protocol.pool import serialize


class GRPCInferenceServiceStub:
    ServerLive_PATH = "/inference.GRPCInferenceService/ServerLive"
    ServerReady_PATH = "/inference.GRPCInferenceService/ServerReady"
    ModelReady_PATH = "/inference.GRPCInferenceService/ModelReady"
    ServerMetadata_PATH = "/inference.GRPCInferenceService/ServerMetadata"
    ModelMetadata_PATH = "/inference.GRPCInferenceService/ModelMetadata"
    ModelConfig_PATH = "/inference.GRPCInferenceService/ModelConfig"
    ModelStatistics_PATH = "/inference.GRPCInferenceService/ModelStatistics"
    ModelInfer_PATH = "/inference.GRPCInferenceService/ModelInfer"
    ModelStreamInfer_PATH = "/inference.GRPCInferenceService/ModelStreamInfer"
    ModelInferStream_PATH = "/inference.GRPCInferenceService/ModelInferStream"
    RepositoryIndex_PATH = "/inference.GRPCInferenceService/RepositoryIndex"
    RepositoryModelLoad_PATH = "/inference.GRPCInferenceService/RepositoryModelLoad"
    RepositoryModelUnload_PATH = "/inference.GRPCInferenceService/RepositoryModelUnload"
    SystemSharedMemoryStatus_PATH = "/inference.GRPCInferenceService/SystemSharedMemoryStatus"
    SystemSharedMemoryRegister_PATH = "/inference.GRPCInferenceService/SystemSharedMemoryRegister"
    SystemSharedMemoryUnregister_PATH = "/inference.GRPCInferenceService/SystemSharedMemoryUnregister"
    CudaSharedMemoryStatus_PATH = "/inference.GRPCInferenceService/CudaSharedMemoryStatus"
    CudaSharedMemoryRegister_PATH = "/inference.GRPCInferenceService/CudaSharedMemoryRegister"
    CudaSharedMemoryUnregister_PATH = "/inference.GRPCInferenceService/CudaSharedMemoryUnregister"
    TraceSetting_PATH = "/inference.GRPCInferenceService/TraceSetting"
    LogSettings_PATH = "/inference.GRPCInferenceService/LogSettings"

    def __init__(self, channel):
        self.ServerLive = channel.unary_unary(
            self.ServerLive_PATH,
            request_serializer=serialize,
            response_deserializer=open_inference_pb2.ServerLiveResponse.FromString,
        )
        self.ServerReady = channel.unary_unary(
            self.ServerReady_PATH,
            request_serializer=serialize,
            response_deserializer=open_inference_pb2.ServerReadyResponse.FromString,
        )
        self.ModelReady = channel.unary_unary(
            self.ModelReady_PATH,
            request_serializer=serialize,
            response_deserializer=open_inference_pb2.ModelReadyResponse.FromString,
        )
        self.ServerMetadata = channel.unary_unary(
            self.ServerMetadata_PATH,
            request_serializer=serialize,
            response_deserializer=open_inference_pb2.ServerMetadataResponse.FromString,
        )
        self.ModelMetadata = channel.unary_unary(
            self.ModelMetadata_PATH,
            request_serializer=serialize,
            response_deserializer=open_inference_pb2.ModelMetadataResponse.FromString,
        )
        self.ModelConfig = channel.unary_unary(
            self.ModelConfig_PATH,
            request_serializer=serialize,
            response_deserializer=open_inference_pb2.ModelConfigResponse.FromString,
        )
        self.ModelStatistics = channel.unary_unary(
            self.ModelStatistics_PATH,
            request_serializer=serialize,
            response_deserializer=open_inference_pb2.ModelStatisticsResponse.FromString,
        )
        self.ModelInfer = channel.unary_unary(
            self.ModelInfer_PATH,
            request_serializer=serialize,
            response_deserializer=open_inference_pb2.ModelInferResponse.FromString,
        )
        self.ModelStreamInfer = channel.stream_stream(
            self.ModelStreamInfer_PATH,
            request_serializer=serialize,
            response_deserializer=open_inference_pb2.ModelStreamInferResponse.FromString,
        )
        self.ModelInferStream = channel.unary_stream(
            self.ModelInferStream_PATH,
            request_serializer=serialize,
            response_deserializer=open_inference_pb2.ModelInferResponse.FromString,
        )
        self.RepositoryIndex = channel.unary_unary(
            self.RepositoryIndex_PATH,
            request_serializer=serialize,
            response_deserializer=open_inference_pb2.RepositoryIndexResponse.FromString,
        )
        self.RepositoryModelLoad = channel.unary_unary(
            self.RepositoryModelLoad_PATH,
            request_serializer=serialize,
            response_deserializer=open_inference_pb2.RepositoryModelLoadResponse.FromString,
        )
        self.RepositoryModelUnload = channel.unary_unary(
            self.RepositoryModelUnload_PATH,
            request_serializer=serialize,
            response_deserializer=open_inference_pb2.RepositoryModelUnloadResponse.FromString,
        )
        self.SystemSharedMemoryStatus = channel.unary_unary(
            self.SystemSharedMemoryStatus_PATH,
            request_serializer=serialize,
            response_deserializer=open_inference_pb2.SystemSharedMemoryStatusResponse.FromString,
        )
        self.SystemSharedMemoryRegister = channel.unary_unary(
            self.SystemSharedMemoryRegister_PATH,
            request_serializer=serialize,
            response_deserializer=open_inference_pb2.SystemSharedMemoryRegisterResponse.FromString,
        )
        self.SystemSharedMemoryUnregister = channel.unary_unary(
            self.SystemSharedMemoryUnregister_PATH,
            request_serializer=serialize,
            response_deserializer=open_inference_pb2.SystemSharedMemoryUnregisterResponse.FromString,
        )
        self.CudaSharedMemoryStatus = channel.unary_unary(
            self.CudaSharedMemoryStatus_PATH,
            request_serializer=serialize,
            response_deserializer=open_inference_pb2.CudaSharedMemoryStatusResponse.FromString,
        )
        self.CudaSharedMemoryRegister = channel.unary_unary(
            self.CudaSharedMemoryRegister_PATH,
            request_serializer=serialize,
            response_deserializer=open_inference_pb2.CudaSharedMemoryRegisterResponse.FromString,
        )
        self.CudaSharedMemoryUnregister = channel.unary_unary(
            self.CudaSharedMemoryUnregister_PATH,
            request_serializer=serialize,
            response_deserializer=open_inference_pb2.CudaSharedMemoryUnregisterResponse.FromString,
        )
        self.TraceSetting = channel.unary_unary(
            self.TraceSetting_PATH,
            request_serializer=serialize,
            response_deserializer=open_inference_pb2.TraceSettingResponse.FromString,
        )
        self.LogSettings = channel.unary_unary(
            self.LogSettings_PATH,
            request_serializer=serialize,
            response_deserializer=open_inference_pb2.LogSettingsResponse.FromString,
        )
