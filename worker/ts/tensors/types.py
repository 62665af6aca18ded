"""A tensor request and its answer, as handlers and adapters see them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ts.protocol.datatypes import DATATYPES, OF_ARRAY_TYPE
from ts.tensors.datatypes import Array, datatype_of, widened


@dataclass(slots=True)
class Tensor:
    """`array` has the shape; BYTES are objects of type bytes, BF16 the 16 bits of each element as uint16 (`numbers`:
    as float32)."""

    name: str
    datatype: str
    array: Array
    parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def numbers(self) -> Array:
        """The elements as numpy's numbers, those of BF16 as float32."""
        return widened(DATATYPES[self.datatype], self.array)

    def as_torch(self) -> Any:
        """The elements as a tensor of torch's on the CPU, which may share their memory. Not for BYTES."""
        import torch

        kind, found = DATATYPES[self.datatype], torch.from_numpy(np.ascontiguousarray(self.array))
        return found.view(getattr(torch, kind.array_type)) if kind.as_bits else found

    @classmethod
    def of(cls, name: str, value: Any, **parameters: Any) -> Tensor:
        """A tensor of an array, a torch tensor, nested lists, text or bytes. Raises BadTensor for what is none."""
        if isinstance(value, (str, bytes, bytearray, memoryview)):
            array = np.empty(1, dtype=object)
            array[0] = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
            return cls(name, "BYTES", array, parameters)
        if hasattr(value, "detach"):
            return _of_torch(name, value, parameters)
        array = np.asarray(value)
        return cls(name, datatype_of(array), array, parameters)


def _of_torch(name: str, value: Any, parameters: dict[str, Any]) -> Tensor:
    tensor = value.detach().cpu()
    kind = OF_ARRAY_TYPE.get(str(tensor.dtype).removeprefix("torch."))
    if kind is not None and kind.as_bits:
        import torch

        bits = tensor.contiguous().view(getattr(torch, f"int{8 * kind.size_bytes}"))
        return Tensor(name, kind.name, bits.numpy().view(kind.dtype), parameters)
    array = tensor.numpy()
    return Tensor(name, datatype_of(array), array, parameters)


@dataclass(slots=True)
class RequestedOutput:
    """An output that the client named."""

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class InferenceRequest:
    """`id` is "" when the client gave none; `outputs` is empty when it wants all; `stream`: it takes any number of
    answers; `texts`: it came as JSON, in which the elements of BYTES are strings; `following`: the requests that come
    after it in its stream, when its handler takes streams."""

    inputs: list[Tensor]
    id: str = ""
    model_name: str = ""
    model_version: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    outputs: list[RequestedOutput] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    stream: bool = False
    texts: bool = False
    following: AsyncIterator[InferenceRequest] | None = None

    def input(self, name: str) -> Tensor | None:
        return next((tensor for tensor in self.inputs if tensor.name == name), None)


@dataclass(slots=True)
class InferenceResponse:
    """What a handler answers; name, version and id left "" are filled in from the model and the request."""

    outputs: list[Tensor]
    id: str = ""
    model_name: str = ""
    model_version: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
