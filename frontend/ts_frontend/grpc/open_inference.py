"""The service `GRPCInferenceService`: the Open Inference Protocol for the clients of Triton, KServe, MLServer, Dynamo,
MAX and aiSSEMBLE (protos/open_inference.proto, docs/open-inference.md), with the repository's methods and Triton's
extensions: shared memory, the settings of logs and traces, statistics.

The messages of a request and of its answers pass through as bytes: the worker reads and writes them. KServe's clients
put the model's name into the field that is the repository's name for Triton's. Both get the answer of KServe, whose
additional fields Triton's clients skip.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from ts.protocol import open_inference_pb2 as pb
from ts.protocol.frames import Buffer, Input
from ts_frontend.errors import HandlerFailed, InvalidArgument, MessageTooLarge, ServeError
from ts_frontend.grpc.call import Call, Method, Shape, identified, response_metadata
from ts_frontend.job import FedJob, Job, RequestIds
from ts_frontend.limits.clients import counting_items
from ts_frontend.models.health import Health
from ts_frontend.models.model import Registry
from ts_frontend.models.repository import Repository
from ts_frontend.models.settings import TensorSpec
from ts_frontend.open_inference import models as tensor_models
from ts_frontend.open_inference import requests as tensor_requests
from ts_frontend.open_inference.models import (
    LoadParameters,
    LogSettings,
    TraceSettings,
    config_of,
    load_parameters,
    statistics_of,
    unloads_dependents,
)
from ts_frontend.open_inference.requests import (
    Regions,
    check_cuda,
    check_fields,
    head_of_message,
    items_of_message,
    joined_messages,
    refuse_cuda,
    value_of,
)
from ts_frontend.scheduling.queues import SequenceHeaders
from ts_frontend.scheduling.stream import Multiplexer, StreamRequest, chunks

SERVICE = "inference.GRPCInferenceService"
#: The same service under the names that other servers gave it.
ALIASES = ("inference.GrpcInferenceService", "org.pytorch.serve.grpc.openinference.GRPCInferenceService")

#: Metadata keys: a stream's dialect, and Triton's key with which failures end the stream.
DIALECT_KEY, STATUS_KEY = "oip-stream-dialect", "triton_grpc_error"
#: Triton's parameters: a request's wish for an empty final answer, and the mark of a final answer.
EMPTY_FINAL, FINAL = "triton_enable_empty_final_response", "triton_final_response"
#: The forms in which the worker reads and answers the requests of a stream; the forms of the first request, and of
#: later ones in the same handler call.
TRITON_FORM, MLSERVER_FORM = "grpc;stream;triton", "grpc;stream;status"
FIRST_FORM, FOLLOWING_FORM = "grpc;stream;more", "grpc;stream"
#: This number of well-formed elements isn't a coincidence.
ELEMENTS_SEEN_MAX = 256

M = TypeVar("M", bound=Message)


#: The most bytes of a request that isn't an inference: names, settings, regions.
SMALL_BYTES_MAX = 256 * 1024


def message(kind: type[M], data: bytes, *, bytes_max: int = SMALL_BYTES_MAX) -> M:
    """The message in `data`. Raises InvalidArgument, naming the type, and MessageTooLarge."""
    if len(data) > bytes_max:
        raise MessageTooLarge(
            f"A {kind.DESCRIPTOR.name} of {len(data)} bytes is too large: it may have {bytes_max} bytes"
        )
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise InvalidArgument(
            f"The {len(data)} bytes of the request are not a {kind.DESCRIPTOR.name}: {error}"
        ) from None


@dataclass(eq=False)
class OpenInferenceService:
    """Health, metadata and inference; the repository's methods are those of `RepositoryService`. `keys`: the names of
    the headers for models with sequences."""

    models: Registry
    health: Health
    about: tensor_models.About
    dialect: StreamDialect
    regions: Regions
    keys: SequenceHeaders
    _ids: RequestIds = field(default_factory=RequestIds, init=False)

    def methods(self) -> tuple[Method, ...]:
        unary = {
            "ServerLive": self.server_live,
            "ServerReady": self.server_ready,
            "ModelReady": self.model_ready,
            "ServerMetadata": self.server_metadata,
            "ModelMetadata": self.model_metadata,
            "ModelInfer": self.model_infer,
        }
        return (
            *(
                Method(f"/{service}/{name}", Shape.UNARY, run)
                for service in (SERVICE, *ALIASES)
                for name, run in unary.items()
            ),
            Method(f"/{SERVICE}/ModelStreamInfer", Shape.BIDI, self.model_stream_infer),
            Method(f"/{SERVICE}/ModelInferStream", Shape.SERVER_STREAM, self.model_infer_stream),
        )

    # --- health and metadata

    async def server_live(self, call: Call, data: bytes) -> bytes:
        return pb.ServerLiveResponse(live=True).SerializeToString()

    async def server_ready(self, call: Call, data: bytes) -> bytes:
        return pb.ServerReadyResponse(ready=self.health.ready).SerializeToString()

    async def model_ready(self, call: Call, data: bytes) -> bytes:
        request = message(pb.ModelReadyRequest, data)
        ready = not self.health.draining and tensor_requests.is_ready(self.models, request.name, request.version)
        return pb.ModelReadyResponse(ready=ready).SerializeToString()

    async def server_metadata(self, call: Call, data: bytes) -> bytes:
        return pb.ServerMetadataResponse(
            name=self.about.name, version=self.about.version, extensions=tensor_models.extensions(self.regions)
        ).SerializeToString()

    async def model_metadata(self, call: Call, data: bytes) -> bytes:
        request = message(pb.ModelMetadataRequest, data)
        model = tensor_requests.find(self.models, request.name, request.version)
        signature = model.signature
        return pb.ModelMetadataResponse(
            name=model.name,
            versions=[one.version for one in self.models.versions(model.name)],
            platform=signature.platform,
            inputs=map(_tensor_metadata, signature.inputs),
            outputs=map(_tensor_metadata, signature.outputs),
        ).SerializeToString()

    # --- inference

    def submit(self, call: Call, data: bytes, request: pb.ModelInferRequest, form: str, stream: bool = True) -> Job:
        """Submits a request, whose head is `request`. `form`: how the worker reads it and writes its answers; `stream`:
        answers are sent as they come; otherwise max_response_size limits all of them together."""
        if not request.model_name:
            raise InvalidArgument("model_name is empty: name the model to ask")
        model = tensor_requests.find(self.models, request.model_name, request.model_version)
        own = counting_items()
        if own is not None:
            own.items = items_of_message(data) if model.takes_batches else 1
        headers, request_id = identified(call, self._ids)
        deadline_s = call.deadline_s
        if request.parameters:
            given = tensor_requests.of_parameters(request.parameters)
            headers, deadline_s = tensor_requests.scheduled(model, given, headers, deadline_s, self.keys)
        return model.submit(
            [Input("", f"\0{form}{self.regions.option(data)}", data)],
            headers=headers,
            deadline_s=deadline_s,
            request_id=request_id,
            stream=stream,
            version_named=bool(request.model_version),
        )

    def open_stream(self, call: Call, data: bytes, request: pb.ModelInferRequest) -> FedJob | None:
        """The job of a stream that begins with this request; None if the model's handler takes single requests."""
        if not request.model_name:
            return None
        model = tensor_requests.find(self.models, request.model_name, request.model_version)
        if not model.takes_streams:
            return None
        headers, request_id = identified(call, self._ids)
        return model.open_stream(
            [Input("", f"\0{FIRST_FORM}", data)],
            headers=headers,
            deadline_s=call.deadline_s,
            request_id=request_id,
            version_named=bool(request.model_version),
        )

    def answers_mix(self, request: pb.ModelInferRequest) -> bool:
        """Whether answers to several requests of the model may interleave; False for an unknown model."""
        try:
            return tensor_requests.find(self.models, request.model_name, request.model_version).streams
        except ServeError:
            return False

    async def model_infer(self, call: Call, data: bytes) -> bytes:
        answer = self.submit(call, data, head_of_message(data), "grpc", stream=False)
        try:
            pieces = await answer.pieces()
        except HandlerFailed as error:
            raise tensor_models.coded(error) from None
        if answer.headers:
            call.trailing.extend(response_metadata(200, answer.headers))
        return bytes(pieces[0]) if len(pieces) == 1 else joined_messages([bytes(piece) for piece in pieces])

    async def model_infer_stream(self, call: Call, data: bytes) -> AsyncIterator[Sequence[bytes]]:
        """One ModelInferRequest -> a ModelInferResponse for every piece the handler sends (MAX)."""
        answer = self.submit(call, data, head_of_message(data), "grpc;stream")
        try:
            async for pieces in chunks(answer):
                yield [bytes(piece) for piece in pieces if len(piece)]
        except HandlerFailed as error:
            raise tensor_models.coded(error) from None
        finally:
            answer.cancel()

    def model_stream_infer(self, call: Call, requests: AsyncIterator[bytes]) -> AsyncIterator[Sequence[bytes]]:
        return Multiplexer("ModelStreamInfer", _TensorStream(self, call, self.dialect).accept).answers(requests)


def _tensor_metadata(spec: TensorSpec) -> pb.ModelMetadataResponse.TensorMetadata:
    found = pb.ModelMetadataResponse.TensorMetadata(name=spec.name, datatype=spec.datatype, shape=spec.shape)
    for name, value in spec.parameters.items():
        set_parameter(found.parameters[name], value)
    return found


def set_parameter(parameter: Any, value: Any) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int):
        parameter.int64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        parameter.string_param = str(value)


# --- ModelStreamInfer


class StreamDialect(Enum):
    """The server whose answers a stream imitates. `triton`: every answer in a ModelStreamInferResponse, failures as
    messages; `mlserver`: plain ModelInferResponses, and the first failure ends the stream with its status."""

    AUTO = "auto"
    TRITON = "triton"
    MLSERVER = "mlserver"


def dialect_of(call: Call, request: pb.ModelInferRequest, configured: StreamDialect) -> StreamDialect:
    """A stream's dialect, by its metadata, the setting, or its first request. Raises InvalidArgument."""
    named = call.value(DIALECT_KEY)
    if named is not None:
        if named not in (StreamDialect.TRITON.value, StreamDialect.MLSERVER.value):
            raise InvalidArgument(f"{DIALECT_KEY} is triton or mlserver, not {named!r}")
        return StreamDialect(named)
    if configured is not StreamDialect.AUTO:
        return configured
    if call.value(STATUS_KEY) is not None or EMPTY_FINAL in request.parameters:
        return StreamDialect.TRITON
    typed = any(tensor.HasField("contents") for tensor in request.inputs)
    return StreamDialect.MLSERVER if typed or _has_bare_bytes(request) else StreamDialect.TRITON


def _has_bare_bytes(request: pb.ModelInferRequest) -> bool:
    """Whether a BYTES input's raw content has no length prefixes (as from Dynamo's sample clients)."""
    for tensor, data in zip(request.inputs, request.raw_input_contents, strict=False):
        if tensor.datatype == "BYTES" and not _is_prefixed(data):
            return True
    return False


def _is_prefixed(data: bytes) -> bool:
    at = 0
    for _ in range(ELEMENTS_SEEN_MAX):
        if at + 4 > len(data):
            return at == len(data)
        at += 4 + int.from_bytes(data[at : at + 4], "little")
    return True


class _TensorStream:
    """The requests of one ModelStreamInfer call. The first one determines the dialect."""

    def __init__(self, service: OpenInferenceService, call: Call, configured: StreamDialect) -> None:
        self._service, self._call, self._configured = service, call, configured
        self._dialect = StreamDialect.AUTO

    def accept(self, data: bytes) -> StreamRequest:
        first = self._dialect is StreamDialect.AUTO
        request = head_of_message(data, forms=first)
        if first:
            self._dialect = dialect_of(self._call, request, self._configured)
        if self._dialect is StreamDialect.TRITON:
            return _TritonRequest(self._service, self._call, data, request)
        asked = _MLServerRequest(self._service, self._call, data, request)
        asked.first = first
        return asked


class _TensorRequest(StreamRequest):
    """A request of a stream."""

    def __init__(self, service: OpenInferenceService, call: Call, data: bytes, request: pb.ModelInferRequest) -> None:
        self._service, self._call, self._data, self._request = service, call, data, request

    def answers(self, job: Job, pieces: list[Buffer]) -> list[bytes]:
        return [bytes(piece) for piece in pieces if len(piece)]


class _TritonRequest(_TensorRequest):
    """A request answered in order of arrival, unless its model's answers may interleave."""

    def __init__(self, service: OpenInferenceService, call: Call, data: bytes, request: pb.ModelInferRequest) -> None:
        super().__init__(service, call, data, request)
        self._ends_failed = call.value(STATUS_KEY) == "true"
        self.lane = None if service.answers_mix(request) else "in order"

    def start(self) -> Job:
        form = f"{TRITON_FORM};status" if self._ends_failed else TRITON_FORM
        return self._service.submit(self._call, self._data, self._request, form)

    def failure(self, error: ServeError, started: bool) -> bytes | ServeError:
        if self._ends_failed:
            return _coded(error)
        message = pb.ModelStreamInferResponse(error_message=error.told())
        message.infer_response.id = self._request.id
        if started:  # the handler has started: this is its last answer
            message.infer_response.model_name = self._request.model_name
            message.infer_response.parameters[FINAL].bool_param = True
        return message.SerializeToString()


class _MLServerRequest(_TensorRequest):
    """A request answered in order of arrival. One handler call takes the whole stream if it can (`FedJob`), `first`
    being its first request."""

    lane, first = "in order", False

    def start(self) -> Job:
        whole = self._service.open_stream(self._call, self._data, self._request) if self.first else None
        return whole or self._service.submit(self._call, self._data, self._request, MLSERVER_FORM)

    def following(self, data: bytes) -> Sequence[Input]:
        return [Input("", f"\0{FOLLOWING_FORM}", data)]

    def answered(self, job: Job) -> None:
        """Sends the headers of the last answer as the stream's trailing metadata."""
        if job.headers:
            self._call.trailing[:] = response_metadata(200, job.headers)

    def failure(self, error: ServeError, started: bool) -> ServeError:
        return _coded(error)


def _coded(error: ServeError) -> ServeError:
    return tensor_models.coded(error) if isinstance(error, HandlerFailed) else error


#: MLServer's separate service with the same methods.
MLSERVER_SERVICE = "inference.model_repository.ModelRepositoryService"


class RepositoryService:
    """The repository's methods; `managing` are those that change the served models."""

    def __init__(self, repository: Repository, models: Registry) -> None:
        self._repository = repository
        self._models = models

    def methods(self) -> tuple[Method, ...]:
        index = tuple(
            Method(f"/{service}/RepositoryIndex", Shape.UNARY, self.index) for service in (SERVICE, MLSERVER_SERVICE)
        )
        return (*index, Method(f"/{SERVICE}/ModelConfig", Shape.UNARY, self.config))

    def managing(self) -> tuple[Method, ...]:
        return tuple(
            Method(f"/{service}/{name}", Shape.UNARY, run)
            for service in (SERVICE, MLSERVER_SERVICE)
            for name, run in (("RepositoryModelLoad", self.load), ("RepositoryModelUnload", self.unload))
        )

    async def index(self, call: Call, data: bytes) -> bytes:
        request = message(pb.RepositoryIndexRequest, data)
        found = [
            pb.RepositoryIndexResponse.ModelIndex(
                name=one.name, version=one.version, state=one.state, reason=one.reason
            )
            for one in await self._repository.index(request.ready)
        ]
        return pb.RepositoryIndexResponse(models=found).SerializeToString()

    async def config(self, call: Call, data: bytes) -> bytes:
        request = message(pb.ModelConfigRequest, data)
        found = config_of(self._models, request.name, request.version)
        return pb.ModelConfigResponse(config=found).SerializeToString()

    async def load(self, call: Call, data: bytes) -> bytes:
        name, parameters = await asyncio.to_thread(load_asked, data)
        await self._repository.load(name, *parameters)
        return pb.RepositoryModelLoadResponse(model_name=name, isLoaded=True).SerializeToString()

    async def unload(self, call: Call, data: bytes) -> bytes:
        request = message(pb.RepositoryModelUnloadRequest, data)
        name = _name(request)
        given = {key: value_of(parameter) for key, parameter in request.parameters.items()}
        await self._repository.unload(name, dependents=unloads_dependents(given))
        return pb.RepositoryModelUnloadResponse(model_name=name, isUnloaded=True).SerializeToString()


def load_asked(data: bytes) -> tuple[str, LoadParameters]:
    """Returns the model's name and the load parameters of a RepositoryModelLoadRequest. Raises InvalidArgument,
    MessageTooLarge. To be called in a thread, since its files may be large."""
    check_fields(data, "RepositoryModelLoadRequest")
    request = message(pb.RepositoryModelLoadRequest, data, bytes_max=len(data))
    given = {key: value_of(parameter) for key, parameter in request.parameters.items()}
    return _name(request), load_parameters(given)


def _name(request: pb.RepositoryModelLoadRequest | pb.RepositoryModelUnloadRequest) -> str:
    name = request.model_name or request.repository_name
    if not name:
        raise InvalidArgument("model_name is empty: name the model")
    return name


class TritonService:
    """Regions of system shared memory that clients register for their tensors, where that is allowed, and statistics of
    the models, in which a request counts once, regardless of its batch dimension."""

    def __init__(self, models: Registry, regions: Regions) -> None:
        self._models, self._regions = models, regions

    def methods(self) -> tuple[Method, ...]:
        own = {
            "ModelStatistics": self.statistics,
            "SystemSharedMemoryStatus": self.status,
            "SystemSharedMemoryRegister": self.register,
            "SystemSharedMemoryUnregister": self.unregister,
            "CudaSharedMemoryStatus": self.cuda_status,
            "CudaSharedMemoryRegister": self.cuda_register,
            "CudaSharedMemoryUnregister": self.cuda_unregister,
        }
        return tuple(Method(f"/{SERVICE}/{name}", Shape.UNARY, run) for name, run in own.items())

    async def statistics(self, call: Call, data: bytes) -> bytes:
        request = message(pb.ModelStatisticsRequest, data)
        return statistics_of(self._models, request.name, request.version).SerializeToString()

    async def status(self, call: Call, data: bytes) -> bytes:
        request = message(pb.SystemSharedMemoryStatusRequest, data)
        answer = pb.SystemSharedMemoryStatusResponse()
        for one in self._regions.status(request.name):
            found = answer.regions[one.name]
            found.name, found.key, found.offset, found.byte_size = one
        return answer.SerializeToString()

    async def register(self, call: Call, data: bytes) -> bytes:
        request = message(pb.SystemSharedMemoryRegisterRequest, data)
        self._regions.register(request.name, request.key, request.offset, request.byte_size)
        return b""

    async def unregister(self, call: Call, data: bytes) -> bytes:
        self._regions.unregister(message(pb.SystemSharedMemoryUnregisterRequest, data).name)
        return b""

    async def cuda_status(self, call: Call, data: bytes) -> bytes:
        """Answers with an empty list: CUDA regions are never registered."""
        check_cuda(message(pb.CudaSharedMemoryStatusRequest, data).name)
        return b""

    async def cuda_register(self, call: Call, data: bytes) -> bytes:
        refuse_cuda()

    async def cuda_unregister(self, call: Call, data: bytes) -> bytes:
        """Does nothing: Triton's clients unregister all regions before they begin."""
        return b""


class SettingsService:
    """The settings of logs and traces that clients may change."""

    def __init__(self, logs: LogSettings, traces: TraceSettings) -> None:
        self._logs, self._traces = logs, traces

    def methods(self) -> tuple[Method, ...]:
        return (
            Method(f"/{SERVICE}/LogSettings", Shape.UNARY, self.log_settings),
            Method(f"/{SERVICE}/TraceSetting", Shape.UNARY, self.trace_setting),
        )

    async def log_settings(self, call: Call, data: bytes) -> bytes:
        request = message(pb.LogSettingsRequest, data)
        given = {name: value_of(setting) for name, setting in request.settings.items()}
        answer = pb.LogSettingsResponse()
        for name, value in self._logs.change(given).items():
            field = {bool: "bool_param", int: "uint32_param"}.get(type(value), "string_param")
            setattr(answer.settings[name], field, value)
        return answer.SerializeToString()

    async def trace_setting(self, call: Call, data: bytes) -> bytes:
        request = message(pb.TraceSettingRequest, data)
        given = {name: list(setting.value) for name, setting in request.settings.items()}
        answer = pb.TraceSettingResponse()
        for name, values in self._traces.change(given, request.model_name).items():
            answer.settings[name].value.extend(values)
        return answer.SerializeToString()
