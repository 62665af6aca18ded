"""`kservev2`: KServe's second protocol (open inference), tensors with name, datatype, shape and flat data as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ts.protocol.datatypes import DATATYPES, OF_ARRAY_TYPE, OF_PYTHON
from ts.torch_handler.request_envelope.base import BaseEnvelope, json_object, list_in, tensors_of
from ts.utils.util import PredictionException

if TYPE_CHECKING:  # as in base.py
    from ts.tensors.types import InferenceResponse, Tensor

#: The backends by the names of their arrays' types.
_OF_ARRAY: Mapping[str, str] = MappingProxyType(
    {name: row.name for name, row in OF_ARRAY_TYPE.items() if row.element is not bytes}
)


class KServev2Envelope(BaseEnvelope):
    """Each input is a row of the handler: the request's object with `data` in its `shape` (BYTES: the first element).

    The i-th result is the output with the i-th input's name. A request that came as tensors is opened as its JSON would
    be, but BYTES that are no UTF-8 stay bytes; its answer is tensors, too.
    """

    def opened(self, row: Any) -> tuple[list[Any], dict[str, Any]]:
        request = tensors_of(row)
        if request is None:
            return super().opened(row)
        inputs, note = self.open({"id": request.id, "inputs": [_as_json(tensor) for tensor in request.inputs]})
        return inputs, note | {"tensors": True}

    def open(self, value: Any) -> tuple[list[Any], dict[str, Any]]:
        body = json_object(value)
        inputs = [_input(one) for one in list_in(body, "inputs")]
        return inputs, {"id": body.get("id"), "names": [one.get("name") for one in inputs]}

    def close(self, results: Sequence[Any], note: dict[str, Any], context: Any, idx: int) -> Any:
        model = (context.manifest or {}).get("model", {})
        names, given = note["names"], note["id"] or context.get_request_id(idx)
        outputs = [
            output(names[at] if at < len(names) else f"output-{at}", result) for at, result in enumerate(results)
        ]
        if note.get("tensors"):
            return _as_tensors(outputs, given or "")
        return {
            "id": given,
            "model_name": model.get("modelName") or getattr(context, "model_name", None),
            "model_version": model.get("modelVersion"),
            "outputs": outputs,
        }


def _as_json(tensor: Tensor) -> dict[str, Any]:
    """The object that JSON has for a tensor."""
    values = tensor.numbers().ravel().tolist()
    data = [_text(value) for value in values] if tensor.datatype == "BYTES" else values
    found = {"name": tensor.name, "shape": list(tensor.shape), "datatype": tensor.datatype, "data": data}
    return found | ({"parameters": dict(tensor.parameters)} if tensor.parameters else {})


def _text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _as_tensors(outputs: Sequence[dict[str, Any]], request_id: str) -> InferenceResponse:
    """The answer to a request that came as tensors. The model's name and version are filled in later."""
    import numpy as np

    from ts.tensors.types import InferenceResponse, Tensor, as_bytes, bytes_array, narrowed

    found = []
    for one in outputs:
        kind, data = DATATYPES[one["datatype"]], one["data"]
        if kind.name == "BYTES":
            plain = [value if isinstance(value, str | bytes | bytearray) else json.dumps(value) for value in data]
            array = bytes_array([as_bytes(value) for value in plain], one["shape"])
        else:
            array = narrowed(kind, np.array(data, "<f4")) if kind.as_bits else np.array(data, kind.dtype)
        found.append(Tensor(one["name"], kind.name, array))
    return InferenceResponse(found, request_id)


def _input(tensor: Any) -> dict[str, Any]:
    if not isinstance(tensor, dict) or not isinstance(tensor.get("data"), list):
        raise PredictionException("each input must be an object with a list under data", 400)
    datatype, name = tensor.get("datatype"), tensor.get("name")
    if not isinstance(datatype, str) or datatype not in DATATYPES:
        known = ", ".join(sorted(DATATYPES))
        raise PredictionException(f"input {name}: datatype {datatype!r} isn't one of {known}", 400)
    if datatype == "BYTES":
        if not tensor["data"]:
            raise PredictionException(f"input {name} of type BYTES has no element", 400)
        return {**tensor, "data": tensor["data"][0]}
    return {**tensor, "data": shaped(list(flat(tensor["data"])), _shape(tensor), str(name))}


def _shape(tensor: dict[str, Any]) -> list[int]:
    shape = tensor.get("shape", -1)
    sizes = shape if isinstance(shape, list) else [shape]
    if not all(isinstance(size, int) for size in sizes):
        raise PredictionException(f"input {tensor.get('name')}: shape must be a list of integers, not {shape!r}", 400)
    return list(sizes)


def flat(value: Any) -> Iterator[Any]:
    """The elements of nested lists, in order."""
    if isinstance(value, list | tuple):
        for one in value:
            yield from flat(one)
    else:
        yield value


def shaped(values: list[Any], shape: Sequence[int], name: str) -> Any:
    """`values` as nested lists of `shape`, in which one size may be -1. Raises PredictionException 400."""
    known = math.prod(size for size in shape if size != -1)
    if -1 in shape and known > 0:
        at = list(shape).index(-1)
        shape = [*shape[:at], len(values) // known, *shape[at + 1 :]]
    if any(size < 0 for size in shape) or math.prod(shape) != len(values):
        raise PredictionException(f"input {name}: {len(values)} values don't have the shape {list(shape)}", 400)
    for size in reversed(shape[1:]):
        values = [values[at : at + size] for at in range(0, len(values), size)] if size else []
    return values if shape else values[0]


def output(name: str | None, result: Any) -> dict[str, Any]:
    """One result as a tensor: a tensor's or array's own type, else by its elements; anything else is BYTES."""
    dtype = str(getattr(result, "dtype", "")).removeprefix("torch.")
    data = list(flat(result.tolist() if dtype else result))
    kinds = {OF_PYTHON.get(type(value), "BYTES") for value in data}
    whole, real = OF_PYTHON[int], OF_PYTHON[float]
    datatype = real if kinds == {whole, real} else (kinds.pop() if len(kinds) == 1 else "BYTES")
    return {"name": name, "datatype": _OF_ARRAY.get(dtype, datatype), "data": data, "shape": [len(data)]}
