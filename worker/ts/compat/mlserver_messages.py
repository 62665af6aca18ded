"""Conversion between this server's tensor requests and `mlserver.types` of the real package or of the shim; and
batches of requests, joined along their first dimension and split again."""

from __future__ import annotations

import base64
import binascii
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ts.protocol.datatypes import DATATYPES
from ts.tensors import types as neutral
from ts.tensors.types import Array, InferenceRequest, InferenceResponse, Tensor, as_bytes
from ts.utils.util import PredictionException


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
    """The first dimension of all inputs; 0 if they differ, or if an input's elements don't fill its shape."""
    if any(tensor.stated is not None for tensor in request.inputs):
        return 0
    sizes = {tensor.shape[0] if tensor.shape else 0 for tensor in request.inputs}
    return sizes.pop() if len(sizes) == 1 else 0


def _form(request: InferenceRequest) -> tuple[Any, ...]:
    tensors = tuple((tensor.name, tensor.datatype, tensor.shape[1:]) for tensor in request.inputs)
    return tensors, tuple(output.name for output in request.outputs), request.texts


def _common(parameters: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Parameters for a batch, merged as by MLServer: the value that all requests share, or the list of all."""
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
    """One request's share of a batch's parameters: its element of a list with one for each, or the value."""
    return {name: _share(value, index, count) for name, value in parameters.items()}


def _share(value: Any, index: int, count: int) -> Any:
    return value[index] if isinstance(value, list) and len(value) == count else value


BASE64 = "base64"


class Messages:
    """`types` is the module `mlserver.types`."""

    def __init__(self, types: Any) -> None:
        self._types = types
        self._takes_arrays = hasattr(types.TensorData, "array")  # the shim's

    # --- requests

    def payload(self, request: neutral.InferenceRequest, request_id: str) -> Any:
        """An `InferenceRequest` with the request's headers in its parameters, as in MLServer."""
        types = self._types
        return types.InferenceRequest(
            id=request_id,
            parameters=types.Parameters(**{**request.parameters, "headers": dict(request.headers)}),
            inputs=[self._input(tensor, request.texts) for tensor in request.inputs],
            outputs=[
                types.RequestOutput(name=one.name, parameters=self._parameters(one.parameters))
                for one in request.outputs
            ]
            or None,
        )

    def _input(self, tensor: neutral.Tensor, texts: bool) -> Any:
        if DATATYPES[tensor.datatype].extension:
            text = f"input {tensor.name!r}: MLServer's runtimes have no datatype {tensor.datatype}"
            raise PredictionException(text, 400)
        return self._types.RequestInput(
            name=tensor.name,
            shape=list(tensor.shape),
            datatype=tensor.datatype,
            parameters=self._parameters(tensor.parameters),
            data=self._types.TensorData(self._elements(tensor, texts)),
        )

    def _elements(self, tensor: neutral.Tensor, texts: bool) -> Any:
        """The elements of a BYTES tensor; `texts`: as str, which runtimes expect from JSON requests."""
        flat = tensor.array.ravel()
        if tensor.datatype != "BYTES":
            return flat if self._takes_arrays else flat.tolist()
        values = [as_bytes(value) for value in flat]
        if not texts:
            return values
        if tensor.parameters.get("content_type") == BASE64:
            return [base64.b64encode(value).decode() for value in values]
        return [value.decode("utf-8", "surrogatepass") for value in values]

    def _parameters(self, values: Mapping[str, Any]) -> Any:
        return self._types.Parameters(**values) if values else None

    # --- answers

    def response(self, found: Any, texts: bool) -> tuple[neutral.InferenceResponse, dict[str, str]]:
        """The answer and its headers. Raises PredictionException for an invalid result."""
        if not isinstance(found, self._types.InferenceResponse):
            raise PredictionException(f"the model gave {type(found).__name__} instead of an InferenceResponse", 500)
        parameters = _plain(found.parameters)
        headers = parameters.pop("headers", None) or {}
        outputs = [_tensor(output, texts) for output in found.outputs]
        response = neutral.InferenceResponse(
            outputs, found.id or "", found.model_name or "", found.model_version or "", parameters
        )
        return response, {str(name): str(value) for name, value in headers.items()}


def _plain(parameters: Any) -> dict[str, Any]:
    if parameters is None:
        return {}
    return {name: value for name, value in parameters.model_dump().items() if name[:1] != "_" and value is not None}


def _tensor(output: Any, texts: bool) -> neutral.Tensor:
    datatype = str(getattr(output.datatype, "value", output.datatype))
    parameters, shape = _plain(output.parameters), tuple(output.shape)
    is_base64 = texts and parameters.get("content_type") == BASE64
    try:
        if datatype == "BYTES":
            values = _bytes(output.data, shape, is_base64)
            return neutral.loose_bytes(output.name, values, shape, parameters, f"output {output.name!r}")
        array = _numbers(output.data, datatype, shape)
    except (ValueError, TypeError, OverflowError) as error:
        message = f"the model's output {output.name!r} is no {datatype} of shape {list(shape)}: {error}"
        raise PredictionException(message, 500) from error
    return neutral.Tensor(output.name, datatype, array, parameters)


def _numbers(data: Any, datatype: str, shape: tuple[int, ...]) -> Array:
    array = data.array() if hasattr(data, "array") else None
    return np.asarray(data.root if array is None else array, DATATYPES[datatype].dtype).reshape(shape)


def _bytes(data: Any, shape: tuple[int, ...], is_base64: bool) -> list[bytes]:
    """The elements as bytes. `is_base64`: they are decoded, because the answer's form encodes them again."""
    count, bare = math.prod(shape), isinstance(data.root, bytes)
    values = [data.root] if bare else _flat(data.root if isinstance(data.root, (list, tuple)) else [data.root])
    if bare and count > 1:
        size = len(data.root) // count  # an array of bytes of one size, as the real NumpyCodec writes it
        values = [data.root[at * size : (at + 1) * size].rstrip(b"\0") for at in range(count)]
    raw = [value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value) for value in values]
    return [_unpacked(value) for value in raw] if is_base64 else raw


def _flat(values: Any) -> list[Any]:
    found: list[Any] = []
    for value in values:
        found.extend(_flat(value) if isinstance(value, (list, tuple)) else (value,))
    return found


def _unpacked(value: bytes) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error:
        return value


SPECVERSION = "0.3"
#: The file with the namespace of a pod in Kubernetes.
NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
_KIND = "io.seldon.serving.inference."


class CloudEvents:
    """The CloudEvents headers of one model's requests and answers. `server`: MLServer's `server_name`."""

    def __init__(self, server: str, model: str, namespace_file: str = NAMESPACE_FILE) -> None:
        namespace = _namespace(namespace_file)
        source = f"io.seldon.serving.deployment.{server}"
        self._common = {
            "Ce-Specversion": SPECVERSION,
            "Ce-Source": f"{source}.{namespace}" if namespace else source,
            "Ce-Type": "",
            "Ce-Modelid": model,
            "Ce-Inferenceservicename": server,
            "Ce-Endpoint": model,
        }
        self._more = {"Ce-Namespace": namespace} if namespace else {}

    def request(self, request_id: str) -> Mapping[str, str]:
        return self._headers("request", request_id)

    def response(self, request_id: str) -> Mapping[str, str]:
        return self._headers("response", request_id)

    def _headers(self, kind: str, request_id: str) -> dict[str, str]:
        ids = {"Ce-Id": request_id, "Ce-Requestid": request_id} if request_id else {}
        return {**self._common, "Ce-Type": _KIND + kind, **ids, **self._more}


def _namespace(file: str) -> str:
    try:
        if os.path.isfile(file):
            with open(file) as text:
                return text.read().strip()
    except OSError:
        pass
    return ""
