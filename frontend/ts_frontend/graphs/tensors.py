"""Tensors on their way through a graph: taken out of one message and put into the next as the bytes that they are.

A tensor keeps its head (datatype, shape, parameters), and its elements as a part of the message that it came in. Those
in shared memory stay there: their heads name the region. Requests in JSON, and with typed contents, are brought into
the common form first (`ts_frontend.caching.tensors`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from ts.protocol import open_inference_pb2 as pb
from ts.protocol.frames import Buffer, Input, Pairs
from ts.protocol.wire import Malformed, fields, prefix
from ts_frontend.caching import tensors as common
from ts_frontend.caching.tensors import Unusual, Wish
from ts_frontend.errors import InvalidArgument, Unimplemented

#: Fields of a ModelInferRequest and a ModelInferResponse, and of a tensor.
_MODEL, _VERSION, _ID, _PARAMETERS, _TENSORS, _ASKED = 1, 2, 3, 4, 5, 6
_RAW_OF_REQUEST, _RAW_OF_ANSWER = 7, 6
_NAME, _CONTENTS = 1, 5
#: Fields of a ModelStreamInferResponse.
_ERROR, _RESPONSE = 1, 2
#: The forms of requests, with their options (`ts.tensors.forms`).
_GRPC, _JSON, _V1, _STREAM, _TRITON, _REGIONS = "grpc", "json", "v1", "stream", "triton", "regions="
#: The members with the rows of a request of V1.
_ROWS: Final = ("instances", "inputs")
#: The largest JSON of a request that is read here.
JSON_BYTES_MAX: Final = 16 * 1024 * 1024
#: Larger requests in JSON are read, and larger answers written in it, in a thread.
INLINE_BYTES_MAX: Final = 64 * 1024
_REGION: Final = b"shared_memory_region"
#: The heads that are kept, and the longest of them.
HEADS_MAX: Final = 1024
HEAD_BYTES_MAX: Final = 2048
#: Parameters that are for the server, and not for the steps.
_SCHEDULING: Final = ("timeout", "priority")
_EMPTY_FINAL: Final = "triton_enable_empty_final_response"


class Tensor(NamedTuple):
    """`head`: a tensor's message without the name; `raw`: its elements, None for those in shared memory."""

    head: bytes
    raw: Buffer | None


class Request(NamedTuple):
    """A request. `asked`: the wanted outputs, with the rest of their messages; `parameters`: their fields of the
    message; `final`: the one that asks for an empty last answer; `wish`: how the client wants its answer; `triton`: in
    the messages of Triton's streams; `regions`: the form's option with the places of shared memory; `v1`: of KServe's
    V1."""

    tensors: Mapping[str, Tensor]
    asked: Mapping[str, bytes]
    parameters: bytes
    final: bytes
    wish: Wish
    stream: bool
    triton: bool
    regions: str
    v1: bool = False


class Answer(NamedTuple):
    """A step's answer. `parameters`: their fields of the message."""

    tensors: Mapping[str, Tensor]
    parameters: bytes


def is_long(inputs: Sequence[Input]) -> bool:
    """Whether a request is to be read in a thread. Raises InvalidArgument."""
    if not inputs or len(inputs[0].data) <= INLINE_BYTES_MAX:
        return False
    return not inputs[0].content_type.startswith(f"\0{_GRPC}") or _has_contents(inputs[0].data)


def read_request(inputs: Sequence[Input], headers: Pairs, declared: Mapping[str, tuple[str, bool]]) -> Request:
    """Reads a request of the Open Inference Protocol or of V1. `declared`: the datatypes of the ensemble's inputs by
    name, and whether each is required. Raises InvalidArgument, and Unimplemented for other requests."""
    form, *options = inputs[0].content_type[1:].split(";") if inputs else [""]
    if form not in (_GRPC, _JSON, _V1) or not inputs[0].content_type.startswith("\0"):
        raise Unimplemented("An ensemble takes tensors: ask it by infer calls of the Open Inference Protocol, or by V1")
    data, wish = inputs[0].data, Wish()
    try:
        if form == _V1:
            data, wish = common.of_json(_of_v1(data, declared), "", "", "", json_bytes_max=JSON_BYTES_MAX)
        elif form == _JSON:
            length = dict(headers).get(common.LENGTH_HEADER, "")
            data, wish = common.of_json(data, length, "", "", json_bytes_max=JSON_BYTES_MAX, shared=True)
        elif _has_contents(data):
            data, wish = common.of_message(data, "", "")
    except Unusual:
        raise InvalidArgument(
            "The request can't be passed on to the steps of an ensemble: each input needs a name, a datatype, a shape "
            "and as many elements as that shape takes"
        ) from None
    regions = next((f";{one}" for one in options if one.startswith(_REGIONS)), "")
    found = _request(data, wish, stream=_STREAM in options, triton=_TRITON in options, regions=regions)
    return found._replace(v1=True) if form == _V1 else found


def _of_v1(data: Buffer, declared: Mapping[str, tuple[str, bool]]) -> bytes:
    """A request of V1 as one of V2. Instances that are objects are rows of tensors with their keys' names; others are
    the ensemble's only required input. Raises InvalidArgument."""
    try:
        body = json.loads(bytes(data)) if len(data) <= JSON_BYTES_MAX else None
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"the body is not valid JSON: {error}") from None
    rows = next((body[name] for name in _ROWS if isinstance(body, dict) and isinstance(body.get(name), list)), None)
    if rows is None:
        raise InvalidArgument(f'Expected "instances" or "inputs" to be a list, in at most {JSON_BYTES_MAX} bytes')
    if rows and all(isinstance(row, dict) and row.keys() == rows[0].keys() for row in rows):
        columns = {name: [row[name] for row in rows] for name in rows[0]}
    else:
        required = [name for name, (_, is_required) in declared.items() if is_required]
        columns = {required[0] if len(required) == 1 else _ROWS[0]: rows}
    for name in columns:
        if name not in declared:
            raise InvalidArgument(f"unexpected input {name!r}; the ensemble takes: {', '.join(declared)}")
    return json.dumps(
        {
            "inputs": [
                {"name": name, "datatype": declared[name][0], "shape": _shape_of(values), "data": values}
                for name, values in columns.items()
            ]
        }
    ).encode()


def _shape_of(values: Any) -> list[int]:
    """Of lists in lists, as the first of each level has it."""
    shape = []
    while isinstance(values, list):
        shape.append(len(values))
        values = values[0] if values else None
    return shape


def _predictions(answer: bytes) -> bytes:
    """The body of V1's answer: one output's rows; of several an object for each row, or of lists where their numbers of
    rows differ."""
    found = read_answer(answer)
    values = {name: _rows_of(tensor) for name, tensor in found.tensors.items()}
    if len(values) == 1:
        (predictions,) = values.values()
    elif len({len(one) for one in values.values()}) == 1:
        predictions = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    else:
        predictions = values
    return json.dumps({"predictions": predictions}, ensure_ascii=False, separators=(",", ":")).encode()


def _rows_of(tensor: Tensor) -> Any:
    datatype, shape = declared(tensor.head)
    found = common.values_of(datatype, bytes(tensor.raw or b""))
    if datatype == "BYTES":
        return [value.decode("utf-8", "replace") for value in found]
    found = [common.finite(value) for value in found]
    for size in reversed(shape[1:]):
        found = [found[at : at + size] for at in range(0, len(found), max(1, size))]
    return found


def _has_contents(data: Buffer) -> bool:
    """Whether an input has its elements in its contents."""
    try:
        for field in fields(data, 0, len(data)):
            if field.number == _TENSORS:
                for inner in fields(data, field.value, field.end):
                    if inner.number == _CONTENTS and inner.end > inner.value:
                        return True
    except Malformed as error:
        raise InvalidArgument(f"The {len(data)} bytes of the request are not a ModelInferRequest: {error}") from None
    return False


def _request(data: Buffer, wish: Wish, *, stream: bool, triton: bool, regions: str) -> Request:
    view = memoryview(data)
    heads: dict[str, bytes] = {}
    asked: dict[str, bytes] = {}
    raw: list[memoryview] = []
    parameters = b""
    request_id = wish.id
    try:
        for field in fields(data, 0, len(data)):
            if field.number == _TENSORS:
                name, head = _named(data, field.value, field.end)
                if name in heads:
                    raise InvalidArgument(f"input {name!r} is given twice")
                heads[name] = head
            elif field.number == _RAW_OF_REQUEST:
                raw.append(view[field.value : field.end])
            elif field.number == _ASKED:
                name, head = _named(data, field.value, field.end)
                asked.setdefault(name, head)
            elif field.number == _PARAMETERS:
                parameters += bytes(view[field.start : field.end])
            elif field.number == _ID:
                request_id = str(view[field.value : field.end], "utf-8")
        tensors = _paired(heads, raw)
        passed, final = _passed_on(parameters)
    except (Malformed, UnicodeDecodeError, DecodeError) as error:
        raise InvalidArgument(f"The {len(data)} bytes of the request are not a ModelInferRequest: {error}") from None
    wish = wish._replace(id=request_id)
    return Request(tensors, asked, passed, final, wish, stream, triton, regions)


def _named(data: Buffer, at: int, end: int) -> tuple[str, bytes]:
    """A tensor's name, and the rest of its message."""
    name, rest = "", []
    view = memoryview(data)
    for field in fields(data, at, end):
        if field.number == _NAME:
            name = str(view[field.value : field.end], "utf-8")
        else:
            rest.append(view[field.start : field.end])
    return name, b"".join(rest)


def _paired(heads: Mapping[str, bytes], raw: Sequence[memoryview]) -> dict[str, Tensor]:
    """Tensors with their elements. Answers may have an empty place for each tensor in shared memory, requests none."""
    if len(raw) == len(heads):
        return {
            name: Tensor(head, None if _REGION in head and not len(part) else part)
            for (name, head), part in zip(heads.items(), raw, strict=True)
        }
    own = [name for name, head in heads.items() if _REGION not in head]
    if len(own) != len(raw):
        raise InvalidArgument(f"{len(raw)} raw contents for {len(own)} tensors: {', '.join(own)}")
    parts = dict(zip(own, raw, strict=True))
    return {name: Tensor(head, parts.get(name)) for name, head in heads.items()}


def declared(head: bytes) -> tuple[str, tuple[int, ...]]:
    """The datatype and the shape in a tensor's head. Raises InvalidArgument."""
    return _known(head) if len(head) <= HEAD_BYTES_MAX else _declared(head)


def _declared(head: bytes) -> tuple[str, tuple[int, ...]]:
    try:
        found = pb.ModelInferRequest.InferInputTensor.FromString(head)
    except DecodeError as error:
        raise InvalidArgument(f"An input is not an InferInputTensor: {error}") from None
    return found.datatype, tuple(found.shape)


_known = lru_cache(maxsize=HEADS_MAX)(_declared)


def _passed_on(parameters: bytes) -> tuple[bytes, bytes]:
    """The parameters without those that are for the server, and the one that asks for an empty last answer."""
    if not parameters:
        return b"", b""
    found, final = pb.ModelInferRequest.FromString(parameters), pb.ModelInferRequest()
    if found.parameters[_EMPTY_FINAL].bool_param:
        final.parameters[_EMPTY_FINAL].bool_param = True
    for name in (*_SCHEDULING, _EMPTY_FINAL):
        found.parameters.pop(name, None)
    return bytes(found.SerializeToString(deterministic=True)), bytes(final.SerializeToString())


# --- steps


def step_inputs(
    model: str,
    request: Request,
    tensors: Iterable[tuple[str, Tensor]],
    asked: Iterable[tuple[str, bytes]],
    *,
    stream: bool = False,
) -> list[Input]:
    """The request to a step's model, with these tensors by the names of the model's inputs."""
    parts: list[Buffer] = [_text(_MODEL, model)]
    if request.wish.id:
        parts.append(_text(_ID, request.wish.id))
    parts.append(request.parameters + request.final if stream else request.parameters)
    raw: list[Buffer] = []
    for name, tensor in tensors:
        parts.append(_tensor(name, tensor.head))
        if tensor.raw is not None:
            raw += (prefix(_RAW_OF_REQUEST, len(tensor.raw)), tensor.raw)
    for name, rest in asked:
        head = _text(_NAME, name) + rest
        parts += (prefix(_ASKED, len(head)), head)
    options = f";{_STREAM}" if stream else ""
    options += f";{_TRITON}" if stream and request.triton else ""
    return [Input("", f"\0{_GRPC}{options}{request.regions}", b"".join((*parts, *raw)))]


def _text(field: int, text: str) -> bytes:
    data = text.encode()
    return prefix(field, len(data)) + data


def _tensor(name: str, head: bytes) -> bytes:
    own = _text(_NAME, name) + head
    return prefix(_TENSORS, len(own)) + own


def read_answer(data: Buffer) -> Answer:
    """A step's answer, a ModelInferResponse. Raises InvalidArgument for anything else."""
    view = memoryview(data)
    heads: dict[str, bytes] = {}
    raw: list[memoryview] = []
    parameters = b""
    try:
        for field in fields(data, 0, len(data)):
            if field.number == _TENSORS:
                name, head = _named(data, field.value, field.end)
                heads[name] = head
            elif field.number == _RAW_OF_ANSWER:
                raw.append(view[field.value : field.end])
            elif field.number == _PARAMETERS:
                parameters += bytes(view[field.start : field.end])
    except (Malformed, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the {len(data)} bytes of its answer are not a ModelInferResponse: {error}") from None
    return Answer(_paired(heads, raw), parameters)


# --- the client's answer

_FINAL: Final = pb.ModelInferResponse()
_FINAL.parameters["triton_final_response"].bool_param = True
_FINAL_FIELD: Final = _FINAL.SerializeToString()


def written(model: str, version: str, request: Request, tensors: Mapping[str, Tensor], parameters: bytes) -> bytes:
    """The answer in the common form, with the request's id."""
    parts: list[Buffer] = [_text(_MODEL, model), _text(_VERSION, version)]
    if request.wish.id:
        parts.append(_text(_ID, request.wish.id))
    parts.append(parameters)
    raw: list[Buffer] = []
    for name, tensor in tensors.items():
        parts.append(_tensor(name, tensor.head))
        elements = b"" if tensor.raw is None else tensor.raw
        raw += (prefix(_RAW_OF_ANSWER, len(elements)), elements)
    return b"".join((*parts, *raw))


def in_form(answer: bytes, request: Request) -> tuple[bytes, Pairs]:
    """A request's only answer in its client's form, and headers for it."""
    if request.triton:
        whole = answer + _FINAL_FIELD
        return prefix(_RESPONSE, len(whole)) + whole, ()
    if request.v1:
        return _predictions(answer), ()
    if request.wish.is_plain:
        return answer, ()
    return common.written(answer, request.wish)


def is_rewritten(request: Request) -> bool:
    """Whether a large answer is to be written in a thread."""
    return not request.wish.is_plain


def split_streamed(data: Buffer, request: Request) -> tuple[bytes, Buffer | None]:
    """A piece of a streamed answer: what stands before the ModelInferResponse in it, and that, None without one."""
    if not request.triton:
        return b"", data
    try:
        found = list(fields(data, 0, len(data)))
    except Malformed as error:
        raise InvalidArgument(f"the {len(data)} bytes of its answer are no ModelStreamInferResponse: {error}") from None
    view = memoryview(data)
    before = b"".join(view[one.start : one.end] for one in found if one.number == _ERROR)
    inner = next((view[one.value : one.end] for one in found if one.number == _RESPONSE), None)
    return before, inner


def joined_streamed(before: bytes, answer: bytes | None, request: Request) -> tuple[bytes, Pairs]:
    """The opposite of `split_streamed`, in the client's form."""
    if request.triton:
        return before if answer is None else before + prefix(_RESPONSE, len(answer)) + answer, ()
    if answer is None or request.wish.is_plain:
        return answer or b"", ()
    if request.v1:
        return _predictions(answer), ()
    return common.written(answer, request.wish._replace(binary=frozenset(), all_binary=False))
