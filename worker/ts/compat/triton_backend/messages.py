"""What Triton gives to Python models: requests, responses, tensors, errors, with its names and numbers of datatypes; a
logger and metrics."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ts.metrics.dimension import Dimension
from ts.metrics.metric_type_enum import MetricTypes
from ts.metrics.records import body, emit, is_name
from ts.protocol.datatypes import DATATYPES, OF_CONFIG_TYPE, OF_NUMBER, Datatype
from ts.protocol.text import name_of, said, text_of
from ts.tensors import types
from ts.tensors.types import OF_DTYPE, Array, BadTensor, bytes_array, datatype_of, encode_raw, split_bytes
from ts.utils.util import PredictionException


class TritonError:
    """An error as part of a response. `code` is one of the numbers below."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = str(message), code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code

    def __str__(self) -> str:
        return self._message


class TritonModelException(Exception):
    """Raised by a model in initialize, execute or finalize."""


#: The statuses of these errors on the way to the client.
_HTTP = {
    TritonError.UNKNOWN: 520,
    TritonError.NOT_FOUND: 404,
    TritonError.INVALID_ARG: 400,
    TritonError.UNAVAILABLE: 503,
    TritonError.UNSUPPORTED: 501,
    TritonError.ALREADY_EXISTS: 409,
    TritonError.CANCELLED: 499,
}


_CODES = {status: code for code, status in _HTTP.items()} | {
    413: TritonError.INVALID_ARG,
    429: TritonError.UNAVAILABLE,
    504: TritonError.UNAVAILABLE,
}


def of_status(status: int, message: str) -> TritonError:
    """The error of a failed call, for the calling model. `status`: an HTTP status."""
    return TritonError(message, _CODES.get(status, TritonError.INTERNAL))


def as_failure(error: object) -> Exception:
    """The exception with the error's HTTP status, for the runtime; its own exceptions are returned unchanged."""
    if isinstance(error, TritonError):
        return PredictionException(error.message(), _HTTP.get(error.code(), 500))
    if isinstance(error, Exception) and not isinstance(error, TritonModelException):
        known = isinstance(error, (PredictionException, MemoryError)) or "CUDA" in text_of(error)
        return error if known else PredictionException(said(error), 500)
    return PredictionException(text_of(error) or name_of(error), 500)


def of_config(name: str) -> str:
    """`TYPE_STRING` -> `BYTES`, `TYPE_FP32` -> `FP32`; an unknown name loses its prefix."""
    row = OF_CONFIG_TYPE.get(name) or OF_CONFIG_TYPE.get(f"TYPE_{name}")
    return name.removeprefix("TYPE_") if row is None else row.name


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """`TYPE_FP32` -> numpy's type. Raises ValueError for a datatype that numpy lacks."""
    return _numpy_type(DATATYPES.get(of_config(triton_type_string)), triton_type_string)


def triton_to_numpy_type(data_type: int) -> Any:
    """`triton_string_to_numpy` for a number in TRITONSERVER_DataType."""
    return _numpy_type(OF_NUMBER.get(int(data_type)), data_type)


def _numpy_type(row: Datatype | None, given: object) -> Any:
    if row is None or row.as_bits:
        raise ValueError(f"{given!r} has no numpy type")
    return bool if row.element is bool else row.dtype.type


def numpy_to_triton_type(data_type: Any) -> int:
    """The number of numpy's type in TRITONSERVER_DataType. Raises BadTensor for a type without a number."""
    return DATATYPES[datatype_of(np.empty(0, data_type))].number


def serialize_byte_tensor(input_tensor: Array) -> Array | None:
    """The elements with their lengths, as one array of uint8; None for an empty tensor."""
    if input_tensor.size == 0:
        return None
    return np.frombuffer(encode_raw("BYTES", input_tensor), np.uint8)


def deserialize_bytes_tensor(encoded_tensor: bytes | npt.NDArray[np.uint8]) -> Array:
    """Decodes the elements that `serialize_byte_tensor` encoded."""
    data, count, at = bytes(encoded_tensor), 0, 0
    while at + 4 <= len(data):
        at += 4 + int.from_bytes(data[at : at + 4], "little")
        count += 1
    return bytes_array(split_bytes(data, count, "tensor"), [count])


def texts(tensor: types.Tensor) -> Any:
    """A BYTES tensor as an array of str. Raises TritonModelException for elements that aren't UTF-8."""
    try:
        flat = [bytes(value).decode() for value in tensor.array.ravel()]
    except UnicodeDecodeError as error:
        raise TritonModelException(f"input {tensor.name!r} is not UTF-8: {error}") from None
    found = np.empty(len(flat), dtype=object)
    found[:] = flat
    return found.reshape(tensor.shape)


def bytes_of(name: str, array: Any) -> types.Tensor:
    flat = [value.encode() if isinstance(value, str) else bytes(value) for value in array.ravel().tolist()]
    return types.Tensor(name, "BYTES", bytes_array(flat, array.shape))


TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 1, 2
TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 1, 2

#: The request parameters with methods of their own, and those about the request's transport.
_OWN = frozenset({"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "binary_data_output"})


#: The datatypes that numpy lacks.
_AS_BITS = frozenset(name for name, kind in DATATYPES.items() if kind.as_bits)


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


class InferenceRequest:
    """One request. The requests of `execute` also have a response sender."""

    # The attributes of most requests.
    _correlation_id: int | str = 0
    _flags = _timeout = 0
    _parameters: str | dict[str, Any] = "{}"
    _sender: InferenceResponseSender | None = None
    _trace: InferenceTrace | None = None
    _is_cancelled: Callable[[], bool] = staticmethod(lambda: False)
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
        cls,
        request: types.InferenceRequest,
        inputs: Sequence[types.Tensor],
        outputs: Sequence[str],
        is_cancelled: Callable[[], bool],
    ) -> Self:
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
        """Reads the parameters that have a method of their own; keeps the others, encoded as JSON on request."""
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


# --- the logger, the metrics, and what models ask for in vain


class Logger:
    """Writes to the model log."""

    INFO, WARNING, ERROR, VERBOSE = "INFO", "WARNING", "ERROR", "VERBOSE"

    @staticmethod
    def log(message: str, level: str = INFO) -> None:
        stream = sys.stdout if level in (Logger.INFO, Logger.VERBOSE) else sys.stderr
        print(message, file=stream, flush=True)

    @staticmethod
    def log_info(message: str) -> None:
        Logger.log(message, Logger.INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        Logger.log(message, Logger.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        Logger.log(message, Logger.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        Logger.log(message, Logger.VERBOSE)


class Metric:
    """A series of a family. Each change is told to the frontend, which adds up the workers'; gauges: the last one."""

    def __init__(self, family: MetricFamily, labels: dict[str, str], buckets: Sequence[float]) -> None:
        self._family, self._value = family, 0.0
        self.labels = {str(name): str(value) for name, value in labels.items()}
        self._buckets = [float(bound) for bound in buckets]

    def increment(self, value: float) -> None:
        kind = self._family.kind
        if kind == MetricFamily.COUNTER and value < 0:
            raise TritonModelException("a counter can't be decremented")
        if kind == MetricFamily.HISTOGRAM:
            raise TritonModelException("a histogram observes values, it isn't incremented")
        self._value += float(value)
        self._tell(float(value) if kind == MetricFamily.COUNTER else self._value)

    def set(self, value: float) -> None:
        if self._family.kind != MetricFamily.GAUGE:
            raise TritonModelException("only a gauge can be set")
        self._value = float(value)
        self._tell(self._value)

    def observe(self, value: float) -> None:
        if self._family.kind != MetricFamily.HISTOGRAM:
            raise TritonModelException("only a histogram observes values")
        self._value += float(value)
        self._tell(float(value))

    def value(self) -> float:
        """The value in this worker; of a histogram the sum."""
        return self._value

    def _tell(self, value: float) -> None:
        family = self._family
        labels = [Dimension(name, text) for name, text in self.labels.items()]
        kind, help = MetricTypes[family.kind], family.description
        emit(body(family.name, "Count", value, labels, metric_type=kind, help=help, buckets=self._buckets))


class MetricFamily:
    """Metrics of one name, all with the same labels."""

    COUNTER, GAUGE, HISTOGRAM = "COUNTER", "GAUGE", "HISTOGRAM"

    def __init__(self, name: str, description: str, kind: str) -> None:
        if kind not in (self.COUNTER, self.GAUGE, self.HISTOGRAM):
            raise TritonModelException(f"the kind of metric {name!r} must be COUNTER, GAUGE or HISTOGRAM, not {kind!r}")
        if not is_name(str(name)):
            raise TritonModelException(f"a metric's name has letters, digits and underscores: {name!r}")
        self.name, self.description, self.kind = str(name), str(description), kind

    def Metric(self, labels: dict[str, str] | None = None, buckets: Sequence[float] | None = None) -> Metric:
        return Metric(self, labels or {}, buckets or ())


class PreferredMemory:
    """A model's preferred memory for another model's answer; here all answers are on the CPU."""

    def __init__(self, preferred_memory_type: Any, preferred_device_id: int = 0) -> None:
        self.type, self.device_id = preferred_memory_type, preferred_device_id
