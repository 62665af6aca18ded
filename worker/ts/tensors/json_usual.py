"""The usual inference request in JSON, in a few steps: `msgspec` checks it while it reads it.

Anything else is left to `JsonForm`, with which the tests compare both ways; so is everything where a model's own
environment lacks `msgspec`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np

from ts.protocol.datatypes import DATATYPES, Datatype
from ts.protocol.frames import Buffer
from ts.tensors.shared_memory import PARAMETERS
from ts.tensors.types import (
    DIMENSIONS_MAX,
    Array,
    InferenceRequest,
    RequestedOutput,
    Tensor,
    bytes_array,
)

try:
    import msgspec
except ImportError:
    _decode: Callable[[Buffer], Any] | None = None
    _LISTS: dict[str, Callable[[Buffer], list[Any]]] = {}
else:

    class _Input(msgspec.Struct, forbid_unknown_fields=True, gc=False):
        """An input whose elements are read by its datatype."""

        name: str
        datatype: str
        shape: list[int]
        data: msgspec.Raw
        parameters: dict[str, Any] | None = None

    class _Output(msgspec.Struct, forbid_unknown_fields=True, gc=False):
        """An output that the client named."""

        name: str
        parameters: dict[str, Any] | None = None

    class _Request(msgspec.Struct, forbid_unknown_fields=True, gc=False):
        """A request without parameters of its own."""

        inputs: list[_Input]
        id: str | None = None
        outputs: list[_Output] | None = None

    def _element(kind: Datatype) -> Any:
        """The type of an element, within the limits of its datatype as far as msgspec can say them."""
        if kind.element is bytes:
            return str
        if kind.name == "UINT64":  # numpy refuses what is too large, but not every version what is below 0
            return Annotated[int, msgspec.Meta(ge=0)]
        if kind.element is bool or kind.size_bytes == 8:
            return kind.element
        limits = np.finfo(kind.dtype) if kind.element is float else np.iinfo(kind.dtype)
        return Annotated[kind.element, msgspec.Meta(ge=kind.element(limits.min), le=kind.element(limits.max))]

    _decode = msgspec.json.Decoder(_Request).decode
    _LISTS = {
        name: msgspec.json.Decoder(list[_element(kind)]).decode  # type: ignore[misc]
        for name, kind in DATATYPES.items()
        if not kind.as_bits
    }

#: Parameters of an input that say where its elements are, or how they are written.
_SPECIAL = frozenset({*PARAMETERS, "binary_data_size", "content_type"})


def usual_request(data: Buffer, headers: dict[str, str], name: str, version: str) -> InferenceRequest | None:
    """The usual request to the model of that name and version; None for any other, and for one with a fault."""
    if _decode is None:
        return None
    try:
        str(data, "utf-8")  # msgspec passes over elements that are given twice without reading their text
        message = _decode(data)
        inputs = [tensor for one in message.inputs if (tensor := _tensor(one)) is not None]
    except (ValueError, RecursionError, OverflowError):  # msgspec's errors are ValueErrors
        return None
    if len({one.name for one in inputs}) < len(message.inputs):
        return None
    outputs = [RequestedOutput(one.name, one.parameters or {}) for one in message.outputs or ()]
    return InferenceRequest(inputs, message.id or "", name, version, {}, outputs, headers)


def _tensor(given: _Input) -> Tensor | None:
    """The input; None for an unusual one."""
    read, parameters, shape = _LISTS.get(given.datatype), given.parameters, given.shape
    if read is None or not _is_usual(shape) or (parameters and not _SPECIAL.isdisjoint(parameters)):
        return None
    elements = read(given.data)
    if math.prod(shape) != len(elements):
        return None
    return Tensor(given.name, given.datatype, _array(DATATYPES[given.datatype], elements, shape), parameters or {})


def _is_usual(shape: Sequence[int]) -> bool:
    return len(shape) <= DIMENSIONS_MAX and min(shape, default=1) > 0


def _array(kind: Datatype, elements: list[Any], shape: Sequence[int]) -> Array:
    if kind.element is bytes:
        return bytes_array([text.encode() for text in elements], shape)
    return np.array(elements, kind.dtype).reshape(shape)
