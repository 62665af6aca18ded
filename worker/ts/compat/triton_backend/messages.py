"""Requests, responses and tensors of Triton Python models."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from ts.compat.triton_backend.errors import TritonError, TritonModelException
from ts.protocol.datatypes import DATATYPES
from ts.tensors import types
from ts.tensors.types import OF_DTYPE, Array, BadTensor, bytes_array, datatype_of

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 1, 2
TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 1, 2

#: The request parameters with methods of their own, and those about the request's transport.
_OWN = frozenset({"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "binary_data_output"})


#: The datatypes that numpy lacks.
_AS_BITS = frozenset(name for name, kind in DATATYPES.items() if kind.as_bits)

R = TypeVar("R", bound="InferenceRequest")


class Tensor:
    """A named array. BYTES are object arrays of bytes; BF16 has no numpy form, only DLPack's."""

    def __init__(self, name: str, numpy_array: Array) -> None:
        if type(numpy_array) is np.ndarray:
            usual = OF_DTYPE.get(numpy_array.dtype)
            if usual is not None:
                self._tensor = types.Tensor(name, usual, numpy_array, {})
                return
        if not isinstance(numpy_array, np.ndarray):
            raise TritonModelException(f"tensor {name!r}: a numpy array is needed, not {type(numpy_array).__name__}")
        if numpy_array.dtype.kind in "SU":
            flat = [v.encode() if isinstance(v, str) else v for v in numpy_array.ravel().tolist()]
            numpy_array = bytes_array(flat, numpy_array.shape)
        try:
            datatype = datatype_of(numpy_array)
        except BadTensor as error:
            raise TritonModelException(f"tensor {name!r}: {error}") from None
        self._tensor = types.Tensor(name, datatype, numpy_array)

    @classmethod
    def wrapping(cls, tensor: types.Tensor) -> Tensor:
        found = cls.__new__(cls)
        found._tensor = tensor
        return found

    def name(self) -> str:
        return self._tensor.name

    def triton_dtype(self) -> int:
        return DATATYPES[self._tensor.datatype].number

    def shape(self) -> list[int]:
        return list(self._tensor.shape)

    def as_numpy(self) -> Array:
        tensor = self._tensor
        if tensor.datatype in _AS_BITS:
            raise TritonModelException(f"tensor {self.name()!r}: {tensor.datatype} has no numpy type, use to_dlpack()")
        return tensor.array

    def is_cpu(self) -> bool:
        return True

    def _torch(self) -> Any:
        if self._tensor.datatype == "BYTES":
            raise TritonModelException(f"tensor {self.name()!r}: BYTES have no DLPack form")
        return self._tensor.as_torch()

    def to_dlpack(self) -> Any:
        return self.__dlpack__()

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self._torch().__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # the CPU

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """Wraps an object with `__dlpack__`, or a capsule; data on a device is copied to the CPU."""
        import torch
        from torch.utils import dlpack

        found = tensor if isinstance(tensor, torch.Tensor) else dlpack.from_dlpack(tensor)
        return Tensor.wrapping(types.Tensor.of(name, found))


_wrapped: Callable[[Tensor], types.Tensor] = attrgetter("_tensor")


class InferenceResponse:
    """The outputs for one request, or its error."""

    # The attributes of most responses.
    _error: TritonError | None = None
    _parameters: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | str | None = None,
        parameters: str | dict[str, Any] | None = None,
    ) -> None:
        self._output_tensors = list(output_tensors)
        if error is not None:
            self._error = TritonError(error) if isinstance(error, str) else error
        if parameters:
            self._parameters = parameters if isinstance(parameters, dict) else json.loads(parameters)

    def output_tensors(self) -> list[Tensor]:
        return self._output_tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        return json.dumps(dict(self._parameters))

    def neutral(self) -> types.InferenceResponse:
        """The response in the runtime's form."""
        outputs = list(map(_wrapped, self._output_tensors))
        return types.InferenceResponse(outputs, "", "", "", dict(self._parameters) if self._parameters else {})


class InferenceResponseSender:
    """Sends a decoupled model's responses to one request, from any thread."""

    def __init__(
        self, send: Callable[[InferenceResponse | None, bool], None], is_cancelled: Callable[[], bool]
    ) -> None:
        self._send, self._is_cancelled = send, is_cancelled
        self._closed = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if self._closed:
            raise TritonModelException("the response sender has been closed: the final flag was sent before")
        if response is None and not flags:
            raise TritonModelException("a response sender is given a response, the final flag, or both")
        final = bool(flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        self._closed = final
        self._send(response, final)

    def is_cancelled(self) -> bool:
        return self._is_cancelled()


def _never() -> bool:
    return False


class InferenceRequest:
    """One request. The requests of `execute` also have a response sender."""

    # The attributes of most requests.
    _correlation_id: int | str = 0
    _flags = _timeout = 0
    _parameters: str | dict[str, Any] = "{}"
    _sender: InferenceResponseSender | None = None
    _trace: InferenceTrace | None = None
    _is_cancelled: Callable[[], bool] = staticmethod(_never)
    model_version = "-1"

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        model_version: int | str = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: Any = None,
        trace: Any = None,
        parameters: str | dict[str, Any] | None = None,
    ) -> None:
        self._inputs = list(inputs)
        self._request_id, self._correlation_id = _text(request_id), correlation_id
        self._requested: Sequence[str] = list(map(_text, requested_output_names))
        self._flags, self._timeout = int(flags), int(timeout)
        self._parameters = json.dumps(parameters, default=str) if isinstance(parameters, dict) else parameters or "{}"
        self._trace = trace
        self.model_name, self.model_version = _text(model_name), str(model_version)

    @classmethod
    def of(
        cls: type[R],
        request: types.InferenceRequest,
        inputs: Sequence[types.Tensor],
        outputs: Sequence[str],
        is_cancelled: Callable[[], bool],
    ) -> R:
        """A request of the server for the model, with its inputs; `outputs`: the declared ones."""
        found = cls.__new__(cls)
        found._inputs = list(map(Tensor.wrapping, inputs))
        found._request_id, found.model_name = request.id, request.model_name
        found._requested = [output.name for output in request.outputs] if request.outputs else outputs
        if request.parameters:
            found._take_parameters(request.parameters)
        found._is_cancelled = is_cancelled
        return found

    def _take_parameters(self, given: dict[str, Any]) -> None:
        """Reads the parameters with a method of their own, and keeps the others, which are encoded as JSON on
        request."""
        self._correlation_id = given.get("sequence_id") or 0
        self._flags = TRITONSERVER_REQUEST_FLAG_SEQUENCE_START * bool(given.get("sequence_start"))
        self._flags |= TRITONSERVER_REQUEST_FLAG_SEQUENCE_END * bool(given.get("sequence_end"))
        self._timeout = int(given.get("timeout") or 0)
        self._parameters = {name: value for name, value in given.items() if name not in _OWN}

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._request_id

    def correlation_id(self) -> int | str:
        return self._correlation_id

    def flags(self) -> int:
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = flags

    def timeout(self) -> int:
        return self._timeout

    def parameters(self) -> str:
        given = self._parameters
        return given if isinstance(given, str) else json.dumps(given, default=str)

    def requested_output_names(self) -> list[str]:
        return list(self._requested)

    def trace(self) -> InferenceTrace:
        if self._trace is None:
            self._trace = InferenceTrace()
        return self._trace

    def is_cancelled(self) -> bool:
        return self._is_cancelled()

    def get_response_sender(self) -> InferenceResponseSender:
        if self._sender is None:
            raise TritonModelException("only requests to a decoupled model have a response sender")
        return self._sender

    def set_release_flags(self, flags: int) -> None:
        if flags != TRITONSERVER_REQUEST_RELEASE_ALL:
            raise TritonModelException("rescheduling requests is not supported by this server")


def _text(value: str | bytes) -> str:
    """Text from str, or from an element of a BYTES tensor."""
    return value.decode() if isinstance(value, bytes) else value


class InferenceTrace:
    def get_context(self) -> str | None:
        return None
