"""Requests and answers of the V2 protocol for predictors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from ts.protocol.datatypes import DATATYPES
from ts.tensors.types import Array, Tensor, bytes_array, datatype_of


class _Tensor:
    """`data`: the elements, flat or nested."""

    def __init__(
        self, name: str, shape: Sequence[int], datatype: str, data: Any = None, parameters: dict[str, Any] | None = None
    ) -> None:
        self.name, self.shape, self.datatype = name, list(shape), datatype
        self.parameters: dict[str, Any] = parameters or {}
        self._array: Array | None = None
        self._data = data
        if isinstance(data, np.ndarray):
            self.set_data_from_numpy(data)

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """A tensor of this server's; elements of BF16 become FP32."""
        array = tensor.numbers()
        datatype = tensor.datatype if array is tensor.array else datatype_of(array)
        made = cls(tensor.name, tensor.shape, datatype, None, tensor.parameters)
        made._array = array
        return made

    @property
    def data(self) -> Any:
        """The elements as a flat list, or the given data if there is no array."""
        return self._data if self._array is None else self._array.ravel().tolist()

    @data.setter
    def data(self, value: Any) -> None:
        self._data, self._array = value, None

    def as_numpy(self) -> Array:
        """The elements in the tensor's shape; BYTES are objects."""
        if self._array is not None:
            return self._array
        dtype = DATATYPES[self.datatype].dtype
        return np.array(self._data, dtype=dtype).reshape(self.shape)

    def as_string(self) -> list[str]:
        return [one.decode() if isinstance(one, bytes) else str(one) for one in self.as_numpy().ravel()]

    def set_data_from_numpy(self, input_tensor: Any, binary_data: bool = True) -> None:
        """Takes elements, shape and datatype of an array."""
        array = np.asarray(input_tensor)
        self.datatype, self.shape = datatype_of(array), list(array.shape)
        self._array, self._data = array, None

    def to_dict(self) -> dict[str, Any]:
        data = [one.decode() if isinstance(one, bytes) else one for one in np.asarray(self.data, dtype=object).ravel()]
        return {"name": self.name, "shape": self.shape, "datatype": self.datatype, "data": data}


class InferInput(_Tensor):
    """A tensor of a request."""


class InferOutput(_Tensor):
    """A tensor of an answer."""


class RequestedOutput:
    """An output that the client named."""

    def __init__(self, name: str, parameters: dict[str, Any] | None = None) -> None:
        self.name, self.parameters = name, parameters or {}


class InferRequest:
    """`inputs`, and the request's `id`, `parameters`, `model_name` and `model_version`."""

    def __init__(
        self,
        model_name: str | None,
        infer_inputs: list[InferInput],
        request_id: str | None = None,
        raw_inputs: Any = None,
        from_grpc: bool = False,
        parameters: dict[str, Any] | None = None,
        request_outputs: list[RequestedOutput] | None = None,
        model_version: str | None = None,
    ) -> None:
        self.id, self.model_name, self.model_version = request_id, model_name, model_version
        self.inputs, self.parameters, self.from_grpc = infer_inputs, parameters or {}, from_grpc
        self.request_outputs = request_outputs or []

    def get_input_by_name(self, name: str) -> InferInput | None:
        return next((one for one in self.inputs if one.name == name), None)

    def to_rest(self) -> dict[str, Any]:
        return {"id": self.id, "model_name": self.model_name, "inputs": [one.to_dict() for one in self.inputs]}


class InferResponse:
    """`outputs`, and the answer's `id`, `parameters`, `model_name` and `model_version`."""

    def __init__(
        self,
        response_id: str | None,
        model_name: str,
        infer_outputs: list[InferOutput],
        model_version: str | None = None,
        raw_outputs: Any = None,
        from_grpc: bool = False,
        parameters: dict[str, Any] | None = None,
        use_binary_outputs: bool | None = False,
        requested_outputs: list[RequestedOutput] | None = None,
    ) -> None:
        self.id, self.model_name, self.model_version = response_id, model_name, model_version
        self.outputs, self.parameters, self.from_grpc = infer_outputs, parameters or {}, from_grpc

    def get_output_by_name(self, name: str) -> InferOutput | None:
        return next((one for one in self.outputs if one.name == name), None)

    def to_rest(self) -> dict[str, Any]:
        return {"id": self.id, "model_name": self.model_name, "outputs": [one.to_dict() for one in self.outputs]}


def array_of(tensor: Any) -> tuple[str, Array]:
    """A tensor's datatype and elements in this server's form, also of KServe's own package's. Raises ValueError."""
    name = tensor.datatype
    if type(name) is not str:
        name = str(getattr(name, "value", name))
    array = np.asarray(tensor.as_numpy())
    if name != "BYTES":
        dtype = DATATYPES[name].dtype
        return name, array if array.dtype is dtype else array.astype(dtype, copy=False)
    flat = [one.encode() if isinstance(one, str) else bytes(one) for one in array.ravel()]
    return name, bytes_array(flat, list(array.shape))
