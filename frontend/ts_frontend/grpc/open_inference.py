"""The door `GRPCInferenceService`: the Open Inference Protocol for the clients of Triton, KServe, MLServer, Dynamo, MAX
and aiSSEMBLE (protos/open_inference.proto, docs/open-inference.md).

The messages of a request and of its answers pass through as bytes: the worker reads and writes them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from ts.protocol import open_inference_pb2 as pb
from ts.protocol.frames import Input
from ts_frontend.errors import HandlerFailed, InvalidArgument
from ts_frontend.grpc.call import Call, Method, RequestIds, Shape, identified, response_metadata
from ts_frontend.grpc.tensor_streams import FIRST, StreamDialect, converse
from ts_frontend.job import FedJob, Job
from ts_frontend.models.health import Health
from ts_frontend.models.registry import Registry
from ts_frontend.models.signature import TensorSpec
from ts_frontend.open_inference import models as tensor_models
from ts_frontend.open_inference import requests as tensor_requests
from ts_frontend.open_inference.heads import head_of_message
from ts_frontend.open_inference.requests import joined_messages
from ts_frontend.open_inference.shared_memory import Regions
from ts_frontend.scheduling.sequence_queue import SequenceHeaders

SERVICE = "inference.GRPCInferenceService"
#: The same service under the names that other servers gave it.
ALIASES = ("inference.GrpcInferenceService", "org.pytorch.serve.grpc.openinference.GRPCInferenceService")

M = TypeVar("M", bound=Message)


def message(kind: type[M], data: bytes) -> M:
    """The message in `data`. InvalidArgument, naming its type, for anything else."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise InvalidArgument(
            f"The {len(data)} bytes of the request are not a {kind.DESCRIPTOR.name}: {error}"
        ) from None


class OpenInferenceService:
    """Health, metadata and inference; the repository's methods are in `repository.py`. `keys`: the headers that tell
    models with sequences where a request belongs."""

    def __init__(
        self,
        models: Registry,
        health: Health,
        about: tensor_models.About,
        dialect: StreamDialect,
        regions: Regions,
        keys: SequenceHeaders,
    ) -> None:
        self._models = models
        self._health = health
        self._about = about
        self._dialect = dialect
        self._regions = regions
        self._keys = keys
        self._ids = RequestIds()

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
        return pb.ServerReadyResponse(ready=self._health.ready).SerializeToString()

    async def model_ready(self, call: Call, data: bytes) -> bytes:
        request = message(pb.ModelReadyRequest, data)
        ready = tensor_models.is_ready(self._models, request.name, request.version)
        return pb.ModelReadyResponse(ready=ready).SerializeToString()

    async def server_metadata(self, call: Call, data: bytes) -> bytes:
        return pb.ServerMetadataResponse(
            name=self._about.name, version=self._about.version, extensions=tensor_models.extensions(self._regions)
        ).SerializeToString()

    async def model_metadata(self, call: Call, data: bytes) -> bytes:
        request = message(pb.ModelMetadataRequest, data)
        model = tensor_models.find(self._models, request.name, request.version)
        signature = model.signature
        return pb.ModelMetadataResponse(
            name=model.name,
            versions=[one.version for one in self._models.versions(model.name)],
            platform=signature.platform,
            inputs=map(_tensor_metadata, signature.inputs),
            outputs=map(_tensor_metadata, signature.outputs),
        ).SerializeToString()

    # --- inference

    def _submit(self, call: Call, data: bytes, request: pb.ModelInferRequest, form: str, stream: bool = True) -> Job:
        """`stream`: its answers are passed on as they come; else all of them may take max_response_size."""
        if not request.model_name:
            raise InvalidArgument("model_name is empty: name the model to ask")
        model = tensor_models.find(self._models, request.model_name, request.model_version)
        headers, request_id = identified(call, self._ids)
        deadline_s = call.deadline_s
        if request.parameters:
            given = tensor_requests.of_message(request)
            headers, deadline_s = tensor_requests.scheduled(model, given, headers, deadline_s, self._keys)
        return model.submit(
            [Input("", f"\0{form}{self._regions.option(data)}", data)],
            headers=headers,
            deadline_s=deadline_s,
            request_id=request_id,
            stream=stream,
            version_named=bool(request.model_version),
        )

    async def model_infer(self, call: Call, data: bytes) -> bytes:
        """One ModelInferRequest -> one ModelInferResponse; the texts of a streamed answer are joined."""
        request = head_of_message(data)
        answer = self._submit(call, data, request, "grpc", stream=False)
        try:
            pieces = await answer.pieces()
        except HandlerFailed as error:
            raise tensor_models.coded(error) from None
        if answer.headers:
            call.trailing.extend(response_metadata(200, answer.headers))
        return bytes(pieces[0]) if len(pieces) == 1 else joined_messages([bytes(piece) for piece in pieces])

    async def model_infer_stream(self, call: Call, data: bytes) -> AsyncIterator[Sequence[bytes]]:
        """One ModelInferRequest -> a ModelInferResponse for every piece the handler sends (MAX)."""
        answer = self._submit(call, data, head_of_message(data), "grpc;stream")
        try:
            async for pieces in answer.chunks():
                yield [bytes(piece) for piece in pieces if len(piece)]
        except HandlerFailed as error:
            raise tensor_models.coded(error) from None
        finally:
            answer.cancel()

    def model_stream_infer(self, call: Call, requests: AsyncIterator[bytes]) -> AsyncIterator[Sequence[bytes]]:
        """ModelInferRequests -> the answers of each, in the dialect of the stream (`tensor_streams.py`)."""

        def start(data: bytes, request: pb.ModelInferRequest, form: str) -> Job:
            return self._submit(call, data, request, form)

        def begin(data: bytes, request: pb.ModelInferRequest) -> FedJob | None:
            if not request.model_name:
                return None
            model = tensor_models.find(self._models, request.model_name, request.model_version)
            if not model.takes_streams:
                return None
            headers, request_id = identified(call, self._ids)
            return model.open_stream(
                [Input("", f"\0{FIRST}", data)],
                headers=headers,
                deadline_s=call.deadline_s,
                request_id=request_id,
                version_named=bool(request.model_version),
            )

        def interleaves(request: pb.ModelInferRequest) -> bool:
            return tensor_models.find(self._models, request.model_name, request.model_version).streams

        return converse(call, requests, self._dialect, start, interleaves, begin)


def _tensor_metadata(spec: TensorSpec) -> pb.ModelMetadataResponse.TensorMetadata:
    found = pb.ModelMetadataResponse.TensorMetadata(name=spec.name, datatype=spec.datatype, shape=spec.shape)
    for name, value in spec.parameters.items():
        set_parameter(found.parameters[name], value)
    return found


def set_parameter(parameter: Any, value: Any) -> None:
    """A parameter's value; what has no field of its own is text."""
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int):
        parameter.int64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        parameter.string_param = str(value)
