"""The protocol's HTTP form: JSON, with tensors in binary after it where the client says so."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ts.protocol.datatypes import Datatype
from ts.protocol.frames import Buffer, PackedPairs
from ts.tensors.forms import Form, ModelSpec, check_reserved, completed, payload
from ts.tensors.json_text import dumped, list_text, loaded
from ts.tensors.json_usual import usual_request
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
    loose_bytes,
    raw_view,
)

#: Advice for elements that are no text.
NO_TEXT = "Send bytes that aren't text as binary data, or in base64 with the input's parameter content_type base64"
_SCALARS = (str, int, float, bool)
#: The most cached heads of answers, and of outputs with their shapes.
HEADS_MAX = 256


def from_json(kind: Datatype, shape: Sequence[int], data: Any, parameters: dict[str, Any], label: str) -> Array:
    """`data`, flat or nested, as an array of `shape`; a single element needs no list. Raises BadTensor."""
    count = elements(shape, label)
    flat = _flat_list([data] if count == 1 and isinstance(data, _SCALARS) else data, label)
    if len(flat) != count:
        raise BadTensor(f"{label}: {len(flat)} elements in data, but shape {list(shape)} takes {count}")
    if kind.name == "BYTES":
        return bytes_array([_element_bytes(value, parameters, label) for value in flat], shape)
    if kind.as_bits:
        raise BadTensor(f"{label}: {kind.name} has no form in JSON: send it as binary data")
    return _numbers(kind, flat, label).reshape(tuple(shape))


def _texts_of(data: Any, parameters: dict[str, Any], label: str) -> list[bytes]:
    """The elements of BYTES, however many there are; a single one needs no list. Raises BadTensor."""
    flat = _flat_list([data] if isinstance(data, _SCALARS) else data, label)
    return [_element_bytes(value, parameters, label) for value in flat]


def _flat_list(data: Any, label: str) -> list[Any]:
    if not isinstance(data, list):
        raise BadTensor(f"{label}: data is a list, not {type(data).__name__}")
    flat: list[Any] = data
    while flat and isinstance(flat[0], list):
        if not all(isinstance(row, list) for row in flat):
            raise BadTensor(f"{label}: data mixes lists and elements")
        flat = [value for row in flat for value in row]
    return flat


#: The types of a number's elements in JSON.
_WANTED: dict[type, frozenset[type]] = {float: frozenset({int, float}), int: frozenset({int}), bool: frozenset({bool})}


def _numbers(kind: Datatype, flat: list[Any], label: str) -> Array:
    wanted = _WANTED[kind.element]
    if kind.element is float and None in flat:
        flat = [math.nan if value is None else value for value in flat]
    if not wanted.issuperset(map(type, flat)):
        odd = next(value for value in flat if type(value) not in wanted)
        raise BadTensor(f"{label}: {odd!r} is no {kind.name}")
    try:
        with np.errstate(over="ignore"):
            array = np.array(flat, kind.dtype)
    except OverflowError as error:
        raise BadTensor(f"{label}: an element does not fit {kind.name}: {error}") from None
    if kind.element is int and flat and (min(flat) < np.iinfo(kind.dtype).min or max(flat) > np.iinfo(kind.dtype).max):
        raise BadTensor(f"{label}: an element does not fit {kind.name}")
    return array


def _element_bytes(value: Any, parameters: dict[str, Any], label: str) -> bytes:
    if not isinstance(value, str):
        raise BadTensor(f"{label}: an element of BYTES is a text, not {value!r}")
    if parameters.get("content_type") == "base64":
        try:
            return base64.b64decode(value, validate=True)
        except ValueError as error:
            raise BadTensor(f"{label}: {value[:40]!r} is not base64: {error}") from None
    return text_bytes(value, label)


def text_bytes(value: str, label: str) -> bytes:
    """A text in UTF-8. BadTensor for one with half a character, which JSON can write (`"\\ud83d"`)."""
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise BadTensor(
            f"{label}: {value[error.start]!r} is half a character, which UTF-8 can't have. {NO_TEXT}"
        ) from None


def to_json(tensor: Tensor, parameters: dict[str, Any]) -> list[Any]:
    """The elements, flat; bytes that are no text become base64, which is added to `parameters`."""
    if tensor.datatype == "BYTES":
        return _texts([as_bytes(value) for value in tensor.array.ravel()], parameters)
    flat = tensor.numbers().ravel()
    values: list[Any] = flat.tolist()
    if flat.dtype.kind == "f":
        return [value if math.isfinite(value) else None for value in values]
    return values


def data_text(tensor: Tensor, parameters: dict[str, Any]) -> bytes:
    if tensor.datatype == "BYTES":
        return list_text(to_json(tensor, parameters))
    flat = tensor.numbers().ravel()
    return list_text(flat.tolist()) if flat.dtype.kind in "biuf" else dumped(to_json(tensor, parameters))


def _texts(values: list[bytes], parameters: dict[str, Any]) -> list[Any]:
    if parameters.get("content_type") != "base64":
        try:
            return [value.decode() for value in values]
        except UnicodeDecodeError:
            parameters["content_type"] = "base64"
    return [base64.b64encode(value).decode() for value in values]


#: The header with the length of the body's JSON, which binary tensors follow.
LENGTH_HEADER = "inference-header-content-length"
_RAW_LENGTH_HEADER = LENGTH_HEADER.encode()
LENGTH_DIGITS_MAX = 19
BINARY_SIZE, BINARY, BINARY_ALL = "binary_data_size", "binary_data", "binary_data_output"


class JsonForm(Form):
    """A V2 request over HTTP, and how its answers are written: in a stream as JSON, since events have no more room."""

    # The attributes of most requests.
    _regions = NO_REGIONS
    _binary: Buffer = b""
    _binary_at = 0

    def __init__(self, data: Buffer, pairs: Headers, options: frozenset[str], model: ModelSpec) -> None:
        self._model = model
        if options:
            self._regions = Regions(options)
        length = _length(pairs)
        usual = usual_request(data, pairs, model) if length is None else None
        if usual is not None:
            self.request, self.checked = usual
        else:
            self.request = self._read(data, pairs, length)

    # --- the request

    def _read(self, data: Buffer, pairs: Headers, length: str | None) -> InferenceRequest:
        """`length`: of the JSON, as the header says it."""
        model = self._model
        head, self._binary = _split(data, length)
        if not head and length is not None:
            return _raw_request(self._binary, model, pairs)
        message = json_object(head)
        inputs = _list(message, "inputs")
        request = InferenceRequest(
            self._inputs(inputs),
            _text(message, "id"),
            model.name,
            model.version,
            _parameters(message, "the request"),
            [_requested(output) for output in _list(message, "outputs", required=False)],
            pairs,
        )
        if request.parameters:
            check_reserved(request.parameters)
        if self._binary_at < len(self._binary):
            left = len(self._binary) - self._binary_at
            raise BadTensor(f"{left} bytes of binary data are left over after the inputs")
        return request

    def _inputs(self, inputs: Sequence[Any]) -> list[Tensor]:
        for tensor in inputs:
            if not isinstance(tensor, dict) or not isinstance(tensor.get("name"), str):
                raise BadTensor("each of the inputs is an object with a name")
        check_names([tensor["name"] for tensor in inputs])
        return [self._input(tensor) for tensor in inputs]

    def _input(self, tensor: dict[str, Any]) -> Tensor:
        name = tensor["name"]
        label = f"input {name!r}"
        kind = datatype(_text(tensor, "datatype", f"{label}: "), label)
        shape = _shape(tensor.get("shape"), label)
        parameters = _parameters(tensor, label)
        size = parameters.get(BINARY_SIZE)
        if (size is not None) + ("data" in tensor) + (REGION in parameters) != 1:
            raise BadTensor(f"{label}: give either data or the parameter {BINARY_SIZE} or {REGION}")
        if REGION in parameters:
            array = decode_raw(kind, shape, self._regions.read(parameters, label), label)
            parameters = {key: value for key, value in parameters.items() if key not in PARAMETERS}
        elif size is not None:
            array = decode_raw(kind, shape, self._taken(size, label), label)
            parameters = {key: value for key, value in parameters.items() if key != BINARY_SIZE}
        elif self._model.loose and kind.name == "BYTES":
            return loose_bytes(name, _texts_of(tensor["data"], parameters, label), shape, parameters, label)
        else:
            array = from_json(kind, shape, tensor["data"], parameters, label)
        return Tensor(name, kind.name, array, parameters)

    def _taken(self, size: Any, label: str) -> Buffer:
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise BadTensor(f"{label}: {BINARY_SIZE} is a number of bytes, not {size!r}")
        left = len(self._binary) - self._binary_at
        if size > left:
            raise BadTensor(f"{label}: {BINARY_SIZE} is {size}, but only {left} bytes are left")
        self._binary_at += size
        return self._binary[self._binary_at - size : self._binary_at]

    # --- the answer

    def answer(self, response: InferenceResponse, last: bool) -> bytes:
        """JSON, with the requested binary outputs after it. Raises BadTensor for an output that doesn't exist."""
        response = completed(response, self.request, self._model)
        binary: list[Buffer] = []
        head = _head(response.model_name, response.model_version)
        if response.id:
            head += b',"id":' + dumped(response.id)
        if response.parameters:
            head += b',"parameters":' + dumped(response.parameters)
        wanted = {output.name: output.parameters for output in self.request.outputs}
        outputs = [self._output(tensor, wanted.get(tensor.name, {}), binary) for tensor in response.outputs]
        head = b'%b,"outputs":[%b]}' % (head, b",".join(outputs))
        self.headers = ()
        if binary:
            self.headers = (("content-type", "application/octet-stream"), (LENGTH_HEADER, str(len(head))))
        return b"".join((head, *binary))

    def _output(self, tensor: Tensor, asked: dict[str, Any], binary: list[Buffer]) -> bytes:
        """An output in JSON, its elements as text of their own, or in `binary`."""
        text = _output_head(tensor.name, tensor.datatype, tensor.shape)
        parameters = dict(tensor.parameters)
        if REGION in asked:
            data = raw_view(tensor.datatype, tensor.array)
            parameters |= self._regions.write(asked, data, f"output {tensor.name!r}")
        elif not self.request.stream and asked.get(BINARY, self.request.parameters.get(BINARY_ALL, False)):
            data = raw_view(tensor.datatype, tensor.array)
            parameters[BINARY_SIZE] = len(data)
            binary.append(data)
        else:
            text += b',"data":' + data_text(tensor, parameters)
        return text + (b',"parameters":%b}' % dumped(parameters) if parameters else b"}")

    def failed(self, text: str) -> bytes:
        return dumped({"error": text}) if self.request.stream else b""


opened = JsonForm


@lru_cache(maxsize=HEADS_MAX)
def _head(model: str, version: str) -> bytes:
    return dumped({"model_name": model, "model_version": version})[:-1]


@lru_cache(maxsize=HEADS_MAX)
def _output_head(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    return dumped({"name": name, "datatype": datatype, "shape": list(shape)})[:-1]


def _length(pairs: Headers) -> str | None:
    """The value of LENGTH_HEADER; None without it. Most requests' headers needn't be read to know that."""
    if type(pairs) is PackedPairs and pairs.block.find(_RAW_LENGTH_HEADER) < 0:  # `in` costs more
        return None
    return dict(pairs).get(LENGTH_HEADER)


def _split(data: Buffer, length: str | None) -> tuple[bytes, Buffer]:
    """Splits a body into the JSON, of that length, and the bytes after it, which stay where they are."""
    if length is None:
        return payload(data), b""
    digits = length.isascii() and length.isdigit() and len(length) <= LENGTH_DIGITS_MAX
    if not digits or int(length) > len(data):
        raise BadTensor(f"{LENGTH_HEADER} is {length!r}, but the body has {len(data)} bytes")
    view = memoryview(data)
    return bytes(view[: int(length)]), view[int(length) :]


def json_object(head: bytes) -> dict[str, Any]:
    try:
        message = loaded(head)
    except UnicodeDecodeError as error:
        raise BadTensor(f"{_not_utf8(head)}the body is not valid JSON: {error}. {NO_TEXT}") from None
    except (ValueError, RecursionError) as error:
        raise BadTensor(f"the body is not valid JSON: {error}") from None
    if not isinstance(message, dict):
        raise BadTensor(f"the body is a JSON {type(message).__name__}, not an object with inputs")
    return message


def _not_utf8(head: bytes) -> str:
    """The input whose elements are no UTF-8, as messages begin; "" when the fault is elsewhere."""
    try:
        inputs = json.loads(head.decode("utf-8", "surrogateescape"))["inputs"]
        return next((f"input {tensor['name']!r}: " for tensor in inputs if not _is_text(tensor.get("data"))), "")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return ""


def _is_text(data: Any) -> bool:
    try:
        return bool(json.dumps(data, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        return False


def _list(message: dict[str, Any], name: str, required: bool = True) -> list[Any]:
    found = message.get(name)
    if found is None and not required:
        return []
    if not isinstance(found, list):
        raise BadTensor(f"{name} is a list of objects" if required else f"{name} is a list")
    return found


def _text(message: dict[str, Any], name: str, label: str = "") -> str:
    found = message.get(name, "")
    if found is None:
        return ""
    if not isinstance(found, str):
        raise BadTensor(f"{label}{name} is a text, not {found!r}")
    return found


def _parameters(message: dict[str, Any], label: str) -> dict[str, Any]:
    found = message.get("parameters")
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise BadTensor(f"{label}: parameters is an object")
    return found


def _requested(output: Any) -> RequestedOutput:
    if not isinstance(output, dict) or not isinstance(output.get("name"), str):
        raise BadTensor("each of the outputs is an object with a name")
    return RequestedOutput(output["name"], _parameters(output, f"output {output['name']!r}"))


def _shape(value: Any, label: str) -> list[int]:
    if not isinstance(value, list) or not all(type(size) is int for size in value):
        raise BadTensor(f"{label}: shape is a list of whole numbers, not {value!r}")
    return value


def _raw_request(data: Buffer, model: ModelSpec, pairs: Headers) -> InferenceRequest:
    """A body without JSON: the one input that the model declares, its one variable dimension found from the size."""
    if len(model.inputs) != 1:
        raise BadTensor(
            f"a body without JSON needs a model that declares one input; {model.name!r} has {len(model.inputs)}"
        )
    ((name, declared),) = model.inputs.items()
    label = f"input {name!r}"
    kind = datatype(declared.get("datatype", ""), label)
    if kind.name == "BYTES":
        array = bytes_array([bytes(data)], [1 for _ in declared.get("shape", [1])])
    else:
        array = decode_raw(kind, _fitted(declared.get("shape", [-1]), len(data), kind), data, label)
    return InferenceRequest(
        [Tensor(name, kind.name, array)], "", model.name, model.version, {BINARY_ALL: True}, [], pairs
    )


def _fitted(shape: Sequence[int], size_bytes: int, kind: Datatype) -> list[int]:
    """The shape with its variable dimension found from the size; of two, the first is a batch of one."""
    found = list(shape)
    if found.count(-1) > 1 and found[0] == -1:
        found[0] = 1
    fixed = math.prod(size for size in found if size > 0) * kind.size_bytes
    return [size_bytes // fixed if size == -1 and fixed else size for size in found]
