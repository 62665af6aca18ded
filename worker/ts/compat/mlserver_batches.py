"""Joins several requests along their first dimension, and splits the answer again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ts.tensors.types import InferenceRequest, InferenceResponse, Tensor


def joined(requests: Sequence[InferenceRequest]) -> InferenceRequest | None:
    """One request with all rows; None if the requests can't be joined."""
    first = requests[0]
    if any(_rows(request) == 0 or _form(request) != _form(first) for request in requests):
        return None
    tensors = [
        Tensor(
            tensor.name,
            tensor.datatype,
            np.concatenate([request.inputs[index].array for request in requests]),
            _common([request.inputs[index].parameters for request in requests]),
        )
        for index, tensor in enumerate(first.inputs)
    ]
    return replace(first, inputs=tensors, parameters=_common([request.parameters for request in requests]))


def _rows(request: InferenceRequest) -> int:
    """The first dimension of all inputs; 0 if they differ, or if an input's number of elements doesn't match its
    shape."""
    if any(tensor.stated is not None for tensor in request.inputs):
        return 0
    sizes = {tensor.shape[0] if tensor.shape else 0 for tensor in request.inputs}
    return sizes.pop() if len(sizes) == 1 else 0


def _form(request: InferenceRequest) -> tuple[Any, ...]:
    tensors = tuple((tensor.name, tensor.datatype, tensor.shape[1:]) for tensor in request.inputs)
    return tensors, tuple(output.name for output in request.outputs), request.texts


def _common(parameters: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Parameters for a batch, as MLServer merges them: a value that all requests share, otherwise the list of all
    values."""
    names = dict.fromkeys(name for one in parameters for name in one)
    found = {}
    for name in names:
        values = [one.get(name) for one in parameters]
        found[name] = values[0] if all(value == values[0] for value in values) else values
    return found


def split(response: InferenceResponse, requests: Sequence[InferenceRequest]) -> list[InferenceResponse] | None:
    """The answer to each request; None if an output's number of rows doesn't match."""
    sizes = [_rows(request) for request in requests]
    total = sum(sizes)
    if any(not tensor.shape or tensor.shape[0] != total or tensor.stated for tensor in response.outputs):
        return None
    found, start = [], 0
    for index, size in enumerate(sizes):
        rows = slice(start, start + size)
        outputs = [
            Tensor(tensor.name, tensor.datatype, tensor.array[rows], _shares(tensor.parameters, index, len(sizes)))
            for tensor in response.outputs
        ]
        parameters = _shares(response.parameters, index, len(sizes))
        found.append(replace(response, outputs=outputs, id="", parameters=parameters))
        start += size
    return found


def _shares(parameters: dict[str, Any], index: int, count: int) -> dict[str, Any]:
    """One request's share of a batch's parameters: its own element of a list with one element for each, otherwise
    the value."""
    return {name: _share(value, index, count) for name, value in parameters.items()}


def _share(value: Any, index: int, count: int) -> Any:
    return value[index] if isinstance(value, list) and len(value) == count else value
