"""The protocol's gRPC form: ModelInferRequest in, ModelInferResponse out (protos/open_inference.proto)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from ts.protocol.datatypes import DATATYPES, OF_FIELD
from ts.protocol.frames import Buffer
from ts.protocol.open_inference_pb2 import (
    InferParameter,
    InferTensorContents,
    ModelInferRequest,
    ModelInferResponse,
    ModelStreamInferResponse,
)
from ts.protocol.wire import prefix
from ts.tensors.forms import EMPTY_FINAL, Form, ModelSpec, check_reserved, completed, payload
from ts.tensors.grpc_usual import usual_answer, usual_request, usual_request_bytes, usual_response
from ts.tensors.shared_memory import NO_REGIONS, PARAMETERS, REGION, Regions
from ts.tensors.types import (
    Array,
    BadTensor,
    Headers,
    InferenceRequest,
    InferenceResponse,
    RequestedOutput,
    Tensor,
    as_bytes,
    bytes_array,
    check_names,
    datatype,
    decode_raw,
    elements,
    encode_raw,
    loose_bytes,
    raw_view,
)

#: The option for answers in the form of Triton's streams, with errors among them and a flag on the last one.
TRITON = "triton"
#: A further option: the stream ends with the status of its first failure.
STATUS = "status"
FINAL = "triton_final_response"

_RAW_ONLY = frozenset(name for name, kind in DATATYPES.items() if not kind.field)
_INT64 = range(-(1 << 63), 1 << 63)
_UINT64 = range(1 << 64)
_SCALARS = {bool: "bool_param", str: "string_param", float: "double_param"}


class GrpcForm(Form):
    """One ModelInferRequest, and how its answers are written.

    Typed contents are answered typed, raw ones raw. Text as code points (`int_contents` without datatype and shape) is
    answered so; a single BYTES element that came without its length is answered without it.
    """

    # The attributes of most requests.
    _triton = _ends_failed = _typed = _bare = _code_points = False
    _regions = NO_REGIONS

    def __init__(self, data: Buffer, pairs: Headers, options: frozenset[str], model: ModelSpec) -> None:
        self._model = model
        if options:
            self._triton, self._ends_failed = TRITON in options, STATUS in options
            self._regions = Regions(options)
        usual = usual_request(data, pairs, model)
        if usual is None:
            self.request = self._read(data, pairs)
            return
        self.request, typed = usual
        self.checked = True
        if typed:
            self._typed = True

    # --- the request

    def _read(self, data: Buffer, pairs: Headers) -> InferenceRequest:
        try:
            message = ModelInferRequest.FromString(payload(data))
        except DecodeError as error:
            raise BadTensor(f"the {len(data)} bytes of the request are not a ModelInferRequest: {error}") from None
        request = InferenceRequest(
            self._inputs(message),
            message.id,
            message.model_name,
            message.model_version,
            parameters(message.parameters),
            [RequestedOutput(output.name, parameters(output.parameters)) for output in message.outputs]
            if message.outputs
            else [],
            pairs,
        )
        if request.parameters:
            check_reserved(request.parameters)
        return request

    def _inputs(self, message: ModelInferRequest) -> list[Tensor]:
        raw, tensors = list(message.raw_input_contents), list(message.inputs)
        typed = [tensor.name for tensor in tensors if _filled(tensor)]
        if raw and typed:
            raise BadTensor(
                f"{_labels(typed)}: contents and raw_input_contents are both filled: a request uses one of them"
            )
        own = [tensor.name for tensor in tensors if REGION not in tensor.parameters]
        if raw and len(raw) != len(own):
            raise BadTensor(f"{_labels(own)}: {len(raw)} raw_input_contents for {len(own)} inputs")
        self._typed = bool(typed)
        check_names([tensor.name for tensor in tensors])
        if raw and len(own) == len(tensors):
            return [self._raw(tensor, data) for tensor, data in zip(tensors, raw, strict=True)]
        rest = iter(raw)
        return [
            self._shared(tensor)
            if REGION in tensor.parameters
            else self._raw(tensor, next(rest))
            if raw
            else self._contents(tensor)
            for tensor in tensors
        ]

    def _shared(self, tensor: ModelInferRequest.InferInputTensor) -> Tensor:
        label = f"input {tensor.name!r}"
        if _filled(tensor):
            raise BadTensor(f"{label}: contents, and a shared memory region")
        given = parameters(tensor.parameters)
        kind = datatype(tensor.datatype, label)
        array = decode_raw(kind, list(tensor.shape), self._regions.read(given, label), label)
        return Tensor(tensor.name, kind.name, array, {k: v for k, v in given.items() if k not in PARAMETERS})

    def _raw(self, tensor: ModelInferRequest.InferInputTensor, data: bytes) -> Tensor:
        label = f"input {tensor.name!r}"
        kind = datatype(tensor.datatype, label)
        shape = list(tensor.shape)
        try:
            array = decode_raw(kind, shape, data, label)
        except BadTensor:
            if kind.name != "BYTES" or elements(shape, label) != 1:
                raise
            self._bare = True
            array = bytes_array([data], shape)
        return Tensor(tensor.name, kind.name, array, parameters(tensor.parameters))

    def _contents(self, tensor: ModelInferRequest.InferInputTensor) -> Tensor:
        label = f"input {tensor.name!r}"
        filled = [field.name for field, _ in tensor.contents.ListFields()]
        if len(filled) > 1:
            raise BadTensor(f"{label}: more than one field of contents is filled: {', '.join(filled)}")
        if not tensor.datatype:
            return self._without_datatype(tensor, filled, label)
        kind = datatype(tensor.datatype, label)
        if not kind.field:
            raise BadTensor(f"{label}: {kind.name} has no typed contents: send it in raw_input_contents")
        if filled and filled[0] != kind.field:
            raise BadTensor(f"{label}: the elements of {kind.name} belong into {kind.field}, not {filled[0]}")
        values = getattr(tensor.contents, kind.field)
        shape = list(tensor.shape)
        if self._model.loose and kind.name == "BYTES":
            return loose_bytes(tensor.name, list(values), shape, parameters(tensor.parameters), label)
        if len(values) != elements(shape, label):
            raise BadTensor(
                f"{label}: {len(values)} elements in {kind.field}, but shape {shape} takes {elements(shape, label)}"
            )
        return Tensor(tensor.name, kind.name, _array(kind.name, values, shape, label), parameters(tensor.parameters))

    def _without_datatype(
        self, tensor: ModelInferRequest.InferInputTensor, filled: Sequence[str], label: str
    ) -> Tensor:
        """Takes the datatype from the elements' field; whole numbers not declared as such are a text's characters."""
        if not filled:
            raise BadTensor(f"{label}: neither a datatype nor contents")
        values = getattr(tensor.contents, filled[0])
        shape = list(tensor.shape) or [len(values)]
        if filled[0] == "int_contents" and not tensor.shape and not self._is_declared_numeric(tensor.name):
            self._code_points = True
            return Tensor(tensor.name, "BYTES", bytes_array([_text(values, label)], [1]), parameters(tensor.parameters))
        name = OF_FIELD[filled[0]].name
        if len(values) != elements(shape, label):
            raise BadTensor(f"{label}: {len(values)} elements, but shape {shape} takes {elements(shape, label)}")
        return Tensor(tensor.name, name, _array(name, values, shape, label), parameters(tensor.parameters))

    def _is_declared_numeric(self, name: str) -> bool:
        declared = self._model.inputs.get(name)
        return declared is not None and declared.get("datatype") != "BYTES"

    # --- the answer

    def answer(self, response: InferenceResponse, last: bool) -> bytes:
        """A serialised ModelInferResponse. Raises BadTensor for a requested output that doesn't exist."""
        if not self._bare:
            flags = _FLAGS[last] if self._triton else b""
            usual = usual_response(response, self.request, self._model, flags, self._typed)
            if usual is not None:
                return _wrapped(usual) if self._triton else usual
        response = completed(response, self.request, self._model)
        message = ModelInferResponse(
            model_name=response.model_name, model_version=response.model_version, id=response.id
        )
        fill(message.parameters, response.parameters)
        if self._triton:
            message.parameters[FINAL].bool_param = last
        wanted = {output.name: output.parameters for output in self.request.outputs}
        raw = not self._typed or any(
            tensor.datatype in _RAW_ONLY or REGION in wanted.get(tensor.name, ()) for tensor in response.outputs
        )
        for tensor in response.outputs:
            output = message.outputs.add(name=tensor.name)
            fill(output.parameters, tensor.parameters)
            if self._code_points and tensor.datatype == "BYTES":
                output.contents.int_contents.extend(_characters(tensor.array))
                continue
            output.datatype = tensor.datatype
            output.shape.extend(tensor.shape)
            if REGION in wanted.get(tensor.name, ()):
                data = raw_view(tensor.datatype, tensor.array)
                there = self._regions.write(wanted[tensor.name], data, f"output {tensor.name!r}")
                fill(output.parameters, there)
                message.raw_output_contents.append(b"")
            elif raw:
                message.raw_output_contents.append(self._raw_elements(tensor))
            else:
                _put(output.contents, tensor)
        return self._written(message)

    def _written(self, message: ModelInferResponse) -> bytes:
        data = message.SerializeToString()
        return _wrapped(data) if self._triton else data

    def failed(self, text: str) -> bytes:
        if not self._triton or self._ends_failed:
            return b""
        message = ModelStreamInferResponse(error_message=text)
        message.infer_response.model_name, message.infer_response.id = self._model.name, self.request.id
        message.infer_response.parameters[FINAL].bool_param = False
        return message.SerializeToString()

    def _raw_elements(self, tensor: Tensor) -> bytes:
        if self._bare and tensor.datatype == "BYTES" and tensor.array.size == 1:
            return as_bytes(tensor.array.ravel()[0])
        return encode_raw(tensor.datatype, tensor.array)

    def end(self) -> bytes:
        """The empty last answer, for clients that asked for one."""
        if not self._triton or not self.request.parameters.get(EMPTY_FINAL):
            return b""
        message = ModelInferResponse(model_name=self._model.name, model_version=self._model.version, id=self.request.id)
        message.parameters[FINAL].bool_param = True
        return self._written(message)


opened = GrpcForm


def _wrapped(response: bytes) -> bytes:
    """A ModelStreamInferResponse with a response that is written already, its field 2."""
    return prefix(2, len(response)) + response


def _flag(final: bool) -> bytes:
    """The parameter that says whether an answer is its request's last."""
    message = ModelInferResponse()
    message.parameters[FINAL].bool_param = final
    return message.SerializeToString()


_FLAGS = {final: _flag(final) for final in (False, True)}


def _filled(tensor: ModelInferRequest.InferInputTensor) -> bool:
    """Whether typed elements are there: a field that is present and empty counts as absent (MLServer's clients)."""
    return tensor.HasField("contents") and bool(tensor.contents.ListFields())


def _labels(names: Sequence[str]) -> str:
    return "inputs " + ", ".join(map(repr, names)) if len(names) > 1 else f"input {names[0]!r}" if names else "no input"


def _text(values: Sequence[int], label: str) -> bytes:
    try:
        return "".join(map(chr, values)).encode()
    except (ValueError, OverflowError) as error:
        raise BadTensor(f"{label}: the numbers without a datatype are not the code points of a text: {error}") from None


def _characters(array: Array) -> list[int]:
    text = b"".join(as_bytes(value) for value in array.ravel()).decode("utf-8", "replace")
    return [ord(character) for character in text]


def _array(name: str, values: Any, shape: Sequence[int], label: str) -> Array:
    if name == "BYTES":
        return bytes_array(list(values), shape)
    try:
        return np.array(list(values), DATATYPES[name].dtype).reshape(tuple(shape))
    except OverflowError as error:
        raise BadTensor(f"{label}: an element does not fit {name}: {error}") from None


def _put(contents: InferTensorContents, tensor: Tensor) -> None:
    field = getattr(contents, DATATYPES[tensor.datatype].field)
    flat = tensor.array.ravel()
    field.extend([as_bytes(value) for value in flat] if tensor.datatype == "BYTES" else flat.tolist())


def parameters(found: Mapping[str, InferParameter]) -> dict[str, Any]:
    """Parameters by name; one without a value is None."""
    return {name: _value(parameter) for name, parameter in found.items()} if found else {}


def _value(parameter: InferParameter) -> Any:
    choice = parameter.WhichOneof("parameter_choice")
    return getattr(parameter, choice) if choice else None


def fill(found: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if value is not None:
            _set(found[name], value)


def _set(parameter: InferParameter, value: Any) -> None:
    field = _SCALARS.get(type(value))
    if field is None and isinstance(value, int) and not isinstance(value, bool):
        field = "int64_param" if value in _INT64 else "uint64_param" if value in _UINT64 else None
    if field is None:
        field, value = "string_param", json.dumps(value, default=str)
    setattr(parameter, field, value)


def request_bytes(request: InferenceRequest) -> bytes:
    usual = usual_request_bytes(request)
    return _request_bytes(request) if usual is None else usual


def _request_bytes(request: InferenceRequest) -> bytes:
    message = ModelInferRequest(model_name=request.model_name, model_version=request.model_version, id=request.id)
    fill(message.parameters, request.parameters)
    for tensor in request.inputs:
        there = message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        fill(there.parameters, tensor.parameters)
        message.raw_input_contents.append(encode_raw(tensor.datatype, tensor.array))
    for output in request.outputs:
        fill(message.outputs.add(name=output.name).parameters, output.parameters)
    return message.SerializeToString()


def response_from(data: Buffer) -> InferenceResponse:
    """The response in a serialised ModelInferResponse. Raises BadTensor for anything else."""
    usual = usual_answer(data)
    return _response_from(data) if usual is None else usual


def _response_from(data: Buffer) -> InferenceResponse:
    try:
        message = ModelInferResponse.FromString(payload(data))
    except DecodeError as error:
        raise BadTensor(f"the {len(data)} bytes of the answer are not a ModelInferResponse: {error}") from None
    raw = message.raw_output_contents
    if raw and len(raw) != len(message.outputs):
        raise BadTensor(f"{len(raw)} raw_output_contents for {len(message.outputs)} outputs")
    outputs = [
        _output(tensor, raw[index] if raw else None, f"output {tensor.name!r}")
        for index, tensor in enumerate(message.outputs)
    ]
    more = parameters(message.parameters)
    return InferenceResponse(outputs, message.id, message.model_name, message.model_version, more)


def _output(tensor: ModelInferResponse.InferOutputTensor, raw: bytes | None, label: str) -> Tensor:
    kind, shape = datatype(tensor.datatype, label), list(tensor.shape)
    if raw is not None:
        array = decode_raw(kind, shape, raw, label)
    else:
        values = getattr(tensor.contents, kind.field) if kind.field else []
        if len(values) != elements(shape, label):
            raise BadTensor(f"{label}: {len(values)} elements, but shape {shape} takes {elements(shape, label)}")
        array = _array(kind.name, values, shape, label)
    return Tensor(tensor.name, kind.name, array, parameters(tensor.parameters))
