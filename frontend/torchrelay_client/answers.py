"""The results of calls; values of callers to the protocol's tensors, and answers' tensors to numpy arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import torchrelay_client.grpc_predict_v2_pb2 as pb
from torchrelay_client.grpc_predict_v2_pb2 import InferTensorContents
from ts.protocol.datatypes import DATATYPES, OF_ARRAY_TYPE, OF_FIELD, Datatype
from ts.tensors.types import (
    Array,
    BadTensor,
    Tensor,
    bytes_array,
    datatype,
    decode_raw,
    elements,
    encode_raw,
    narrowed,
    widened,
)

__all__ = ["Array", "BadTensor", "Typed", "encoded", "from_contents", "from_raw"]


@dataclass(frozen=True, slots=True)
class Typed:
    """A value with the datatype it shall have (`"INT32"`, `"BF16"`, …), where the value alone doesn't say. `value` is
    anything numpy makes an array of; for BF16 numbers, which are rounded to the nearest."""

    datatype: str
    value: Any


def encoded(name: str, value: Any) -> tuple[str, list[int], bytes]:
    """Datatype, shape and raw bytes of an input.

    Numpy arrays keep their type and shape, torch tensors too; nested lists become INT64, FP64, BOOL or BYTES; text and
    bytes are BYTES of shape [1]. Raises BadTensor, naming the input, for other values.
    """
    try:
        tensor = _typed(name, value) if isinstance(value, Typed) else _plain(name, value)
    except (BadTensor, ValueError, TypeError, OverflowError) as error:
        raise BadTensor(f"input {name!r}: {error}") from None
    return tensor.datatype, list(tensor.shape), encode_raw(tensor.datatype, tensor.array)


def _plain(name: str, value: Any) -> Tensor:
    kind = OF_ARRAY_TYPE.get(getattr(getattr(value, "dtype", None), "name", ""))
    if kind is not None and kind.as_bits:
        return _of_numbers(name, kind, np.asarray(value).astype(np.float32))
    tensor = Tensor.of(name, value)
    if tensor.array.dtype == object:
        for element in tensor.array.ravel():
            if not isinstance(element, (str, bytes, bytearray, memoryview)):
                raise BadTensor(f"{element!r} is not a number, boolean, string or bytes")
    return tensor


def _typed(name: str, wanted: Typed) -> Tensor:
    kind = datatype(wanted.datatype, "Typed")
    if kind.as_bits:
        return _of_numbers(name, kind, np.asarray(wanted.value, np.float32))
    if kind.name == "BYTES":
        tensor = Tensor.of(name, wanted.value)
        return tensor if tensor.datatype == "BYTES" else Tensor(name, "BYTES", tensor.array.astype(object))
    return Tensor(name, kind.name, np.asarray(wanted.value, kind.dtype))


def _of_numbers(name: str, kind: Datatype, numbers: Array) -> Tensor:
    return Tensor(name, kind.name, narrowed(kind, numbers))


def from_raw(name: str, kind: str, shape: list[int], data: bytes) -> Array:
    """An output's array: BYTES as objects of type bytes, BF16 as float32. A single BYTES element may come without its
    length before it. Raises BadTensor when bytes and shape don't agree."""
    label = f"output {name!r}"
    found = datatype(kind, label)
    if kind == "BYTES" and elements(shape, label) == 1 and not _has_length(data):
        return bytes_array([data], shape)
    return widened(found, decode_raw(found, shape, data, label))


def _has_length(data: bytes) -> bool:
    return len(data) >= 4 and int.from_bytes(data[:4], "little") == len(data) - 4


def from_contents(name: str, kind: str, shape: list[int], contents: InferTensorContents) -> Array:
    """The array of an output with typed contents. Without a datatype: of the field that has elements, in one row."""
    filled = [(field.name, values) for field, values in contents.ListFields()]
    field, values = filled[0] if filled else ("", [])
    if kind == "BYTES" or field == "bytes_contents":
        return bytes_array(list(values), shape or [len(values)])
    dtype = datatype(kind, f"output {name!r}").dtype if kind else OF_FIELD.get(field, DATATYPES["FP32"]).dtype
    try:
        return np.array(values, dtype).reshape(tuple(shape) if shape or kind else (-1,))
    except ValueError as error:
        raise BadTensor(f"output {name!r}: {error}") from None


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
