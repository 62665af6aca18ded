"""Requests over TorchServe's own APIs for models that are a graph of tensors: JSON, CSV or .npy (docs/weights.md)."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib import format as npy

from ts.protocol.frames import Input
from ts.tensors import json_form
from ts.tensors.forms import ModelSpec, check_declared, payload
from ts.tensors.types import Array, BadTensor, Headers, InferenceRequest, Tensor, datatype
from ts.tensors.v1_form import GUESSED, INSTANCES, tensor_of, tensors_of

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
