"""Requests of the Open Inference Protocol in one form, whatever dialect they came in, and their answers in each.

The one form of a request is a ModelInferRequest with raw contents, that of an answer a ModelInferResponse with them.
Requests that are unusual or faulty have none: the worker reads them as they came.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from google.protobuf.message import DecodeError

from ts.protocol import open_inference_pb2 as pb
from ts.protocol.datatypes import DATATYPES, Datatype
from ts.protocol.frames import Buffer, Pairs
from ts.protocol.wire import fields, prefix

#: Larger JSON isn't decoded: it has a form of its own.
JSON_BYTES_MAX: Final = 64 * 1024
#: The elements that are written as JSON at once: between two times, other threads run.
_ELEMENTS_AT_ONCE: Final = 8192
LENGTH_HEADER: Final = "inference-header-content-length"
#: Parameters about the transfer of a request and its answer, which no model sees, or that the queue applies.
_BINARY_SIZE, _BINARY, _BINARY_ALL = "binary_data_size", "binary_data", "binary_data_output"
_SCHEDULING: Final = frozenset({"timeout", "priority"})
_REGIONS: Final = "shared_memory_"
_REGION: Final = "shared_memory_region"
_ANSWER_ID: Final = 3
_CODES: Final = {
    "BOOL": "?",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
    "BF16": "H",
}
_LENGTH: Final = struct.Struct("<I")
#: Any byte as a truth value, as numpy reads it.
_TRUTH: Final = bytes([0]) + bytes([1]) * 255
_INT64: Final = range(-(1 << 63), 1 << 63)
Written: TypeAlias = "tuple[bytes, Pairs]"


class Unusual(ValueError):
    """A request that has no common form."""


class Wish(NamedTuple):
    """How a client wants its answer. `typed`: over gRPC, in typed contents; `json`: over HTTP, with the outputs
    `binary`, or `all_binary`, after the JSON."""

    id: str = ""
    typed: bool = False
    json: bool = False
    binary: frozenset[str] = frozenset()
    all_binary: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the common form of answers is what the client wants, its id apart."""
        return not self.typed and not self.json


def of_message(data: Buffer, model: str, version: str) -> tuple[bytes, Wish]:
    """The common form of a ModelInferRequest. Raises Unusual."""
    try:
        found = pb.ModelInferRequest.FromString(bytes(data))
    except DecodeError:
        raise Unusual from None
    wish = Wish(found.id, any(one.HasField("contents") and bool(one.contents.ListFields()) for one in found.inputs))
    raw = list(found.raw_input_contents)
    if raw and (wish.typed or len(raw) != len(found.inputs)):
        raise Unusual
    contents = []
    for index, one in enumerate(found.inputs):
        kind = _kind(one.datatype)
        contents.append(
            _fitting(kind, one.shape, raw[index] if raw else _packed(kind, _of_contents(kind, one.contents)))
        )
        one.ClearField("contents")
    if contents != raw:
        found.ClearField("raw_input_contents")
        found.raw_input_contents.extend(contents)
    for name in _SCHEDULING:
        found.parameters.pop(name, None)
    found.model_name, found.model_version = model, version
    found.ClearField("id")
    return _checked(found), wish


def of_json(
    body: Buffer, length: str, model: str, version: str, *, json_bytes_max: int = JSON_BYTES_MAX, shared: bool = False
) -> tuple[bytes, Wish]:
    """The common form of a request over HTTP. `length`: of its JSON as LENGTH_HEADER says it, "" for all; `shared`:
    tensors in shared memory are taken, too, without elements. Raises Unusual."""
    data = bytes(body)
    if length and not (length.isascii() and length.isdecimal() and len(length) < 20 and 0 < int(length) <= len(data)):
        raise Unusual
    at = int(length) if length else len(data)
    if at > json_bytes_max:
        raise Unusual
    try:
        found = json.loads(data[:at])
        made = pb.ModelInferRequest(model_name=model, model_version=version)
        parameters, outputs = _given(found, "parameters", {}), _given(found, "outputs", [])
        all_binary = parameters.pop(_BINARY_ALL, False)
        _fill(made.parameters, {name: value for name, value in parameters.items() if name not in _SCHEDULING})
        for one in _given(found, "inputs", []):
            at += _add_json(made, one, data, at, shared)
        binary = set()
        for one in outputs:
            more, name = _given(one, "parameters", {}), _name(one)
            if more.pop(_BINARY, all_binary):
                binary.add(name)
            _fill(made.outputs.add(name=name).parameters, more)
        wish = Wish(_given(found, "id", ""), False, True, frozenset(binary), bool(all_binary) and not outputs)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError, struct.error):
        raise Unusual from None
    if at != len(data):
        raise Unusual
    return _checked(made, shared), wish


def _given(found: Any, name: str, without: Any) -> Any:
    """A member of a JSON object, which has the type of `without`, and is that where it is missing. Raises Unusual."""
    value = found.get(name)
    if value is None:
        return without
    if type(value) is not type(without):
        raise Unusual
    return value


def _name(tensor: Mapping[str, Any]) -> str:
    found = tensor["name"]
    if type(found) is not str:
        raise Unusual
    return found


def _add_json(made: pb.ModelInferRequest, one: Mapping[str, Any], data: bytes, at: int, shared: bool) -> int:
    """Adds an input; returns the number of the binary bytes at `at` that are its."""
    kind, parameters = _kind(one["datatype"]), _given(one, "parameters", {})
    size = parameters.pop(_BINARY_SIZE, None)
    if shared and _REGION in parameters and size is None and one.get("data") is None:
        made.inputs.add(name=_name(one), datatype=kind.name, shape=one["shape"])
        _fill(made.inputs[-1].parameters, parameters)
        return 0
    if (size is None) != (one.get("data") is not None) or not all(type(each) is int for each in one["shape"]):
        raise Unusual
    if size is None:
        values = _flat(one["data"])
        if (kind.name == "BYTES" and parameters.get("content_type") == "base64") or kind.as_bits:
            raise Unusual
        _check_types(kind, values)
        texts = [value.encode() for value in values] if kind.name == "BYTES" else values
        raw = _packed(kind, [math.nan if value is None else value for value in texts])
    elif type(size) is int and 0 <= size <= len(data) - at:
        raw = data[at : at + size]
    else:
        raise Unusual
    _add(made, _name(one), kind, one["shape"], raw)
    _fill(made.inputs[-1].parameters, parameters)
    return size or 0


def _flat(data: Any) -> list[Any]:
    found = data if isinstance(data, list) else [data]
    while found and isinstance(found[0], list):
        if not all(isinstance(row, list) for row in found):
            raise Unusual
        found = [value for row in found for value in row]
    return found


_TYPES: Final[dict[type, frozenset[type]]] = {
    bytes: frozenset({str}),
    float: frozenset({int, float, type(None)}),
    int: frozenset({int}),
    bool: frozenset({bool}),
}


def _check_types(kind: Datatype, values: list[Any]) -> None:
    if not _TYPES[kind.element].issuperset(map(type, values)):
        raise Unusual


def _kind(name: Any) -> Datatype:
    found = DATATYPES.get(name) if isinstance(name, str) else None
    if found is None:
        raise Unusual
    return found


def _of_contents(kind: Datatype, contents: pb.InferTensorContents) -> list[Any]:
    filled = [field.name for field, _ in contents.ListFields()]
    if not kind.field or filled not in ([], [kind.field]):
        raise Unusual
    return list(getattr(contents, kind.field))


def _packed(kind: Datatype, values: list[Any]) -> bytes:
    if kind.name == "BYTES":
        return b"".join(part for value in values for part in (_LENGTH.pack(len(value)), value))
    try:
        return struct.pack(f"<{len(values)}{_CODES[kind.name]}", *values)
    except (struct.error, OverflowError):
        raise Unusual from None


def _add(made: pb.ModelInferRequest, name: str, kind: Datatype, shape: Sequence[int], data: bytes) -> None:
    made.inputs.add(name=name, datatype=kind.name, shape=shape)
    made.raw_input_contents.append(_fitting(kind, shape, data))


def _fitting(kind: Datatype, shape: Sequence[int], data: bytes) -> bytes:
    """The elements, which must be those of the shape. Raises Unusual."""
    count = math.prod(shape)
    if shape and min(shape) < 0:
        raise Unusual
    if kind.name == "BYTES":
        if sum(1 for _ in _elements(data)) != count:
            raise Unusual
    elif len(data) != count * kind.size_bytes:
        raise Unusual
    return data.translate(_TRUTH) if kind.name == "BOOL" else data


def _elements(data: bytes) -> Iterator[bytes]:
    """The elements of BYTES, each after its length. Raises Unusual."""
    at = 0
    while at < len(data):
        start = at + _LENGTH.size
        at = start + _LENGTH.unpack_from(data, at)[0] if start <= len(data) else len(data) + 1
        if at > len(data):
            raise Unusual
        yield data[start:at]


def _fill(found: Any, values: Mapping[str, Any]) -> None:
    """Sets parameters as a worker reads them from JSON. Raises Unusual for values that gRPC doesn't have."""
    for name, value in values.items():
        if type(value) is bool:
            found[name].bool_param = value
        elif type(value) is int and value in _INT64:
            found[name].int64_param = value
        elif type(value) is float:
            found[name].double_param = value
        elif type(value) is str:
            found[name].string_param = value
        else:
            raise Unusual


def _checked(made: pb.ModelInferRequest, shared: bool = False) -> bytes:
    """The message's bytes, the same for equal requests. Raises Unusual for tensors in shared memory, unless `shared`,
    equal names, and parameters that a worker refuses."""
    inputs = made.inputs
    if len(inputs) > 1 and len({one.name for one in inputs}) < len(inputs):
        raise Unusual
    tensors: tuple[Any, ...] = () if shared else (*inputs, *made.outputs)
    for one in tensors:
        if one.parameters and any(name.startswith(_REGIONS) for name in one.parameters):
            raise Unusual
    for name, parameter in made.parameters.items():
        if name.startswith("triton_") or not parameter.WhichOneof("parameter_choice"):
            raise Unusual
    made.DiscardUnknownFields()
    try:
        return bytes(made.SerializeToString(deterministic=True))
    except ValueError:
        raise Unusual from None


# --- answers


def written(answer: Buffer, wish: Wish) -> Written:
    """The answer, a ModelInferResponse with raw contents, as the client wants it, and more headers for it."""
    data = bytes(answer)
    if wish.is_plain:
        return _with_id(data, wish.id), ()
    message = pb.ModelInferResponse.FromString(data)
    message.id = message.id or wish.id
    if wish.json:
        return _json(message, wish)
    if all(DATATYPES[one.datatype].field for one in message.outputs):
        for one, raw in zip(message.outputs, message.raw_output_contents, strict=True):
            getattr(one.contents, DATATYPES[one.datatype].field).extend(values_of(one.datatype, raw))
        message.ClearField("raw_output_contents")
    return message.SerializeToString(), ()


def _with_id(data: bytes, wanted: str) -> bytes:
    """The answer with the request's id, unless the handler has set another. A field may stand at the end."""
    if not wanted or any(field.number == _ANSWER_ID for field in fields(data, 0, len(data))):
        return data
    text = wanted.encode()
    return b"".join((data, prefix(_ANSWER_ID, len(text)), text))


def _json(message: pb.ModelInferResponse, wish: Wish) -> Written:
    """JSON as the worker writes it, with the binary outputs after it."""
    head = _dumped({"model_name": message.model_name, "model_version": message.model_version})[:-1]
    if message.id:
        head += b',"id":' + _dumped(message.id)
    if message.parameters:
        head += b',"parameters":' + _dumped(_read(message.parameters))
    outputs, binary = [], []
    for one, raw in zip(message.outputs, message.raw_output_contents, strict=True):
        text = _dumped({"name": one.name, "datatype": one.datatype, "shape": list(one.shape)})[:-1]
        parameters = _read(one.parameters)
        if _REGION in parameters:
            pass
        elif wish.all_binary or one.name in wish.binary:
            parameters[_BINARY_SIZE] = len(raw)
            binary.append(raw)
        else:
            text += b',"data":' + _data(one.datatype, raw, parameters)
        outputs.append(text + (b',"parameters":' + _dumped(parameters) if parameters else b"") + b"}")
    head += b',"outputs":[' + b",".join(outputs) + b"]}"
    more = [("content-type", "application/octet-stream"), (LENGTH_HEADER, str(len(head)))] if binary else ()
    return b"".join((head, *binary)), more


def _read(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(one, one.WhichOneof("parameter_choice")) for name, one in parameters.items()}


def _data(datatype: str, raw: bytes, parameters: dict[str, Any]) -> bytes:
    """The elements as a list in JSON; bytes that are no text in base64, as `parameters` then say."""
    if datatype == "BYTES":
        values = list(_elements(raw))
        try:
            if parameters.get("content_type") == "base64":
                raise ValueError
            texts = [value.decode() for value in values]
        except ValueError:
            parameters["content_type"] = "base64"
            texts = [base64.b64encode(value).decode() for value in values]
        return _list(texts)
    return _list(values_of(datatype, raw))


def _list(values: list[Any]) -> bytes:
    parts = (values[at : at + _ELEMENTS_AT_ONCE] for at in range(0, len(values), _ELEMENTS_AT_ONCE))
    return b"[" + b",".join(_dumped([finite(value) for value in part])[1:-1] for part in parts) + b"]"


def finite(value: Any) -> Any:
    """The element as JSON has it: None for what is no finite number."""
    return None if type(value) is float and not math.isfinite(value) else value


def values_of(datatype: str, raw: bytes) -> list[Any]:
    """The elements as Python's values; those of BF16 as the floats that they stand for."""
    kind = DATATYPES[datatype]
    if kind.name == "BYTES":
        return list(_elements(raw))
    found = struct.unpack(f"<{len(raw) // kind.size_bytes}{_CODES[datatype]}", raw)
    if not kind.as_bits:
        return list(found)
    return list(struct.unpack(f"<{len(found)}f", struct.pack(f"<{len(found)}I", *(bits << 16 for bits in found))))


def _dumped(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
