# Generated from protos/open_inference.proto by ts_scripts/gen_protos.py: change that file, not this one.
from collections.abc import Iterable, Mapping

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.internal.containers import MessageMap, RepeatedCompositeFieldContainer, RepeatedScalarFieldContainer
from google.protobuf.message import Message

from ts.protocol import model_config_pb2

DESCRIPTOR: FileDescriptor

class ServerLiveRequest(Message):
    def __init__(self) -> None: ...

class ServerLiveResponse(Message):
    live: bool
    def __init__(
        self,
        *,
        live: bool | None = ...,
    ) -> None: ...

class ServerReadyRequest(Message):
    def __init__(self) -> None: ...

class ServerReadyResponse(Message):
    ready: bool
    def __init__(
        self,
        *,
        ready: bool | None = ...,
    ) -> None: ...

class ModelReadyRequest(Message):
    name: str
    version: str
    def __init__(
        self,
        *,
        name: str | None = ...,
        version: str | None = ...,
    ) -> None: ...

class ModelReadyResponse(Message):
    ready: bool
    def __init__(
        self,
        *,
        ready: bool | None = ...,
    ) -> None: ...

class ServerMetadataRequest(Message):
    def __init__(self) -> None: ...

class ServerMetadataResponse(Message):
    name: str
    version: str
    extensions: RepeatedScalarFieldContainer[str]
    def __init__(
        self,
        *,
        name: str | None = ...,
        version: str | None = ...,
        extensions: Iterable[str] | None = ...,
    ) -> None: ...

class ModelMetadataRequest(Message):
    name: str
    version: str
    def __init__(
        self,
        *,
        name: str | None = ...,
        version: str | None = ...,
    ) -> None: ...

class ModelMetadataResponse(Message):
    class TensorMetadata(Message):
        name: str
        datatype: str
        shape: RepeatedScalarFieldContainer[int]
        parameters: MessageMap[str, InferParameter]
        def __init__(
            self,
            *,
            name: str | None = ...,
            datatype: str | None = ...,
            shape: Iterable[int] | None = ...,
            parameters: Mapping[str, InferParameter] | None = ...,
        ) -> None: ...
    name: str
    versions: RepeatedScalarFieldContainer[str]
    platform: str
    inputs: RepeatedCompositeFieldContainer[ModelMetadataResponse.TensorMetadata]
    outputs: RepeatedCompositeFieldContainer[ModelMetadataResponse.TensorMetadata]
    def __init__(
        self,
        *,
        name: str | None = ...,
        versions: Iterable[str] | None = ...,
        platform: str | None = ...,
        inputs: Iterable[ModelMetadataResponse.TensorMetadata] | None = ...,
        outputs: Iterable[ModelMetadataResponse.TensorMetadata] | None = ...,
    ) -> None: ...

class InferParameter(Message):
    bool_param: bool
    int64_param: int
    string_param: str
    double_param: float
    uint64_param: int
    def __init__(
        self,
        *,
        bool_param: bool | None = ...,
        int64_param: int | None = ...,
        string_param: str | None = ...,
        double_param: float | None = ...,
        uint64_param: int | None = ...,
    ) -> None: ...

class InferTensorContents(Message):
    bool_contents: RepeatedScalarFieldContainer[bool]
    int_contents: RepeatedScalarFieldContainer[int]
    int64_contents: RepeatedScalarFieldContainer[int]
    uint_contents: RepeatedScalarFieldContainer[int]
    uint64_contents: RepeatedScalarFieldContainer[int]
    fp32_contents: RepeatedScalarFieldContainer[float]
    fp64_contents: RepeatedScalarFieldContainer[float]
    bytes_contents: RepeatedScalarFieldContainer[bytes]
    def __init__(
        self,
        *,
        bool_contents: Iterable[bool] | None = ...,
        int_contents: Iterable[int] | None = ...,
        int64_contents: Iterable[int] | None = ...,
        uint_contents: Iterable[int] | None = ...,
        uint64_contents: Iterable[int] | None = ...,
        fp32_contents: Iterable[float] | None = ...,
        fp64_contents: Iterable[float] | None = ...,
        bytes_contents: Iterable[bytes] | None = ...,
    ) -> None: ...

class ModelInferRequest(Message):
    class InferInputTensor(Message):
        name: str
        datatype: str
        shape: RepeatedScalarFieldContainer[int]
        parameters: MessageMap[str, InferParameter]
        contents: InferTensorContents
        def __init__(
            self,
            *,
            name: str | None = ...,
            datatype: str | None = ...,
            shape: Iterable[int] | None = ...,
            parameters: Mapping[str, InferParameter] | None = ...,
            contents: InferTensorContents | None = ...,
        ) -> None: ...
    class InferRequestedOutputTensor(Message):
        name: str
        parameters: MessageMap[str, InferParameter]
        def __init__(
            self,
            *,
            name: str | None = ...,
            parameters: Mapping[str, InferParameter] | None = ...,
        ) -> None: ...
    model_name: str
    model_version: str
    id: str
    parameters: MessageMap[str, InferParameter]
    inputs: RepeatedCompositeFieldContainer[ModelInferRequest.InferInputTensor]
    outputs: RepeatedCompositeFieldContainer[ModelInferRequest.InferRequestedOutputTensor]
    raw_input_contents: RepeatedScalarFieldContainer[bytes]
    def __init__(
        self,
        *,
        model_name: str | None = ...,
        model_version: str | None = ...,
        id: str | None = ...,
        parameters: Mapping[str, InferParameter] | None = ...,
        inputs: Iterable[ModelInferRequest.InferInputTensor] | None = ...,
        outputs: Iterable[ModelInferRequest.InferRequestedOutputTensor] | None = ...,
        raw_input_contents: Iterable[bytes] | None = ...,
    ) -> None: ...

class ModelInferResponse(Message):
    class InferOutputTensor(Message):
        name: str
        datatype: str
        shape: RepeatedScalarFieldContainer[int]
        parameters: MessageMap[str, InferParameter]
        contents: InferTensorContents
        def __init__(
            self,
            *,
            name: str | None = ...,
            datatype: str | None = ...,
            shape: Iterable[int] | None = ...,
            parameters: Mapping[str, InferParameter] | None = ...,
            contents: InferTensorContents | None = ...,
        ) -> None: ...
    model_name: str
    model_version: str
    id: str
    parameters: MessageMap[str, InferParameter]
    outputs: RepeatedCompositeFieldContainer[ModelInferResponse.InferOutputTensor]
    raw_output_contents: RepeatedScalarFieldContainer[bytes]
    def __init__(
        self,
        *,
        model_name: str | None = ...,
        model_version: str | None = ...,
        id: str | None = ...,
        parameters: Mapping[str, InferParameter] | None = ...,
        outputs: Iterable[ModelInferResponse.InferOutputTensor] | None = ...,
        raw_output_contents: Iterable[bytes] | None = ...,
    ) -> None: ...

class ModelStreamInferResponse(Message):
    error_message: str
    infer_response: ModelInferResponse
    def __init__(
        self,
        *,
        error_message: str | None = ...,
        infer_response: ModelInferResponse | None = ...,
    ) -> None: ...

class ModelRepositoryParameter(Message):
    bool_param: bool
    int64_param: int
    string_param: str
    bytes_param: bytes
    def __init__(
        self,
        *,
        bool_param: bool | None = ...,
        int64_param: int | None = ...,
        string_param: str | None = ...,
        bytes_param: bytes | None = ...,
    ) -> None: ...

class RepositoryIndexRequest(Message):
    repository_name: str
    ready: bool
    def __init__(
        self,
        *,
        repository_name: str | None = ...,
        ready: bool | None = ...,
    ) -> None: ...

class RepositoryIndexResponse(Message):
    class ModelIndex(Message):
        name: str
        version: str
        state: str
        reason: str
        def __init__(
            self,
            *,
            name: str | None = ...,
            version: str | None = ...,
            state: str | None = ...,
            reason: str | None = ...,
        ) -> None: ...
    models: RepeatedCompositeFieldContainer[RepositoryIndexResponse.ModelIndex]
    def __init__(
        self,
        *,
        models: Iterable[RepositoryIndexResponse.ModelIndex] | None = ...,
    ) -> None: ...

class RepositoryModelLoadRequest(Message):
    repository_name: str
    model_name: str
    parameters: MessageMap[str, ModelRepositoryParameter]
    def __init__(
        self,
        *,
        repository_name: str | None = ...,
        model_name: str | None = ...,
        parameters: Mapping[str, ModelRepositoryParameter] | None = ...,
    ) -> None: ...

class RepositoryModelLoadResponse(Message):
    model_name: str
    isLoaded: bool
    def __init__(
        self,
        *,
        model_name: str | None = ...,
        isLoaded: bool | None = ...,
    ) -> None: ...

class RepositoryModelUnloadRequest(Message):
    repository_name: str
    model_name: str
    parameters: MessageMap[str, ModelRepositoryParameter]
    def __init__(
        self,
        *,
        repository_name: str | None = ...,
        model_name: str | None = ...,
        parameters: Mapping[str, ModelRepositoryParameter] | None = ...,
    ) -> None: ...

class RepositoryModelUnloadResponse(Message):
    model_name: str
    isUnloaded: bool
    def __init__(
        self,
        *,
        model_name: str | None = ...,
        isUnloaded: bool | None = ...,
    ) -> None: ...

class ModelConfigRequest(Message):
    name: str
    version: str
    def __init__(
        self,
        *,
        name: str | None = ...,
        version: str | None = ...,
    ) -> None: ...

class ModelConfigResponse(Message):
    config: model_config_pb2.ModelConfig
    def __init__(
        self,
        *,
        config: model_config_pb2.ModelConfig | None = ...,
    ) -> None: ...

class ModelStatisticsRequest(Message):
    name: str
    version: str
    def __init__(
        self,
        *,
        name: str | None = ...,
        version: str | None = ...,
    ) -> None: ...

class ModelStatisticsResponse(Message):
    model_stats: RepeatedCompositeFieldContainer[ModelStatistics]
    def __init__(
        self,
        *,
        model_stats: Iterable[ModelStatistics] | None = ...,
    ) -> None: ...

class StatisticDuration(Message):
    count: int
    ns: int
    def __init__(
        self,
        *,
        count: int | None = ...,
        ns: int | None = ...,
    ) -> None: ...

class InferStatistics(Message):
    success: StatisticDuration
    fail: StatisticDuration
    queue: StatisticDuration
    compute_input: StatisticDuration
    compute_infer: StatisticDuration
    compute_output: StatisticDuration
    cache_hit: StatisticDuration
    cache_miss: StatisticDuration
    def __init__(
        self,
        *,
        success: StatisticDuration | None = ...,
        fail: StatisticDuration | None = ...,
        queue: StatisticDuration | None = ...,
        compute_input: StatisticDuration | None = ...,
        compute_infer: StatisticDuration | None = ...,
        compute_output: StatisticDuration | None = ...,
        cache_hit: StatisticDuration | None = ...,
        cache_miss: StatisticDuration | None = ...,
    ) -> None: ...

class InferResponseStatistics(Message):
    compute_infer: StatisticDuration
    compute_output: StatisticDuration
    success: StatisticDuration
    fail: StatisticDuration
    empty_response: StatisticDuration
    cancel: StatisticDuration
    def __init__(
        self,
        *,
        compute_infer: StatisticDuration | None = ...,
        compute_output: StatisticDuration | None = ...,
        success: StatisticDuration | None = ...,
        fail: StatisticDuration | None = ...,
        empty_response: StatisticDuration | None = ...,
        cancel: StatisticDuration | None = ...,
    ) -> None: ...

class InferBatchStatistics(Message):
    batch_size: int
    compute_input: StatisticDuration
    compute_infer: StatisticDuration
    compute_output: StatisticDuration
    def __init__(
        self,
        *,
        batch_size: int | None = ...,
        compute_input: StatisticDuration | None = ...,
        compute_infer: StatisticDuration | None = ...,
        compute_output: StatisticDuration | None = ...,
    ) -> None: ...

class MemoryUsage(Message):
    type: str
    id: int
    byte_size: int
    def __init__(
        self,
        *,
        type: str | None = ...,
        id: int | None = ...,
        byte_size: int | None = ...,
    ) -> None: ...

class ModelStatistics(Message):
    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: InferStatistics
    batch_stats: RepeatedCompositeFieldContainer[InferBatchStatistics]
    memory_usage: RepeatedCompositeFieldContainer[MemoryUsage]
    response_stats: MessageMap[str, InferResponseStatistics]
    def __init__(
        self,
        *,
        name: str | None = ...,
        version: str | None = ...,
        last_inference: int | None = ...,
        inference_count: int | None = ...,
        execution_count: int | None = ...,
        inference_stats: InferStatistics | None = ...,
        batch_stats: Iterable[InferBatchStatistics] | None = ...,
        memory_usage: Iterable[MemoryUsage] | None = ...,
        response_stats: Mapping[str, InferResponseStatistics] | None = ...,
    ) -> None: ...

class SystemSharedMemoryStatusRequest(Message):
    name: str
    def __init__(
        self,
        *,
        name: str | None = ...,
    ) -> None: ...

class SystemSharedMemoryStatusResponse(Message):
    class RegionStatus(Message):
        name: str
        key: str
        offset: int
        byte_size: int
        def __init__(
            self,
            *,
            name: str | None = ...,
            key: str | None = ...,
            offset: int | None = ...,
            byte_size: int | None = ...,
        ) -> None: ...
    regions: MessageMap[str, SystemSharedMemoryStatusResponse.RegionStatus]
    def __init__(
        self,
        *,
        regions: Mapping[str, SystemSharedMemoryStatusResponse.RegionStatus] | None = ...,
    ) -> None: ...

class SystemSharedMemoryRegisterRequest(Message):
    name: str
    key: str
    offset: int
    byte_size: int
    def __init__(
        self,
        *,
        name: str | None = ...,
        key: str | None = ...,
        offset: int | None = ...,
        byte_size: int | None = ...,
    ) -> None: ...

class SystemSharedMemoryRegisterResponse(Message):
    def __init__(self) -> None: ...

class SystemSharedMemoryUnregisterRequest(Message):
    name: str
    def __init__(
        self,
        *,
        name: str | None = ...,
    ) -> None: ...

class SystemSharedMemoryUnregisterResponse(Message):
    def __init__(self) -> None: ...

class CudaSharedMemoryStatusRequest(Message):
    name: str
    def __init__(
        self,
        *,
        name: str | None = ...,
    ) -> None: ...

class CudaSharedMemoryStatusResponse(Message):
    class RegionStatus(Message):
        name: str
        device_id: int
        byte_size: int
        def __init__(
            self,
            *,
            name: str | None = ...,
            device_id: int | None = ...,
            byte_size: int | None = ...,
        ) -> None: ...
    regions: MessageMap[str, CudaSharedMemoryStatusResponse.RegionStatus]
    def __init__(
        self,
        *,
        regions: Mapping[str, CudaSharedMemoryStatusResponse.RegionStatus] | None = ...,
    ) -> None: ...

class CudaSharedMemoryRegisterRequest(Message):
    name: str
    raw_handle: bytes
    device_id: int
    byte_size: int
    def __init__(
        self,
        *,
        name: str | None = ...,
        raw_handle: bytes | None = ...,
        device_id: int | None = ...,
        byte_size: int | None = ...,
    ) -> None: ...

class CudaSharedMemoryRegisterResponse(Message):
    def __init__(self) -> None: ...

class CudaSharedMemoryUnregisterRequest(Message):
    name: str
    def __init__(
        self,
        *,
        name: str | None = ...,
    ) -> None: ...

class CudaSharedMemoryUnregisterResponse(Message):
    def __init__(self) -> None: ...

class TraceSettingRequest(Message):
    class SettingValue(Message):
        value: RepeatedScalarFieldContainer[str]
        def __init__(
            self,
            *,
            value: Iterable[str] | None = ...,
        ) -> None: ...
    settings: MessageMap[str, TraceSettingRequest.SettingValue]
    model_name: str
    def __init__(
        self,
        *,
        settings: Mapping[str, TraceSettingRequest.SettingValue] | None = ...,
        model_name: str | None = ...,
    ) -> None: ...

class TraceSettingResponse(Message):
    class SettingValue(Message):
        value: RepeatedScalarFieldContainer[str]
        def __init__(
            self,
            *,
            value: Iterable[str] | None = ...,
        ) -> None: ...
    settings: MessageMap[str, TraceSettingResponse.SettingValue]
    def __init__(
        self,
        *,
        settings: Mapping[str, TraceSettingResponse.SettingValue] | None = ...,
    ) -> None: ...

class LogSettingsRequest(Message):
    class SettingValue(Message):
        bool_param: bool
        uint32_param: int
        string_param: str
        def __init__(
            self,
            *,
            bool_param: bool | None = ...,
            uint32_param: int | None = ...,
            string_param: str | None = ...,
        ) -> None: ...
    settings: MessageMap[str, LogSettingsRequest.SettingValue]
    def __init__(
        self,
        *,
        settings: Mapping[str, LogSettingsRequest.SettingValue] | None = ...,
    ) -> None: ...

class LogSettingsResponse(Message):
    class SettingValue(Message):
        bool_param: bool
        uint32_param: int
        string_param: str
        def __init__(
            self,
            *,
            bool_param: bool | None = ...,
            uint32_param: int | None = ...,
            string_param: str | None = ...,
        ) -> None: ...
    settings: MessageMap[str, LogSettingsResponse.SettingValue]
    def __init__(
        self,
        *,
        settings: Mapping[str, LogSettingsResponse.SettingValue] | None = ...,
    ) -> None: ...
