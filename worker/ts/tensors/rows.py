"""Conversion between tensors and TorchServe handlers' rows and results (the table: docs/open-inference.md)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ts.protocol.datatypes import DATATYPES
from ts.protocol.frames import Input
from ts.tensors.forms import ModelSpec
from ts.tensors.types import BadTensor, Headers, InferenceRequest, InferenceResponse, Tensor, as_bytes, bytes_array

#: The name of the output if the model declares none.
OUTPUT = "output"
_BODIES = ("data", "body")


class TensorRow(dict[str, Any]):
    """A request's tensors by name. Handlers look for `data` or `body`: a request with one input has it there too.
    `request` is the whole of it (`ts.tensors.types.InferenceRequest`)."""

    request: InferenceRequest

    def __missing__(self, name: str) -> Any:
        if name in _BODIES and len(self) == 1:
            return next(iter(self.values()))
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (name in _BODIES and len(self) == 1)

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default


def row_of(request: InferenceRequest) -> TensorRow:
    row = TensorRow({tensor.name: _value(tensor) for tensor in request.inputs})
    row.request = request
    return row


def _value(tensor: Tensor) -> Any:
    if tensor.datatype != "BYTES":
        return tensor.numbers().tolist()
    text = tensor.parameters.get("content_type") == "str"
    flat = [_text(value, tensor.name) if text else bytearray(value) for value in tensor.array.ravel()]
    return flat[0] if len(flat) == 1 else flat


def _text(value: bytes, name: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise BadTensor(f"input {name!r}: its content_type is str, but it is no UTF-8: {error}") from None


def plain_value(tensor: Tensor) -> Any:
    """A tensor as JSON has it."""
    if tensor.datatype == "BYTES":
        return [value.decode("utf-8", "replace") for value in tensor.array.ravel()]
    return _finite(_value(tensor))


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinities."""
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def response_of(value: Any, model: ModelSpec) -> InferenceResponse:
    """The result of a handler for one request, as tensors. Raises BadTensor when it can't be one."""
    if isinstance(value, InferenceResponse):
        return value
    names = list(model.outputs)
    if isinstance(value, dict) and value and (set(value) <= set(names) or all(map(_is_array, value.values()))):
        return InferenceResponse([_tensor(name, one, model) for name, one in value.items()])
    return InferenceResponse([_tensor(names[0] if names else OUTPUT, value, model)])


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or hasattr(value, "detach")


def _tensor(name: str, value: Any, model: ModelSpec) -> Tensor:
    declared = model.outputs.get(name, {}).get("datatype")
    if isinstance(value, (str, bytes, bytearray, memoryview)) or _is_array(value):
        return Tensor.of(name, value)
    if isinstance(value, (bool, int, float)):
        value = [value]
    if isinstance(value, list) and declared != "BYTES":
        found = _numbers(value, declared)
        if found is not None:
            return Tensor.of(name, found)
    if isinstance(value, list) and value and all(isinstance(one, (str, bytes)) for one in value):
        return Tensor(name, "BYTES", bytes_array([as_bytes(one) for one in value], [len(value)]))
    return Tensor.of(name, _json(value))


def _numbers(value: list[Any], declared: str | None) -> Any:
    """The list as an array of numbers; None unless it is numeric and rectangular."""
    try:
        array = np.array(value)
    except ValueError:
        return None
    if array.dtype.kind not in "biuf" or not array.size:
        return None
    kind = DATATYPES[declared] if declared is not None else None
    return array if kind is None or kind.as_bits else array.astype(kind.dtype)


def _json(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadTensor(f"a result of type {type(value).__name__} can't be sent: {error}") from None


def request_of(inputs: Sequence[Input], pairs: Headers, model: ModelSpec) -> InferenceRequest:
    """The tensors of a request that came by TorchServe's own APIs, for a model that takes tensors: bytes under the
    input's name, or under the one that the model declares."""
    declared = list(model.inputs)
    tensors = []
    for name, _, data in inputs:
        known = declared[0] if len(declared) == 1 and name not in model.inputs else name
        shape = [1] * max(len(model.inputs.get(known, {}).get("shape") or [1]), 1)
        tensors.append(Tensor(known, "BYTES", bytes_array([bytes(data)], shape)))
    return InferenceRequest(tensors, "", model.name, model.version, {}, [], pairs)
