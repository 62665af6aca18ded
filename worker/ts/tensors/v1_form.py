"""KServe's V1 protocol: `{"instances": […]}` and `{"predictions": […]}`, also as CloudEvents; and requests over
TorchServe's own APIs for models that are a graph of tensors: JSON, CSV or .npy (docs/weights.md)."""

from __future__ import annotations

import base64
import io
import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.lib import format as npy

from ts.protocol.frames import Buffer, Input
from ts.tensors import json_form
from ts.tensors.forms import Form, ModelSpec, check_declared, payload, plain_value
from ts.tensors.json_form import dumped, from_json, text_bytes
from ts.tensors.types import (
    Array,
    BadTensor,
    Headers,
    InferenceRequest,
    InferenceResponse,
    Tensor,
    bytes_array,
    datatype,
)

EXPLAIN = "explain"
INSTANCES = ("instances", "inputs")
#: The parameter, which no client can set, of a tensor whose datatype was guessed from its numbers.
GUESSED = "\0guessed"
_STRUCTURED = "application/cloudevents+json"


@dataclass(slots=True)
class V1Request(InferenceRequest):
    """`payload` is the body as it came; the inherited `inputs` are the tensors it makes, if any."""

    payload: dict[str, Any] = field(default_factory=dict)
    explain: bool = False


@dataclass(slots=True)
class V1Response(InferenceResponse):
    """`payload` is the body of the answer."""

    payload: dict[str, Any] = field(default_factory=dict)


class V1Form(Form):
    """Instances that are objects are rows of tensors with their keys' names; all others are one tensor, of the model's
    only input that isn't optional, or `instances`. Values that make no array of numbers or texts are a BYTES tensor of
    JSON."""

    def __init__(self, data: Buffer, pairs: Headers, options: frozenset[str], model: ModelSpec) -> None:
        self._model, headers, explain = model, dict(pairs), EXPLAIN in options
        self._event = any(name.lower() == "ce-id" for name in headers)
        body = _object(payload(data))
        if headers.get("content-type", "").startswith(_STRUCTURED):
            self._event, body = True, _event_data(body)
        self.headers = self._event_headers()
        rows = next((body[name] for name in INSTANCES if isinstance(body.get(name), list)), None)
        if rows is None:
            raise BadTensor('Expected "instances" or "inputs" to be a list')
        self.request = V1Request(
            tensors_of(rows, model), "", model.name, model.version, pairs=headers, payload=body, explain=explain
        )

    def _event_headers(self) -> list[tuple[str, str]]:
        if not self._event:
            return []
        source = f"io.kserve.inference.{self._model.name}"
        names = {
            "specversion": "1.0",
            "id": str(uuid.uuid4()),
            "source": source,
            "type": "io.kserve.inference.response",
        }
        return [(f"ce-{name}", value) for name, value in names.items()]

    def answer(self, response: InferenceResponse, last: bool) -> bytes:
        if isinstance(response, V1Response):
            return dumped(response.payload)
        return dumped({"predictions": _predictions(response.outputs)})


opened = V1Form


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadTensor(f"the body is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadTensor('Expected "instances" or "inputs" to be a list')
    return found


def _event_data(event: dict[str, Any]) -> dict[str, Any]:
    """The data of a CloudEvent in structured mode. BadTensor without any."""
    if "data_base64" in event:
        try:
            decoded = base64.b64decode(event["data_base64"], validate=True)
        except (ValueError, TypeError) as error:  # a ValueError alone for text that isn't ASCII
            raise BadTensor(f"data_base64 of the CloudEvent is not base64: {error}") from None
        return _object(decoded)
    data = event.get("data")
    if not isinstance(data, dict):
        raise BadTensor("the CloudEvent has no object as its data")
    return data


def tensors_of(rows: list[Any], model: ModelSpec) -> list[Tensor]:
    """The tensors of instances. Raises BadTensor."""
    if rows and all(isinstance(row, dict) and set(row) == set(rows[0]) for row in rows):
        return [tensor_of(name, [row[name] for row in rows], model) for name in rows[0]]
    needed = [name for name, one in model.inputs.items() if not one.get("optional")]
    return [tensor_of(needed[0] if len(needed) == 1 else INSTANCES[0], rows, model)]


def tensor_of(name: str, values: list[Any], model: ModelSpec) -> Tensor:
    """Of the datatype that the model declares, else of the one that the values look like."""
    label = f"input {name!r}"
    declared = model.inputs.get(name, {}).get("datatype")
    if declared and not (declared == "BYTES" and any(isinstance(value, dict) for value in values)):
        kind = datatype(declared, label)
        return Tensor(name, kind.name, from_json(kind, _nested_shape(values), values, {}, label))
    if all(isinstance(value, str) for value in values):
        return Tensor(name, "BYTES", bytes_array([text_bytes(value, label) for value in values], [len(values)]))
    try:
        array = np.array(values)
    except ValueError:
        array = np.empty(0, dtype=object)
    if array.dtype.kind in "biuf":
        return Tensor.of(name, array, **{GUESSED: True})
    return Tensor(name, "BYTES", bytes_array([dumped(value) for value in values], [len(values)]))


def _nested_shape(values: Any) -> list[int]:
    """Of lists in lists, as the first of each level has it."""
    shape = []
    while isinstance(values, list):
        shape.append(len(values))
        values = values[0] if values else None
    return shape


def _predictions(outputs: Sequence[Tensor]) -> Any:
    """One output's rows; of several an object for each row, or of lists where their numbers of rows differ."""
    if not outputs:
        return []
    values = {tensor.name: plain_value(tensor) for tensor in outputs}
    if len(values) == 1:
        return next(iter(values.values()))
    counts = {len(value) if isinstance(value, list) else -1 for value in values.values()}
    if len(counts) != 1 or -1 in counts:
        return values
    return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


#: The beginning of a .npy file.
_MAGIC = b"\x93NUMPY"
#: Rows of numbers, which need no content type to be CSV.
_ROWS = re.compile(rb"[\d\s.eE+-]+(?:,[\d\s.eE+-]+)+")
_ENTRY = {"name", "shape", "datatype"}
_WANTED = "send JSON, such as [[1, 2]], CSV (text/csv) or an array in a .npy file"


def request_of(inputs: Sequence[Input], pairs: Headers, model: ModelSpec) -> InferenceRequest:
    """The tensors of a request: a single input is the body, several are one tensor each. Raises BadTensor."""
    if len(inputs) == 1:
        name, content_type, data = inputs[0]
        if not data and name[:1] in ("[", "{"):  # curl -d sends JSON as a form, whose only field has no value
            name, content_type, data = "body", "application/json", name.encode()
        tensors = _of_body(name, _read(name, content_type, payload(data)), payload(data), pairs, model)
    else:
        tensors = [_tensor(name, _read(name, kind, payload(data)), model) for name, kind, data in inputs]
    request = InferenceRequest(tensors, "", model.name, model.version, {}, [], pairs)
    if model.inputs:
        check_declared(request, model)
    return request


def _of_body(name: str, value: Any, data: bytes, pairs: Headers, model: ModelSpec) -> list[Tensor]:
    if isinstance(value, dict):
        rows = next((value[key] for key in INSTANCES if isinstance(value.get(key), list)), None)
        if rows and all(isinstance(row, dict) and row.keys() >= _ENTRY for row in rows):
            return json_form.opened(data, pairs, frozenset(), model).request.inputs
        if rows is not None:
            return tensors_of(rows, model)
        named = value["inputs"] if isinstance(value.get("inputs"), dict) else value
        return [_tensor(key, one, model) for key, one in named.items()]
    only = next(iter(model.inputs)) if len(model.inputs) == 1 and name not in model.inputs else name
    return [_tensor(only, value, model)]


def _read(name: str, content_type: str, data: bytes) -> Any:
    """The array or the JSON value of an input; bytes when it is neither."""
    kind = content_type.partition(";")[0].strip().lower()
    if data.startswith(_MAGIC):
        return _array(name, data)
    told = kind.endswith("json")
    if told or (kind != "text/csv" and data.lstrip()[:1] in (b"[", b"{")):
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            if told or not data.lstrip()[1:2].isalpha():  # "[CLS] a word" is a text
                raise BadTensor(f"input {name!r} is not valid JSON: {error}") from None
    if kind == "text/csv" or (kind != "text/plain" and _ROWS.fullmatch(data)):
        return _csv(name, data)
    return data


def _array(name: str, data: bytes) -> Array:
    """The array of a .npy file, whose header may announce anything: nothing is allocated for it."""
    file = io.BytesIO(data)
    try:
        read = npy.read_array_header_1_0 if npy.read_magic(file)[0] == 1 else npy.read_array_header_2_0
        shape, columns_first, dtype = read(file)
        if dtype.kind not in "biuf":
            raise ValueError(f"it has elements of {dtype}")
        flat = np.frombuffer(data, dtype, offset=file.tell())
        return flat.reshape(shape, order="F" if columns_first else "C").astype(dtype.newbyteorder("="))
    except (ValueError, OverflowError, MemoryError, SyntaxError, EOFError) as error:
        raise BadTensor(f"input {name!r} is not a usable .npy file: {error}") from None


def _csv(name: str, data: bytes) -> Array:
    """Rows of numbers. Whole numbers stay whole."""
    kinds = [np.float64] if re.search(rb"[.eEnN]", data) else [np.int64, np.float64]
    problem: Exception | None = None
    for kind in kinds:
        try:
            return np.loadtxt(io.StringIO(data.decode()), dtype=kind, delimiter=",", comments=None, ndmin=2)
        except (ValueError, OverflowError) as error:
            problem = error
    raise BadTensor(f"input {name!r} is not CSV of numbers without a header: {problem}")


def _tensor(name: str, value: Any, model: ModelSpec) -> Tensor:
    declared = model.inputs.get(name, {}).get("datatype")
    if isinstance(value, bytes):
        if declared and declared != "BYTES":
            raise BadTensor(f"input {name!r} is neither JSON, CSV nor .npy; the model takes {declared}: {_WANTED}")
        return Tensor.of(name, value)
    if not isinstance(value, np.ndarray):
        return tensor_of(name, value if isinstance(value, list) else [value], model)
    kind = datatype(declared, f"input {name!r}") if declared else None
    if kind is None or kind.as_bits or kind.name == "BYTES":
        return Tensor.of(name, value, **{GUESSED: True})
    if not np.can_cast(value.dtype, kind.dtype, "same_kind"):
        raise BadTensor(f"input {name!r} is an array of {value.dtype}; the model takes {declared}")
    return Tensor(name, kind.name, value.astype(kind.dtype))
