"""The results of calls."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torchrelay_client.grpc_predict_v2_pb2 as pb
from torchrelay_client.arrays import Array, from_contents, from_raw


@dataclass(frozen=True, slots=True)
class Answer:
    """`outputs` by name, as numpy arrays (BYTES: objects of type bytes; BF16: float32). `error`: in a conversation,
    why there are none ("" when there are)."""

    outputs: dict[str, Array]
    id: str = ""
    model_name: str = ""
    model_version: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    def __getitem__(self, output: str) -> Array:
        """The array of an output. Raises KeyError that names those there are."""
        try:
            return self.outputs[output]
        except KeyError:
            raise KeyError(f"{output!r}; the outputs are {', '.join(self.outputs) or 'none'}") from None

    def text(self, output: str | None = None) -> str:
        """The BYTES of an output (None: of the only one) as text, elements joined. Raises KeyError for one that isn't
        there, ValueError when it isn't text in UTF-8."""
        if output is None:
            if len(self.outputs) != 1:
                raise KeyError(f"name one of the outputs: {', '.join(self.outputs) or 'there are none'}")
            output = next(iter(self.outputs))
        array = self[output]
        if array.dtype != object:
            raise ValueError(f"output {output!r} has numbers ({array.dtype}), not text")
        return b"".join(array.ravel()).decode()


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that a model takes or gives; -1 in `shape` is any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    name: str
    version: str
    extensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelState:
    """A line of the repository's index. `state`: READY, UNAVAILABLE, LOADING, UNLOADING, or "" for never loaded."""

    name: str
    version: str
    state: str
    reason: str


def answer_of(message: pb.ModelInferResponse) -> Answer:
    """Raises BadTensor for an answer whose bytes and shapes don't agree."""
    raw = iter(message.raw_output_contents)
    outputs = {}
    for one in message.outputs:
        if message.raw_output_contents:
            outputs[one.name] = from_raw(one.name, one.datatype, list(one.shape), next(raw, b""))
        else:
            outputs[one.name] = from_contents(one.name, one.datatype, list(one.shape), one.contents)
    more = parameters_of(message.parameters)
    return Answer(outputs, message.id, message.model_name, message.model_version, more)


def streamed(message: pb.ModelStreamInferResponse) -> Answer:
    """An answer of a conversation, or why there is none."""
    if not message.error_message:
        return answer_of(message.infer_response)
    about = message.infer_response
    return Answer({}, about.id, about.model_name, about.model_version, {}, message.error_message)


def parameters_of(given: Mapping[str, pb.InferParameter]) -> dict[str, Any]:
    chosen = {name: (one, one.WhichOneof("parameter_choice")) for name, one in given.items()}
    return {name: getattr(one, choice) if choice else None for name, (one, choice) in chosen.items()}


def model_metadata(message: pb.ModelMetadataResponse) -> ModelMetadata:
    return ModelMetadata(
        message.name, tuple(message.versions), message.platform, _specs(message.inputs), _specs(message.outputs)
    )


def _specs(tensors: Iterable[pb.ModelMetadataResponse.TensorMetadata]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(one.name, one.datatype, tuple(one.shape)) for one in tensors)


def server_metadata(message: pb.ServerMetadataResponse) -> ServerMetadata:
    return ServerMetadata(message.name, message.version, tuple(message.extensions))


def model_states(message: pb.RepositoryIndexResponse) -> list[ModelState]:
    return [ModelState(one.name, one.version, one.state, one.reason) for one in message.models]
