"""Each call once, for both clients: its path, its message, and how its answer is read."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torchrelay_client.grpc_predict_v2_pb2 as pb
from torchrelay_client.answers import (
    Answer,
    ModelMetadata,
    ModelState,
    ServerMetadata,
    answer_of,
    encoded,
    model_metadata,
    model_states,
    server_metadata,
    streamed,
)
from torchrelay_client.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub as Paths
from ts_frontend.protos.inference_pb2 import PredictionResponse, PredictionsRequest
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub as TorchServePaths

T = TypeVar("T")
UNARY, STREAM, CONVERSATION = "unary_unary", "unary_stream", "stream_stream"
#: The header with the request id, by which servers log calls.
REQUEST_ID = "x-request-id"
TRITON_DIALECT = (("oip-stream-dialect", "triton"),)

Data = bytes | str | Mapping[str, bytes | str]


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A gRPC call. `safe`: repeating it does no harm, so it may always be retried."""

    path: str
    message: Any
    answer: Callable[[bytes], Any]
    read: Callable[[Any], T]
    arity: str = UNARY
    safe: bool = False
    metadata: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a conversation; `inputs` and the rest as in `Client.infer`."""

    model: str
    inputs: Mapping[str, Any]
    version: str = ""
    id: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    outputs: Sequence[str] = ()

    def message(self) -> pb.ModelInferRequest:
        """Raises BadTensor for a value that is no tensor, ValueError for a parameter of another type."""
        made = pb.ModelInferRequest(model_name=self.model, model_version=self.version, id=self.id or uuid.uuid4().hex)
        for name, value in self.inputs.items():
            datatype, shape, raw = encoded(name, value)
            made.inputs.add(name=name, datatype=datatype, shape=shape)
            made.raw_input_contents.append(raw)
        for output in self.outputs:
            made.outputs.add(name=output)
        for name, value in self.parameters.items():
            made.parameters[name].CopyFrom(_parameter(name, value))
        return made


_KINDS = ((bool, "bool_param"), (int, "int64_param"), (float, "double_param"), (str, "string_param"))


def _parameter(name: str, value: Any) -> pb.InferParameter:
    for kind, choice in _KINDS:
        if isinstance(value, kind):
            return pb.InferParameter(**{choice: value})  # type: ignore[arg-type]
    raise ValueError(f"parameter {name!r}: {value!r} is not a bool, an int, a float or a text")


# --- the Open Inference Protocol


def live() -> Call[bool]:
    return Call(Paths.ServerLive_PATH, pb.ServerLiveRequest(), pb.ServerLiveResponse.FromString, _live, safe=True)


def ready() -> Call[bool]:
    return Call(Paths.ServerReady_PATH, pb.ServerReadyRequest(), pb.ServerReadyResponse.FromString, _ready, safe=True)


def model_ready(model: str, version: str) -> Call[bool]:
    message = pb.ModelReadyRequest(name=model, version=version)
    return Call(Paths.ModelReady_PATH, message, pb.ModelReadyResponse.FromString, _ready, safe=True)


def about_server() -> Call[ServerMetadata]:
    path, answer = Paths.ServerMetadata_PATH, pb.ServerMetadataResponse.FromString
    return Call(path, pb.ServerMetadataRequest(), answer, server_metadata, safe=True)


def about_model(model: str, version: str) -> Call[ModelMetadata]:
    message = pb.ModelMetadataRequest(name=model, version=version)
    path, answer = Paths.ModelMetadata_PATH, pb.ModelMetadataResponse.FromString
    return Call(path, message, answer, model_metadata, safe=True)


def infer(request: Request, metadata: Sequence[tuple[str, str]] = ()) -> Call[Answer]:
    made = request.message()
    path, answer = Paths.ModelInfer_PATH, pb.ModelInferResponse.FromString
    return Call(path, made, answer, answer_of, metadata=(*_identified(made.id), *metadata))


def stream(request: Request) -> Call[Answer]:
    made = request.message()
    path, answer = Paths.ModelInferStream_PATH, pb.ModelInferResponse.FromString
    return Call(path, made, answer, answer_of, STREAM, metadata=_identified(made.id))


def converse(messages: Any) -> Call[Answer]:
    """`messages`: an iterator, or an async one, of ModelInferRequests."""
    path, answer = Paths.ModelStreamInfer_PATH, pb.ModelStreamInferResponse.FromString
    return Call(path, messages, answer, streamed, CONVERSATION, metadata=TRITON_DIALECT)


def _identified(request_id: str) -> tuple[tuple[str, str], ...]:
    fits = request_id.isascii() and request_id.isprintable() and " " not in request_id
    return ((REQUEST_ID, request_id),) if fits else ()


# --- the repository


def models(only_ready: bool) -> Call[list[ModelState]]:
    path, answer = Paths.RepositoryIndex_PATH, pb.RepositoryIndexResponse.FromString
    return Call(path, pb.RepositoryIndexRequest(ready=only_ready), answer, model_states, safe=True)


def load(model: str, path: str, config: str) -> Call[None]:
    given = {"model_path": path, "config": config}
    more = {name: pb.ModelRepositoryParameter(string_param=value) for name, value in given.items() if value}
    message = pb.RepositoryModelLoadRequest(model_name=model, parameters=more)
    return Call(Paths.RepositoryModelLoad_PATH, message, pb.RepositoryModelLoadResponse.FromString, _nothing)


def unload(model: str) -> Call[None]:
    message = pb.RepositoryModelUnloadRequest(model_name=model)
    return Call(Paths.RepositoryModelUnload_PATH, message, pb.RepositoryModelUnloadResponse.FromString, _nothing)


# --- TorchServe's predictions


def predict(model: str, data: Data, version: str) -> Call[bytes]:
    message, answer = _prediction(model, data, version), PredictionResponse.FromString
    return Call(TorchServePaths.Predictions_PATH, message, answer, _predicted)


def predict_stream(model: str, data: Data, version: str) -> Call[bytes]:
    message, answer = _prediction(model, data, version), PredictionResponse.FromString
    return Call(TorchServePaths.StreamPredictions_PATH, message, answer, _predicted, STREAM)


def _prediction(model: str, data: Data, version: str) -> PredictionsRequest:
    rows = data if isinstance(data, Mapping) else {"data": data}
    body = {name: value.encode() if isinstance(value, str) else bytes(value) for name, value in rows.items()}
    return PredictionsRequest(model_name=model, model_version=version, input=body)


def _predicted(message: PredictionResponse) -> bytes:
    return message.prediction


def _live(message: pb.ServerLiveResponse) -> bool:
    return message.live


def _ready(message: pb.ServerReadyResponse | pb.ModelReadyResponse) -> bool:
    return message.ready


def _nothing(message: object) -> None:
    return None
