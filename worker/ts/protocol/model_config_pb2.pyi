# Generated from protos/model_config.proto by ts_scripts/gen_protos.py: change that file, not this one.
from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.internal.containers import MessageMap, RepeatedCompositeFieldContainer, RepeatedScalarFieldContainer, ScalarMap
from google.protobuf.message import Message

DESCRIPTOR: FileDescriptor
DataType: Any
TYPE_INVALID: int
TYPE_BOOL: int
TYPE_UINT8: int
TYPE_UINT16: int
TYPE_UINT32: int
TYPE_UINT64: int
TYPE_INT8: int
TYPE_INT16: int
TYPE_INT32: int
TYPE_INT64: int
TYPE_FP16: int
TYPE_FP32: int
TYPE_FP64: int
TYPE_STRING: int
TYPE_BF16: int

class ModelConfig(Message):
    name: str
    platform: str
    backend: str
    runtime: str
    version_policy: ModelVersionPolicy
    max_batch_size: int
    input: RepeatedCompositeFieldContainer[ModelInput]
    output: RepeatedCompositeFieldContainer[ModelOutput]
    batch_input: RepeatedCompositeFieldContainer[BatchInput]
    batch_output: RepeatedCompositeFieldContainer[BatchOutput]
    dynamic_batching: ModelDynamicBatching
    sequence_batching: ModelSequenceBatching
    ensemble_scheduling: ModelEnsembling
    instance_group: RepeatedCompositeFieldContainer[ModelInstanceGroup]
    model_transaction_policy: ModelTransactionPolicy
    default_model_filename: str
    cc_model_filenames: ScalarMap[str, str]
    metric_tags: ScalarMap[str, str]
    parameters: MessageMap[str, ModelParameter]
    model_warmup: RepeatedCompositeFieldContainer[ModelWarmup]
    optimization: ModelOptimizationPolicy
    model_operations: ModelOperations
    model_repository_agents: ModelRepositoryAgents
    response_cache: ModelResponseCache
    model_metrics: ModelMetrics
    def __init__(
        self,
        *,
        name: str | None = ...,
        platform: str | None = ...,
        backend: str | None = ...,
        runtime: str | None = ...,
        version_policy: ModelVersionPolicy | None = ...,
        max_batch_size: int | None = ...,
        input: Iterable[ModelInput] | None = ...,
        output: Iterable[ModelOutput] | None = ...,
        batch_input: Iterable[BatchInput] | None = ...,
        batch_output: Iterable[BatchOutput] | None = ...,
        dynamic_batching: ModelDynamicBatching | None = ...,
        sequence_batching: ModelSequenceBatching | None = ...,
        ensemble_scheduling: ModelEnsembling | None = ...,
        instance_group: Iterable[ModelInstanceGroup] | None = ...,
        model_transaction_policy: ModelTransactionPolicy | None = ...,
        default_model_filename: str | None = ...,
        cc_model_filenames: Mapping[str, str] | None = ...,
        metric_tags: Mapping[str, str] | None = ...,
        parameters: Mapping[str, ModelParameter] | None = ...,
        model_warmup: Iterable[ModelWarmup] | None = ...,
        optimization: ModelOptimizationPolicy | None = ...,
        model_operations: ModelOperations | None = ...,
        model_repository_agents: ModelRepositoryAgents | None = ...,
        response_cache: ModelResponseCache | None = ...,
        model_metrics: ModelMetrics | None = ...,
    ) -> None: ...

class ModelVersionPolicy(Message):
    class Latest(Message):
        num_versions: int
        def __init__(
            self,
            *,
            num_versions: int | None = ...,
        ) -> None: ...
    class All(Message):
        def __init__(self) -> None: ...
    class Specific(Message):
        versions: RepeatedScalarFieldContainer[int]
        def __init__(
            self,
            *,
            versions: Iterable[int] | None = ...,
        ) -> None: ...
    latest: ModelVersionPolicy.Latest
    all: ModelVersionPolicy.All
    specific: ModelVersionPolicy.Specific
    def __init__(
        self,
        *,
        latest: ModelVersionPolicy.Latest | None = ...,
        all: ModelVersionPolicy.All | None = ...,
        specific: ModelVersionPolicy.Specific | None = ...,
    ) -> None: ...

class ModelTransactionPolicy(Message):
    decoupled: bool
    def __init__(
        self,
        *,
        decoupled: bool | None = ...,
    ) -> None: ...

class ModelParameter(Message):
    string_value: str
    def __init__(
        self,
        *,
        string_value: str | None = ...,
    ) -> None: ...

class ModelTensorReshape(Message):
    shape: RepeatedScalarFieldContainer[int]
    def __init__(
        self,
        *,
        shape: Iterable[int] | None = ...,
    ) -> None: ...

class ModelInput(Message):
    Format: Any
    FORMAT_NONE: int
    FORMAT_NHWC: int
    FORMAT_NCHW: int
    name: str
    data_type: int
    format: int
    dims: RepeatedScalarFieldContainer[int]
    reshape: ModelTensorReshape
    is_shape_tensor: bool
    allow_ragged_batch: bool
    optional: bool
    is_non_linear_format_io: bool
    def __init__(
        self,
        *,
        name: str | None = ...,
        data_type: int | None = ...,
        format: int | None = ...,
        dims: Iterable[int] | None = ...,
        reshape: ModelTensorReshape | None = ...,
        is_shape_tensor: bool | None = ...,
        allow_ragged_batch: bool | None = ...,
        optional: bool | None = ...,
        is_non_linear_format_io: bool | None = ...,
    ) -> None: ...

class ModelOutput(Message):
    name: str
    data_type: int
    dims: RepeatedScalarFieldContainer[int]
    label_filename: str
    reshape: ModelTensorReshape
    is_shape_tensor: bool
    is_non_linear_format_io: bool
    def __init__(
        self,
        *,
        name: str | None = ...,
        data_type: int | None = ...,
        dims: Iterable[int] | None = ...,
        label_filename: str | None = ...,
        reshape: ModelTensorReshape | None = ...,
        is_shape_tensor: bool | None = ...,
        is_non_linear_format_io: bool | None = ...,
    ) -> None: ...

class BatchInput(Message):
    Kind: Any
    BATCH_ELEMENT_COUNT: int
    BATCH_ACCUMULATED_ELEMENT_COUNT: int
    BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO: int
    BATCH_MAX_ELEMENT_COUNT_AS_SHAPE: int
    BATCH_ITEM_SHAPE: int
    BATCH_ITEM_SHAPE_FLATTEN: int
    kind: int
    target_name: RepeatedScalarFieldContainer[str]
    data_type: int
    source_input: RepeatedScalarFieldContainer[str]
    def __init__(
        self,
        *,
        kind: int | None = ...,
        target_name: Iterable[str] | None = ...,
        data_type: int | None = ...,
        source_input: Iterable[str] | None = ...,
    ) -> None: ...

class BatchOutput(Message):
    Kind: Any
    BATCH_SCATTER_WITH_INPUT_SHAPE: int
    target_name: RepeatedScalarFieldContainer[str]
    kind: int
    source_input: RepeatedScalarFieldContainer[str]
    def __init__(
        self,
        *,
        target_name: Iterable[str] | None = ...,
        kind: int | None = ...,
        source_input: Iterable[str] | None = ...,
    ) -> None: ...

class ModelInstanceGroup(Message):
    Kind: Any
    KIND_AUTO: int
    KIND_GPU: int
    KIND_CPU: int
    KIND_MODEL: int
    class SecondaryDevice(Message):
        SecondaryDeviceKind: Any
        KIND_NVDLA: int
        kind: int
        device_id: int
        def __init__(
            self,
            *,
            kind: int | None = ...,
            device_id: int | None = ...,
        ) -> None: ...
    name: str
    count: int
    gpus: RepeatedScalarFieldContainer[int]
    kind: int
    profile: RepeatedScalarFieldContainer[str]
    rate_limiter: ModelRateLimiter
    passive: bool
    secondary_devices: RepeatedCompositeFieldContainer[ModelInstanceGroup.SecondaryDevice]
    host_policy: str
    def __init__(
        self,
        *,
        name: str | None = ...,
        count: int | None = ...,
        gpus: Iterable[int] | None = ...,
        kind: int | None = ...,
        profile: Iterable[str] | None = ...,
        rate_limiter: ModelRateLimiter | None = ...,
        passive: bool | None = ...,
        secondary_devices: Iterable[ModelInstanceGroup.SecondaryDevice] | None = ...,
        host_policy: str | None = ...,
    ) -> None: ...

class ModelRateLimiter(Message):
    class Resource(Message):
        name: str
        count: int
        def __init__(
            self,
            *,
            name: str | None = ...,
            count: int | None = ...,
        ) -> None: ...
    resources: RepeatedCompositeFieldContainer[ModelRateLimiter.Resource]
    priority: int
    def __init__(
        self,
        *,
        resources: Iterable[ModelRateLimiter.Resource] | None = ...,
        priority: int | None = ...,
    ) -> None: ...

class ModelQueuePolicy(Message):
    TimeoutAction: Any
    REJECT: int
    DELAY: int
    timeout_action: int
    default_timeout_microseconds: int
    allow_timeout_override: bool
    max_queue_size: int
    def __init__(
        self,
        *,
        timeout_action: int | None = ...,
        default_timeout_microseconds: int | None = ...,
        allow_timeout_override: bool | None = ...,
        max_queue_size: int | None = ...,
    ) -> None: ...

class ModelDynamicBatching(Message):
    preferred_batch_size: RepeatedScalarFieldContainer[int]
    max_queue_delay_microseconds: int
    preserve_ordering: bool
    priority_levels: int
    default_priority_level: int
    default_queue_policy: ModelQueuePolicy
    priority_queue_policy: MessageMap[int, ModelQueuePolicy]
    def __init__(
        self,
        *,
        preferred_batch_size: Iterable[int] | None = ...,
        max_queue_delay_microseconds: int | None = ...,
        preserve_ordering: bool | None = ...,
        priority_levels: int | None = ...,
        default_priority_level: int | None = ...,
        default_queue_policy: ModelQueuePolicy | None = ...,
        priority_queue_policy: Mapping[int, ModelQueuePolicy] | None = ...,
    ) -> None: ...

class ModelSequenceBatching(Message):
    class Control(Message):
        Kind: Any
        CONTROL_SEQUENCE_START: int
        CONTROL_SEQUENCE_READY: int
        CONTROL_SEQUENCE_END: int
        CONTROL_SEQUENCE_CORRID: int
        kind: int
        int32_false_true: RepeatedScalarFieldContainer[int]
        fp32_false_true: RepeatedScalarFieldContainer[float]
        data_type: int
        bool_false_true: RepeatedScalarFieldContainer[bool]
        def __init__(
            self,
            *,
            kind: int | None = ...,
            int32_false_true: Iterable[int] | None = ...,
            fp32_false_true: Iterable[float] | None = ...,
            data_type: int | None = ...,
            bool_false_true: Iterable[bool] | None = ...,
        ) -> None: ...
    class ControlInput(Message):
        name: str
        control: RepeatedCompositeFieldContainer[ModelSequenceBatching.Control]
        def __init__(
            self,
            *,
            name: str | None = ...,
            control: Iterable[ModelSequenceBatching.Control] | None = ...,
        ) -> None: ...
    class InitialState(Message):
        data_type: int
        dims: RepeatedScalarFieldContainer[int]
        zero_data: bool
        data_file: str
        name: str
        def __init__(
            self,
            *,
            data_type: int | None = ...,
            dims: Iterable[int] | None = ...,
            zero_data: bool | None = ...,
            data_file: str | None = ...,
            name: str | None = ...,
        ) -> None: ...
    class State(Message):
        input_name: str
        output_name: str
        data_type: int
        dims: RepeatedScalarFieldContainer[int]
        initial_state: RepeatedCompositeFieldContainer[ModelSequenceBatching.InitialState]
        use_same_buffer_for_input_output: bool
        use_growable_memory: bool
        def __init__(
            self,
            *,
            input_name: str | None = ...,
            output_name: str | None = ...,
            data_type: int | None = ...,
            dims: Iterable[int] | None = ...,
            initial_state: Iterable[ModelSequenceBatching.InitialState] | None = ...,
            use_same_buffer_for_input_output: bool | None = ...,
            use_growable_memory: bool | None = ...,
        ) -> None: ...
    class StrategyDirect(Message):
        max_queue_delay_microseconds: int
        minimum_slot_utilization: float
        def __init__(
            self,
            *,
            max_queue_delay_microseconds: int | None = ...,
            minimum_slot_utilization: float | None = ...,
        ) -> None: ...
    class StrategyOldest(Message):
        max_candidate_sequences: int
        preferred_batch_size: RepeatedScalarFieldContainer[int]
        max_queue_delay_microseconds: int
        preserve_ordering: bool
        def __init__(
            self,
            *,
            max_candidate_sequences: int | None = ...,
            preferred_batch_size: Iterable[int] | None = ...,
            max_queue_delay_microseconds: int | None = ...,
            preserve_ordering: bool | None = ...,
        ) -> None: ...
    max_sequence_idle_microseconds: int
    control_input: RepeatedCompositeFieldContainer[ModelSequenceBatching.ControlInput]
    direct: ModelSequenceBatching.StrategyDirect
    oldest: ModelSequenceBatching.StrategyOldest
    state: RepeatedCompositeFieldContainer[ModelSequenceBatching.State]
    iterative_sequence: bool
    def __init__(
        self,
        *,
        max_sequence_idle_microseconds: int | None = ...,
        control_input: Iterable[ModelSequenceBatching.ControlInput] | None = ...,
        direct: ModelSequenceBatching.StrategyDirect | None = ...,
        oldest: ModelSequenceBatching.StrategyOldest | None = ...,
        state: Iterable[ModelSequenceBatching.State] | None = ...,
        iterative_sequence: bool | None = ...,
    ) -> None: ...

class ModelEnsembling(Message):
    class Step(Message):
        model_name: str
        model_version: int
        input_map: ScalarMap[str, str]
        output_map: ScalarMap[str, str]
        model_namespace: str
        def __init__(
            self,
            *,
            model_name: str | None = ...,
            model_version: int | None = ...,
            input_map: Mapping[str, str] | None = ...,
            output_map: Mapping[str, str] | None = ...,
            model_namespace: str | None = ...,
        ) -> None: ...
    step: RepeatedCompositeFieldContainer[ModelEnsembling.Step]
    max_inflight_requests: int
    def __init__(
        self,
        *,
        step: Iterable[ModelEnsembling.Step] | None = ...,
        max_inflight_requests: int | None = ...,
    ) -> None: ...

class ModelWarmup(Message):
    class Input(Message):
        data_type: int
        dims: RepeatedScalarFieldContainer[int]
        zero_data: bool
        random_data: bool
        input_data_file: str
        def __init__(
            self,
            *,
            data_type: int | None = ...,
            dims: Iterable[int] | None = ...,
            zero_data: bool | None = ...,
            random_data: bool | None = ...,
            input_data_file: str | None = ...,
        ) -> None: ...
    name: str
    batch_size: int
    inputs: MessageMap[str, ModelWarmup.Input]
    count: int
    def __init__(
        self,
        *,
        name: str | None = ...,
        batch_size: int | None = ...,
        inputs: Mapping[str, ModelWarmup.Input] | None = ...,
        count: int | None = ...,
    ) -> None: ...

class ModelOptimizationPolicy(Message):
    ModelPriority: Any
    PRIORITY_DEFAULT: int
    PRIORITY_MAX: int
    PRIORITY_MIN: int
    class Graph(Message):
        level: int
        def __init__(
            self,
            *,
            level: int | None = ...,
        ) -> None: ...
    class Cuda(Message):
        class GraphSpec(Message):
            class Shape(Message):
                dim: RepeatedScalarFieldContainer[int]
                def __init__(
                    self,
                    *,
                    dim: Iterable[int] | None = ...,
                ) -> None: ...
            class LowerBound(Message):
                batch_size: int
                input: MessageMap[str, ModelOptimizationPolicy.Cuda.GraphSpec.Shape]
                def __init__(
                    self,
                    *,
                    batch_size: int | None = ...,
                    input: Mapping[str, ModelOptimizationPolicy.Cuda.GraphSpec.Shape] | None = ...,
                ) -> None: ...
            batch_size: int
            input: MessageMap[str, ModelOptimizationPolicy.Cuda.GraphSpec.Shape]
            graph_lower_bound: ModelOptimizationPolicy.Cuda.GraphSpec.LowerBound
            def __init__(
                self,
                *,
                batch_size: int | None = ...,
                input: Mapping[str, ModelOptimizationPolicy.Cuda.GraphSpec.Shape] | None = ...,
                graph_lower_bound: ModelOptimizationPolicy.Cuda.GraphSpec.LowerBound | None = ...,
            ) -> None: ...
        graphs: bool
        busy_wait_events: bool
        graph_spec: RepeatedCompositeFieldContainer[ModelOptimizationPolicy.Cuda.GraphSpec]
        output_copy_stream: bool
        def __init__(
            self,
            *,
            graphs: bool | None = ...,
            busy_wait_events: bool | None = ...,
            graph_spec: Iterable[ModelOptimizationPolicy.Cuda.GraphSpec] | None = ...,
            output_copy_stream: bool | None = ...,
        ) -> None: ...
    class ExecutionAccelerators(Message):
        class Accelerator(Message):
            name: str
            parameters: ScalarMap[str, str]
            def __init__(
                self,
                *,
                name: str | None = ...,
                parameters: Mapping[str, str] | None = ...,
            ) -> None: ...
        gpu_execution_accelerator: RepeatedCompositeFieldContainer[ModelOptimizationPolicy.ExecutionAccelerators.Accelerator]
        cpu_execution_accelerator: RepeatedCompositeFieldContainer[ModelOptimizationPolicy.ExecutionAccelerators.Accelerator]
        def __init__(
            self,
            *,
            gpu_execution_accelerator: Iterable[ModelOptimizationPolicy.ExecutionAccelerators.Accelerator] | None = ...,
            cpu_execution_accelerator: Iterable[ModelOptimizationPolicy.ExecutionAccelerators.Accelerator] | None = ...,
        ) -> None: ...
    class PinnedMemoryBuffer(Message):
        enable: bool
        def __init__(
            self,
            *,
            enable: bool | None = ...,
        ) -> None: ...
    graph: ModelOptimizationPolicy.Graph
    priority: int
    cuda: ModelOptimizationPolicy.Cuda
    execution_accelerators: ModelOptimizationPolicy.ExecutionAccelerators
    input_pinned_memory: ModelOptimizationPolicy.PinnedMemoryBuffer
    output_pinned_memory: ModelOptimizationPolicy.PinnedMemoryBuffer
    gather_kernel_buffer_threshold: int
    eager_batching: bool
    def __init__(
        self,
        *,
        graph: ModelOptimizationPolicy.Graph | None = ...,
        priority: int | None = ...,
        cuda: ModelOptimizationPolicy.Cuda | None = ...,
        execution_accelerators: ModelOptimizationPolicy.ExecutionAccelerators | None = ...,
        input_pinned_memory: ModelOptimizationPolicy.PinnedMemoryBuffer | None = ...,
        output_pinned_memory: ModelOptimizationPolicy.PinnedMemoryBuffer | None = ...,
        gather_kernel_buffer_threshold: int | None = ...,
        eager_batching: bool | None = ...,
    ) -> None: ...

class ModelOperations(Message):
    op_library_filename: RepeatedScalarFieldContainer[str]
    def __init__(
        self,
        *,
        op_library_filename: Iterable[str] | None = ...,
    ) -> None: ...

class ModelRepositoryAgents(Message):
    class Agent(Message):
        name: str
        parameters: ScalarMap[str, str]
        def __init__(
            self,
            *,
            name: str | None = ...,
            parameters: Mapping[str, str] | None = ...,
        ) -> None: ...
    agents: RepeatedCompositeFieldContainer[ModelRepositoryAgents.Agent]
    def __init__(
        self,
        *,
        agents: Iterable[ModelRepositoryAgents.Agent] | None = ...,
    ) -> None: ...

class ModelResponseCache(Message):
    enable: bool
    def __init__(
        self,
        *,
        enable: bool | None = ...,
    ) -> None: ...

class ModelMetrics(Message):
    class MetricControl(Message):
        class MetricIdentifier(Message):
            family: str
            def __init__(
                self,
                *,
                family: str | None = ...,
            ) -> None: ...
        class HistogramOptions(Message):
            buckets: RepeatedScalarFieldContainer[float]
            def __init__(
                self,
                *,
                buckets: Iterable[float] | None = ...,
            ) -> None: ...
        metric_identifier: ModelMetrics.MetricControl.MetricIdentifier
        histogram_options: ModelMetrics.MetricControl.HistogramOptions
        def __init__(
            self,
            *,
            metric_identifier: ModelMetrics.MetricControl.MetricIdentifier | None = ...,
            histogram_options: ModelMetrics.MetricControl.HistogramOptions | None = ...,
        ) -> None: ...
    metric_control: RepeatedCompositeFieldContainer[ModelMetrics.MetricControl]
    def __init__(
        self,
        *,
        metric_control: Iterable[ModelMetrics.MetricControl] | None = ...,
    ) -> None: ...
