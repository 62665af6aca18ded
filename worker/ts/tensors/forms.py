"""Forms of requests and their answers: the interface between the runtime and a protocol.

The frontend hands a tensor request on as one input whose content type begins with a NUL, which no client can send; the
rest of it names the form and its options: `\\0grpc`, `\\0json;stream`. TorchServe's handlers get the tensors as rows
(the table: docs/open-inference.md).
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ts.protocol.datatypes import DATATYPES
from ts.protocol.frames import Buffer, Input, Item
from ts.tensors.types import (
    Array,
    BadTensor,
    Headers,
    InferenceRequest,
    InferenceResponse,
    Tensor,
    as_bytes,
    bytes_array,
)

EMPTY_FINAL = "triton_enable_empty_final_response"
_RESERVED = "triton_"
_WHOLE = ("priority", "timeout")
_FLAGS = ("sequence_start", "sequence_end", EMPTY_FINAL)


def check_reserved(parameters: Mapping[str, Any]) -> None:
    """Raises BadTensor for a value of another type, and for names that Triton reserves."""
    for name, value in parameters.items():
        if name.startswith(_RESERVED) and name != EMPTY_FINAL:
            raise BadTensor(f"parameter {name!r}: names that begin with {_RESERVED} are reserved")
        if name in _WHOLE and (type(value) is not int or value < 0):
            raise BadTensor(f"parameter {name!r} is a number, at least 0, not {value!r}")
        if name in _FLAGS and type(value) is not bool:
            raise BadTensor(f"parameter {name!r} is true or false, not {value!r}")
        if name == "sequence_id" and (isinstance(value, bool) or not isinstance(value, (int, str))):
            raise BadTensor(f"parameter {name!r} is a number or a text, not {value!r}")


def classified(tensor: Tensor, count: Any, declared: Mapping[str, Any]) -> Tensor:
    """BYTES of shape [n], or [batch, n], largest first. `declared`: `batched` tells whether the first dimension is a
    batch (without it: when there are several), `labels` has a text by index. Raises BadTensor when it can't be
    classified."""
    if type(count) is not int or count < 1:
        raise BadTensor(f"output {tensor.name!r}: classification is a number of classes, at least 1, not {count!r}")
    kind = DATATYPES[tensor.datatype]
    if kind.element is bytes or kind.as_bits:
        raise BadTensor(f"output {tensor.name!r} of {tensor.datatype} can't be classified")
    array = tensor.array
    if not declared.get("batched", array.ndim > 1):
        texts = _largest(array.ravel(), count, declared.get("labels") or ())
        return Tensor(tensor.name, "BYTES", bytes_array(texts, [len(texts)]))
    rows = [_largest(row.ravel(), count, declared.get("labels") or ()) for row in array]
    flat = [text for row in rows for text in row]
    return Tensor(tensor.name, "BYTES", bytes_array(flat, [len(rows), len(rows[0]) if rows else 0]))


def _largest(values: Array, count: int, labels: Sequence[str]) -> list[bytes]:
    """Of equal ones the first."""
    order = np.argsort(-values.astype(np.float64), kind="stable")[:count]
    return [_class_text(values[index], int(index), labels) for index in order]


def _class_text(value: Any, index: int, labels: Sequence[str]) -> bytes:
    shown = f"{value:f}" if np.issubdtype(type(value), np.floating) else str(int(value))
    label = f":{labels[index]}" if index < len(labels) else ""
    return f"{shown}:{index}{label}".encode()


@dataclass(frozen=True, slots=True, eq=False)
class ModelSpec:
    """The model as a form sees it: `inputs` and `outputs` are its declared tensors, by name (datatype, shape),
    empty when it declares nothing; `parameters`: datatypes of requests' parameters; `loose`: BYTES in JSON and in typed
    contents may have another number of elements than their shape; `values`: requests of TorchServe's own APIs are
    values, JSON, CSV or .npy, not the handler's bytes; `accepted`: inputs of requests that were found to be
    as declared, by names, datatypes and shapes; `layouts`: those of usual requests, by their sizes over gRPC, and in
    JSON by the text between their elements; `latest`: of the last request in JSON with one list of elements, the texts
    before and after the list, and the layout."""

    name: str
    version: str
    inputs: dict[str, dict[str, Any]]
    outputs: dict[str, dict[str, Any]]
    parameters: dict[str, str] = field(default_factory=dict)
    loose: bool = False
    values: bool = False
    accepted: set[tuple[Any, ...]] = field(default_factory=set)
    layouts: dict[Any, Any] = field(default_factory=dict)
    latest: list[Any] = field(default_factory=list)


class Form:
    """One request in its protocol's form. Making one raises BadTensor for a request that can't be read. `headers`: of
    the answer; answers over HTTP are JSON unless these name another type. `checked`: the inputs are known to be those
    that the model declares."""

    request: InferenceRequest
    headers: Sequence[tuple[str, str]] = ()
    checked = False

    def answer(self, response: InferenceResponse, last: bool) -> bytes:
        """A message that carries the response; `last`: the request ends with it. May set `headers` for the first."""
        raise NotImplementedError

    def failed(self, text: str) -> bytes:
        """A message about a failure after which answers go on; b"" where the protocol has none."""
        return b""

    def end(self) -> bytes:
        """The bytes that end an answer after its last message; b"" for none."""
        return b""


#: The option, in every form, of a client that takes any number of answers.
STREAM = "stream"
#: The last option of a request that others of its stream follow. STREAM comes with it.
MORE = "more"
#: The parameter of a requested output with the number of its largest elements that the client wants, as text.
CLASSIFICATION = "classification"
#: The most marks that are cached, and the most shapes of inputs that are remembered as declared.
MARKS_MAX = ACCEPTED_MAX = 256
_FORMS = {
    "generate": "ts.tensors.generate_form",
    "grpc": "ts.tensors.grpc_form",
    "json": "ts.tensors.json_form",
    "openai": "ts.tensors.openai_form",
    "route": "ts.tensors.route_form",
    "v1": "ts.tensors.v1_form",
}


def opened(item: Item, model: ModelSpec) -> Form:
    """The form of a marked item. `\\0NAME;OPTION;…`: the options are the form's own. Raises BadTensor."""
    _, content_type, data = item.inputs[0]
    mark = _marked(content_type)
    form = mark.opening(data, item.headers, mark.options, model)
    request = form.request
    if mark.stream:
        request.stream = True
    if mark.texts:
        request.texts = True
    if model.inputs and not form.checked:
        check_declared(request, model)
    if model.parameters:
        _read_texts(request, model.parameters)
    return form


class _Mark(NamedTuple):
    """A parsed mark. `opening`: the function that reads requests in its form; `texts`: they are JSON."""

    opening: Callable[..., Form]
    options: frozenset[str]
    stream: bool
    texts: bool


@lru_cache(maxsize=MARKS_MAX)
def _marked(content_type: str) -> _Mark:
    """Parses a mark. The module of its form, in which `opened` reads requests, is imported with the first one."""
    name, *options = content_type[1:].split(";")
    opening: Callable[..., Form] = importlib.import_module(_FORMS[name]).opened
    return _Mark(opening, frozenset(options), STREAM in options, name != "grpc")


def is_followed(item: Item) -> bool:
    """Whether others of its stream follow a request; only a stream's are followed."""
    return MORE in _marked(item.inputs[0].content_type).options


def _read_texts(request: InferenceRequest, declared: dict[str, str]) -> None:
    """Parameters that are declared as numbers and came as text (MAX's clients) become numbers. Raises BadTensor."""
    for name, datatype in declared.items():
        text = request.parameters.get(name)
        if isinstance(text, str) and datatype != "BYTES":
            request.parameters[name] = _read(text, name, datatype)


def _read(text: str, name: str, datatype: str) -> float | bool:
    try:
        if datatype == "BOOL":
            return {"true": True, "false": False}[text.strip().lower()]
        return float(text) if DATATYPES[datatype].element is float else int(text)
    except (KeyError, ValueError):
        raise BadTensor(f"parameter {name!r} is of {datatype}, and {text!r} isn't") from None


def check_declared(request: InferenceRequest, model: ModelSpec) -> None:
    """Raises BadTensor unless the inputs are those that the model declares."""
    key = tuple([(tensor.name, tensor.datatype, tensor.array.shape) for tensor in request.inputs])
    if key in model.accepted:
        return
    _compare(request, model)
    if len(model.accepted) < ACCEPTED_MAX:
        model.accepted.add(key)


def _compare(request: InferenceRequest, model: ModelSpec) -> None:
    given = [tensor.name for tensor in request.inputs]
    for name, declared in model.inputs.items():
        if name not in given and not declared.get("optional"):
            raise BadTensor(f"input {name!r} is missing; the model takes: {', '.join(model.inputs)}")
    for tensor in request.inputs:
        if tensor.name not in model.inputs:
            raise BadTensor(f"unexpected input {tensor.name!r}; the model takes: {', '.join(model.inputs)}")
        _check_shape(tensor, model.inputs[tensor.name])


def _check_shape(tensor: Tensor, declared: dict[str, Any]) -> None:
    wanted = declared.get("datatype")
    if wanted and tensor.datatype != wanted:
        raise BadTensor(f"input {tensor.name!r} is of {tensor.datatype}; the model takes {wanted}")
    shape = declared.get("shape")
    if shape is None:
        return
    found = tensor.array.shape
    most = declared.get("batch_max")
    if most and found and found[0] > most:
        raise BadTensor(f"input {tensor.name!r} is a batch of {found[0]}; max_batch_size is {most}")
    if not fits(found, shape):
        raise BadTensor(f"input {tensor.name!r} has shape {list(found)}; the model takes {list(shape)}")


def fits(shape: Sequence[int], declared: Sequence[int]) -> bool:
    """Whether a shape fits the declared one, where -1 is any size."""
    if len(shape) != len(declared):
        return False
    for size, wanted in zip(shape, declared, strict=True):  # noqa: SIM110  # a generator costs more than this loop
        if wanted not in (-1, size):
            return False
    return True


def completed(response: InferenceResponse, request: InferenceRequest, model: ModelSpec) -> InferenceResponse:
    """The response with name, version and id filled in where the handler left them out, and the outputs the client
    asked for, in its order. The handler's own stays as it is: it may be for several requests. Raises BadTensor for an
    output that isn't there, unless the model declares it and left it out this time."""
    return InferenceResponse(
        _wanted(response, request, model) if request.outputs else response.outputs,
        response.id or request.id,
        response.model_name or model.name,
        response.model_version or model.version,
        response.parameters,
    )


def _wanted(response: InferenceResponse, request: InferenceRequest, model: ModelSpec) -> list[Tensor]:
    """One that is asked for several times is given once."""
    found = {tensor.name: tensor for tensor in response.outputs}
    wanted = dict.fromkeys(output.name for output in request.outputs)
    for name in wanted:
        if name not in found and name not in model.outputs:
            names = ", ".join(found) or "none"
            raise BadTensor(f"unexpected inference output {name!r}; the model gave: {names}")
    classes = {
        output.name: output.parameters[CLASSIFICATION]
        for output in request.outputs
        if CLASSIFICATION in output.parameters
    }
    return [
        classified(found[name], classes[name], model.outputs.get(name, {})) if name in classes else found[name]
        for name in wanted
        if name in found
    ]


def payload(data: Buffer) -> bytes:
    """The request's bytes in the type that parsers take."""
    return data if isinstance(data, bytes) else bytes(data)


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
