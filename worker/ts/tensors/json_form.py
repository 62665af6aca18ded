"""The protocol's HTTP form: JSON, with tensors in binary after it where the client says so.

The standard library's `json` is the reference; `msgspec` reads and writes the same several times faster, and is used
where it does. A model's own environment may lack it: `json` does everything there. Values that `msgspec` refuses (NaN,
halves of characters, numbers beyond a float64) go to `json`, too. Numbers beyond 64 bits it reads exactly. Exponents of
floats it writes otherwise, which `list_text` mends.

The usual request is read in a few steps, and checked by `msgspec` meanwhile. Clients repeat the same request with other
elements. The text between the lists of elements is parsed once; if it is the same in a later request, only the lists
are parsed. Anything else is left to `JsonForm`, with which the tests compare all ways. Reading 1 KB takes 7 µs in place
of 17, 400 KB 1.7 ms in place of 2.8.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

import numpy as np

from ts.protocol.datatypes import DATATYPES, Datatype
from ts.protocol.frames import Buffer, PackedPairs
from ts.tensors.forms import Form, ModelSpec, check_declared, check_reserved, completed, payload
from ts.tensors.shared_memory import NO_REGIONS, PARAMETERS, REGION, Regions
from ts.tensors.types import (
    DIMENSIONS_MAX,
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

try:
    import msgspec
except ImportError:
    _decode_any: Callable[[bytes], Any] | None = None
    _encode_any: Callable[[Any], bytes] | None = None
    _decode_usual: Callable[[Buffer], Any] | None = None
    _LISTS: dict[str, Callable[[Buffer], list[Any]]] = {}
else:

    class _Input(msgspec.Struct, forbid_unknown_fields=True, gc=False):
        """An input whose elements are read by its datatype."""

        name: str
        datatype: str
        shape: list[int]
        data: msgspec.Raw
        parameters: dict[str, Any] | None = None

    class _Output(msgspec.Struct, forbid_unknown_fields=True, gc=False):
        """An output that the client named."""

        name: str
        parameters: dict[str, Any] | None = None

    class _Request(msgspec.Struct, forbid_unknown_fields=True, gc=False):
        """A request without parameters of its own."""

        inputs: list[_Input]
        id: str | None = None
        outputs: list[_Output] | None = None

    def _element(kind: Datatype) -> Any:
        """The type of an element, within the limits of its datatype as far as msgspec can say them."""
        if kind.element is bytes:
            return str
        if kind.name == "UINT64":  # numpy refuses what is too large, but not every version what is below 0
            return Annotated[int, msgspec.Meta(ge=0)]
        if kind.element is bool or kind.size_bytes == 8:
            return kind.element
        limits = np.finfo(kind.dtype) if kind.element is float else np.iinfo(kind.dtype)
        return Annotated[kind.element, msgspec.Meta(ge=kind.element(limits.min), le=kind.element(limits.max))]

    _decode_any, _encode_any = msgspec.json.Decoder().decode, msgspec.json.Encoder().encode
    _decode_usual = msgspec.json.Decoder(_Request).decode
    _LISTS = {
        name: msgspec.json.Decoder(list[_element(kind)]).decode  # type: ignore[misc]
        for name, kind in DATATYPES.items()
        if not kind.as_bits
    }

#: The parameters of an input about the place or the format of its elements.
_SPECIAL = frozenset({*PARAMETERS, "binary_data_size", "content_type"})


def usual_request(data: Buffer, pairs: Headers, model: ModelSpec) -> tuple[InferenceRequest, bool] | None:
    """The usual request to the model, and whether its inputs are known to be as declared. None for any other request,
    and for one with a fault; BadTensor for other inputs than the declared ones."""
    if _decode_usual is None:
        return None
    repeated = _repeated(data, pairs, model)
    if repeated is not None:
        return repeated, True
    whole = _whole(data, pairs, model)
    return None if whole is None else (whole, False)


def _whole(data: Buffer, pairs: Headers, model: ModelSpec) -> InferenceRequest | None:
    assert _decode_usual is not None
    try:
        str(data, "utf-8")  # msgspec passes over elements that are given twice without reading their text
        message = _decode_usual(data)
        inputs = [tensor for one in message.inputs if (tensor := _tensor(one)) is not None]
    except (ValueError, RecursionError, OverflowError):  # msgspec's errors are ValueErrors
        return None
    if len({one.name for one in inputs}) < len(message.inputs):
        return None
    outputs = [RequestedOutput(one.name, one.parameters or {}) for one in message.outputs or ()]
    return InferenceRequest(inputs, message.id or "", model.name, model.version, {}, outputs, pairs)


def _tensor(given: _Input) -> Tensor | None:
    read, parameters, shape = _LISTS.get(given.datatype), given.parameters, given.shape
    if read is None or not _is_usual(shape) or (parameters and not _SPECIAL.isdisjoint(parameters)):
        return None
    elements = read(given.data)
    if math.prod(shape) != len(elements):
        return None
    return Tensor(given.name, given.datatype, _array(DATATYPES[given.datatype], elements, shape), parameters or {})


def _is_usual(shape: Sequence[int]) -> bool:
    return len(shape) <= DIMENSIONS_MAX and min(shape, default=1) > 0


def _array(kind: Datatype, elements: list[Any], shape: Sequence[int]) -> Array:
    if kind.element is bytes:
        return bytes_array([text.encode() for text in elements], shape)
    return np.array(elements, kind.dtype).reshape(shape)


# --- requests that are alike but for their elements

#: An input's elements without texts and nested lists. In JSON, nothing else can begin with these bytes at a place where
#: an object's member begins, and a text can't have them in it: its quotes are escaped.
_LIST = re.compile(rb'"data"[ \t\n\r]*:[ \t\n\r]*(\[[^\[\]"{}]*\])')
#: The separator between the parts around the lists, which JSON can't contain.
_BETWEEN = b"\0"
#: The most layouts that are kept for a model, and the longest usual one.
LAYOUTS_MAX, LAYOUT_BYTES_MAX = 256, 2048
#: The largest input without numpy, which makes the arrays of larger ones.
PACKED_MAX = 4096
#: The `struct` codes of elements, by numpy's kinds and by their sizes.
_CODES = {
    "b": {1: "?"},
    "u": {1: "B", 2: "H", 4: "I", 8: "Q"},
    "i": {1: "b", 2: "h", 4: "i", 8: "q"},
    "f": {2: "e", 4: "f", 8: "d"},
}


class _Known(NamedTuple):
    """An input without its elements. `read` makes a list of them, `pack` their bytes (None: there are many)."""

    name: str
    kind: Datatype
    shape: tuple[int, ...]
    read: Callable[[Buffer], list[Any]]
    pack: Callable[..., bytes] | None

    def array(self, text: Buffer) -> Array:
        """The elements in the text. Raises ValueError, OverflowError or struct.error for others than declared."""
        elements = self.read(text)
        if self.pack is None:
            return np.array(elements, self.kind.dtype).reshape(self.shape)
        return np.ndarray(self.shape, self.kind.dtype, bytearray(self.pack(*elements)))


class _Layout(NamedTuple):
    """Requests that are alike but for their elements."""

    request_id: str
    inputs: Sequence[_Known]
    outputs: Sequence[str]


#: The marks for requests that came once, and for unusual ones.
_SEEN, _UNUSUAL = _Layout("", (), ()), _Layout("", (), ())


def _repeated(data: Buffer, pairs: Headers, model: ModelSpec) -> InferenceRequest | None:
    """A request like earlier ones; None for any other. The first one is only remembered, since most bodies of clients
    that number their requests come once."""
    if model.latest and type(data) is bytes:
        before, after, layout = model.latest[0]
        if data.startswith(before) and data.endswith(after):
            request = _request(layout, (data[len(before) : len(data) - len(after)],), pairs, model)
            if request is not None:
                return request
    parts = _LIST.split(data)
    key = _BETWEEN.join(parts[::2])
    layout = model.layouts.get(key)
    if layout is None:
        if len(key) <= LAYOUT_BYTES_MAX and len(parts) > 1:
            _remember(model, key, _SEEN)
        return None
    if layout is _SEEN:
        layout = _layout_of(parts[::2])
        if layout is None:
            model.layouts[key] = _UNUSUAL
            return None
    if len(parts) != 2 * len(layout.inputs) + 1:
        return None
    request = _request(layout, parts[1::2], pairs, model)
    if request is None:
        return None
    if model.layouts.get(key) is not layout:
        if model.inputs:
            check_declared(request, model)
        _remember(model, key, layout)
    if len(parts) == 3:
        _, elements, after = parts
        model.latest[:] = [(bytes(data[: len(data) - len(after) - len(elements)]), after, layout)]
    return request


def _request(layout: _Layout, lists: Sequence[Buffer], pairs: Headers, model: ModelSpec) -> InferenceRequest | None:
    """The request with these lists of elements, which are read as JSON, so that they may be any text between the known
    ones. None for other elements than those of the layout."""
    request_id, known, outputs = layout
    inputs = []
    try:
        for one, text in zip(known, lists, strict=True):
            inputs.append(Tensor(one.name, one.kind.name, one.array(text), {}))
    except (ValueError, OverflowError, struct.error):
        return None
    asked = [RequestedOutput(name) for name in outputs] if outputs else []
    return InferenceRequest(inputs, request_id, model.name, model.version, {}, asked, pairs)


def _remember(model: ModelSpec, key: bytes, layout: _Layout) -> None:
    if len(model.layouts) >= LAYOUTS_MAX:
        model.layouts.clear()
    model.layouts[key] = layout


def _layout_of(parts: Sequence[Buffer]) -> _Layout | None:
    """The layout of requests with these parts around their lists; None unless each list is an input's elements."""
    assert _decode_usual is not None
    marks = [b"[%d]" % number for number in range(len(parts) - 1)]
    data = b"".join(
        [part for pair in zip(parts, [b'"data":' + mark for mark in marks] + [b""], strict=True) for part in pair]
    )
    try:
        str(data, "utf-8")
        message = _decode_usual(data)
    except (ValueError, RecursionError):
        return None
    if [bytes(one.data) for one in message.inputs] != marks or _BETWEEN in data:
        return None
    inputs = []
    for one in message.inputs:
        kind, read = DATATYPES.get(one.datatype), _LISTS.get(one.datatype)
        if kind is None or read is None or kind.element is bytes or one.parameters or not _is_usual(one.shape):
            return None
        count = math.prod(one.shape)
        code = _CODES[kind.dtype.kind][kind.size_bytes]
        pack = struct.Struct(f"<{count}{code}").pack if count <= PACKED_MAX else None
        inputs.append(_Known(one.name, kind, tuple(one.shape), read, pack))
    if len({one.name for one in inputs}) < len(inputs) or any(output.parameters for output in message.outputs or ()):
        return None
    return _Layout(message.id or "", inputs, [output.name for output in message.outputs or ()])


#: The types that both write in the same way; `json` writes other values (dates, bytes, sets, subclasses, floats).
_ALIKE = frozenset({str, int, bool, type(None)})
#: The longest lists and deepest values that are checked; others go to `json`.
_LIST_MAX, _DEPTH_MAX = 64, 8
_FLOATS_WITH_EXPONENT = re.compile(rb"[^\[,]*(?:e|0\.0000)[^\],]*")


def loaded(data: bytes) -> Any:
    """The value that `json.loads` gives. Raises ValueError (UnicodeDecodeError among them) and RecursionError."""
    if _decode_any is not None:
        try:
            return _decode_any(data)
        except (ValueError, RecursionError):  # its DecodeError is a ValueError
            pass
    return json.loads(data)


def dumped(message: Any) -> bytes:
    """JSON in UTF-8; lone surrogates are escaped, and values unknown to JSON become their text."""
    try:
        if _encode_any is not None and _is_alike(message):
            return _encode_any(message)
        return json.dumps(message, ensure_ascii=False, separators=(",", ":"), default=str).encode()
    except UnicodeEncodeError:
        return json.dumps(message, separators=(",", ":"), default=str).encode()


def _is_alike(value: Any, depth: int = _DEPTH_MAX) -> bool:
    """Whether both write it alike, as far as that is looked into."""
    kind = type(value)
    if kind is dict:
        return depth > 0 and all(type(name) is str and _is_alike(one, depth - 1) for name, one in value.items())
    if kind is list:
        return depth > 0 and len(value) <= _LIST_MAX and all(_is_alike(one, depth - 1) for one in value)
    return kind in _ALIKE


def list_text(values: list[Any]) -> bytes:
    """A flat list of texts, truth values, whole numbers or floats, all of one of these types. Floats are written as
    their `repr`, those that aren't finite as null."""
    if _encode_any is None:
        finite = [None if type(value) is float and not math.isfinite(value) else value for value in values]
        return json.dumps(finite, ensure_ascii=False, separators=(",", ":")).encode()
    text = _encode_any(values)
    # `in` costs a dozen times as much as `find`: it makes and drops an exception, as the operand is no number.
    if values and type(values[0]) is float and (text.find(b"e") >= 0 or text.find(b"0.0000") >= 0):
        return _FLOATS_WITH_EXPONENT.sub(lambda found: repr(float(found[0])).encode(), text)
    return text


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
