"""The usual ModelInferRequest and its answer, in a few steps: numbers, without parameters.

Clients repeat the same request with another id and other elements, whose bytes are numpy's memory. The layout is
determined once; a request with the same bytes at the same places has the same layout. Anything else is left to
`GrpcForm`, with which the tests compare both ways.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from ts.protocol.datatypes import DATATYPES
from ts.protocol.frames import Buffer
from ts.protocol.open_inference_pb2 import InferTensorContents, ModelInferRequest, ModelInferResponse
from ts.tensors.forms import ModelSpec, check_declared
from ts.tensors.types import (
    DIMENSIONS_MAX,
    Headers,
    InferenceRequest,
    InferenceResponse,
    RequestedOutput,
    Tensor,
    as_bytes,
    join_bytes,
)

#: The datatypes whose raw contents equal numpy's memory.
NUMBERS = {name: kind for name, kind in DATATYPES.items() if kind.element in (int, float)}
#: The most cached heads of requests, of answers, and of outputs with their shapes, and the most sizes of requests with
#: a cached layout.
HEADS_MAX = LAYOUTS_MAX = 256
#: The longest usual head: a longer one has an unusual part.
HEAD_BYTES_MAX = 2048

# --- wire format: the tags of sized fields (number << 3 | 2)

_ID, _INPUT, _RAW = 3 << 3 | 2, 5 << 3 | 2, 7 << 3 | 2
#: model_name, model_version, inputs and outputs.
_HEAD = frozenset((1 << 3 | 2, 2 << 3 | 2, _INPUT, 6 << 3 | 2))
#: The tag of an input's contents.
_CONTENTS = 5 << 3 | 2
#: The fields of contents whose elements are numpy's memory, and their numbers.
_PACKED = {
    name: InferTensorContents.DESCRIPTOR.fields_by_name[kind.field].number << 3 | 2
    for name, kind in NUMBERS.items()
    if kind.element is float and kind.field
}

#: A field: its tag, where it begins, where its content begins, and where it ends.
_Field = tuple[int, int, int, int]


def prefix(field: int, size: int) -> bytes:
    """The bytes before a protobuf field of `size` bytes: the field's number, and the size, 7 bits a byte."""
    if size < 128:
        return bytes((field << 3 | 2, size))
    found = bytearray((field << 3 | 2,))
    while size > 127:
        found.append(size & 127 | 128)
        size >>= 7
    found.append(size)
    return bytes(found)


def _fields(data: Buffer, at: int, end: int) -> list[_Field] | None:
    """The fields between `at` and `end`; None unless all of them have a size and a number below 16."""
    found: list[_Field] = []
    try:
        while at < end:
            start, tag, size = at, data[at], data[at + 1]
            at += 2
            if tag & 0x87 != 2:
                return None
            if size > 127:
                size, at = _long_size(data, at, size & 127)
            found.append((tag, start, at, at + size))
            at += size
    except IndexError:
        return None
    return found if at == end else None


def _long_size(data: Buffer, at: int, size: int) -> tuple[int, int]:
    """A size whose 7 lowest bits are known already, and the position after it. Raises IndexError if there is none."""
    for shift in (7, 14, 21, 28):
        byte = data[at]
        at += 1
        size |= (byte & 127) << shift
        if byte < 128:
            return size, at
    raise IndexError


# --- requests


class _Input(NamedTuple):
    """An input as its head declares it; `size_bytes`: of its elements, `packed`: the tag of the field of contents that
    has them, 0 for none."""

    name: str
    datatype: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    size_bytes: int
    packed: int


class _Head(NamedTuple):
    """A request without its id and its elements."""

    model_name: str
    model_version: str
    inputs: Sequence[_Input]
    outputs: Sequence[str]


class Layout(NamedTuple):
    """Where everything is in requests that are alike but for their ids and their elements. `fixed`: the bytes between
    those, with their places; `request_id`: where the id is, `elements`: where those of each input are; `typed`: they
    are in its contents."""

    fixed: Sequence[tuple[int, int, bytes]]
    head: _Head
    request_id: tuple[int, int]
    elements: Sequence[tuple[int, int]]
    typed: bool


def usual_request(data: Buffer, pairs: Headers, model: ModelSpec) -> tuple[InferenceRequest, bool] | None:
    """The usual request, whose inputs are as declared, and whether its contents are typed. None for any other, and for
    one with a fault; BadTensor for other inputs than the declared ones."""
    size = len(data)
    layout = model.layouts.get(size)
    if layout is not None:
        for at, end, wanted in layout.fixed:
            if data[at:end] != wanted:
                layout = None
                break
    is_new = layout is None
    if layout is None:
        layout = _layout(data)
        if layout is None:
            return None
    _, head, (at, end), elements, typed = layout
    request_id = ""
    if at != end:
        try:
            request_id = str(data[at:end], "utf-8")
        except UnicodeDecodeError:
            return None
    view = memoryview(data)
    inputs = [
        Tensor(name, datatype, np.ndarray(shape, dtype, bytearray(view[at:end])), {})
        for (name, datatype, dtype, shape, _, _), (at, end) in zip(head.inputs, elements, strict=True)
    ]
    outputs = [RequestedOutput(name) for name in head.outputs] if head.outputs else []
    request = InferenceRequest(inputs, request_id, head.model_name, head.model_version, {}, outputs, pairs)
    if is_new:
        if model.inputs:
            check_declared(request, model)
        if len(model.layouts) >= LAYOUTS_MAX:
            model.layouts.clear()
        model.layouts[size] = layout
    return request, typed


def _layout(data: Buffer) -> Layout | None:
    """The layout of a usual request; None for any other."""
    fields = _fields(data, 0, len(data))
    if not fields:
        return None
    typed = fields[-1][0] != _RAW
    parts: list[Buffer] = []
    elements: list[tuple[int, int]] = []
    tags: list[int] = []
    request_id = 0, 0
    for tag, start, at, end in fields:
        if tag == _RAW:
            elements.append((at, end))
        elif tag == _ID and request_id == (0, 0):
            request_id = at, end
        elif tag == _INPUT and typed:
            found = _typed_input(data, at, end)
            if found is None:
                return None
            declared, tag, *place = found
            parts += (prefix(5, len(declared)), declared)
            elements.append((place[0], place[1]))
            tags.append(tag)
        elif tag in _HEAD:
            parts.append(data[start:end])
        else:
            return None
    key = b"".join(parts)
    head = _head_of(key) if len(key) <= HEAD_BYTES_MAX else None
    if head is None or not elements or len(head.inputs) != len(elements):
        return None
    if [one.size_bytes for one in head.inputs] != [end - at for at, end in elements]:
        return None
    if typed and tags != [one.packed for one in head.inputs]:
        return None
    cuts = sorted(place for place in (request_id, *elements) if place != (0, 0))
    begins, ends = [0, *(end for _, end in cuts)], [*(at for at, _ in cuts), len(data)]
    fixed = [(at, end, bytes(data[at:end])) for at, end in zip(begins, ends, strict=True) if at != end]
    return Layout(fixed, head, request_id, elements, typed)


def _typed_input(data: Buffer, at: int, end: int) -> tuple[bytes, int, int, int] | None:
    """An input without its contents, and the one field in those: its tag, and where its content begins and ends. None
    for any other input."""
    fields = _fields(data, at, end)
    if not fields or fields[-1][0] != _CONTENTS:
        return None
    _, cut, at, end = fields[-1]
    contents = _fields(data, at, end)
    if contents is None or len(contents) != 1:
        return None
    tag, _, first, last = contents[0]
    return bytes(data[fields[0][1] : cut]), tag, first, last


@lru_cache(maxsize=HEADS_MAX)
def _head_of(key: bytes) -> _Head | None:
    """The head in these bytes, a ModelInferRequest; None for an unusual one."""
    try:
        message = ModelInferRequest.FromString(key)
    except DecodeError:
        return None
    inputs = []
    for tensor in message.inputs:
        kind, shape = NUMBERS.get(tensor.datatype), tuple(tensor.shape)
        unusual = (
            tensor.parameters or tensor.HasField("contents") or len(shape) > DIMENSIONS_MAX or min(shape, default=1) < 1
        )
        if kind is None or unusual:
            return None
        size = math.prod(shape) * kind.size_bytes
        inputs.append(_Input(tensor.name, kind.name, kind.dtype, shape, size, _PACKED.get(kind.name, 0)))
    if len({one.name for one in inputs}) < len(inputs) or any(output.parameters for output in message.outputs):
        return None
    return _Head(message.model_name, message.model_version, inputs, [output.name for output in message.outputs])


# --- answers


def usual_response(
    response: InferenceResponse, request: InferenceRequest, model: ModelSpec, flags: bytes, typed: bool
) -> bytes | None:
    """The serialised ModelInferResponse of the usual answer, with `flags` as its parameters, which are written already.
    None for any other, which GrpcForm writes, or refuses with the reason."""
    if response.parameters:
        return None
    outputs = response.outputs
    if request.outputs and not _are_asked_for(outputs, request.outputs):
        return None
    parts = [_model(response.model_name or model.name, response.model_version or model.version)]
    contents: list[bytes] = []
    answer_id = response.id or request.id
    if answer_id:
        if not answer_id.isascii():
            return None
        parts += (prefix(3, len(answer_id)), answer_id.encode())
    if flags:
        parts.append(flags)
    for tensor in outputs:
        array = tensor.array
        if tensor.parameters or not array.size or tensor.stated is not None:
            return None
        kind = NUMBERS.get(tensor.datatype)
        if kind is not None:
            data = (array if array.dtype is kind.dtype else array.astype(kind.dtype)).tobytes()
        elif tensor.datatype == "BYTES":
            data = join_bytes([as_bytes(value) for value in array.ravel()])
        else:
            return None
        if typed:
            if tensor.datatype not in _PACKED:
                return None
            parts += _typed_output(tensor, data)
        else:
            parts.append(_output(tensor.name, tensor.datatype, array.shape))
            contents += (prefix(6, len(data)), data)
    return b"".join(parts + contents)


def _are_asked_for(outputs: Sequence[Tensor], asked: Sequence[RequestedOutput]) -> bool:
    """Whether the outputs are those that the client asked for, in its order, and nothing else was asked."""
    if len(outputs) != len(asked):
        return False
    for tensor, output in zip(outputs, asked, strict=True):
        if tensor.name != output.name or output.parameters:
            return False
    return len(asked) == 1 or len({output.name for output in asked}) == len(asked)


@lru_cache(maxsize=HEADS_MAX)
def _model(name: str, version: str) -> bytes:
    return ModelInferResponse(model_name=name, model_version=version).SerializeToString()


@lru_cache(maxsize=HEADS_MAX)
def _output(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    declared = _declared(name, datatype, shape)
    return prefix(5, len(declared)) + declared


def _typed_output(tensor: Tensor, data: bytes) -> Sequence[bytes]:
    """An output with its elements in it."""
    declared = _declared(tensor.name, tensor.datatype, tensor.array.shape)
    packed = prefix(_PACKED[tensor.datatype] >> 3, len(data))
    contents = prefix(5, len(packed) + len(data)) + packed
    return prefix(5, len(declared) + len(contents) + len(data)), declared, contents, data


@lru_cache(maxsize=HEADS_MAX)
def _declared(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    return ModelInferResponse.InferOutputTensor(name=name, datatype=datatype, shape=shape).SerializeToString()
