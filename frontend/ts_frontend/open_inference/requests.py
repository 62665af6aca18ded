"""The parts of tensor requests that the frontend reads: their models, their heads, and the parameters that it applies
(deadlines, priorities, sequences); the joining of several answers to one; and the regions of shared memory that clients
have registered. Tensors are skipped; the worker decodes them.

The parsers of protobuf and JSON hold the GIL for a whole message, so that even in a thread they would block the event
loop.

Of a region, the frontend only keeps and checks name and location; the worker copies a request's tensors, so that a
truncated region affects only its own request (`ts.tensors.shared_memory`). GPU memory can't be shared.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import os
import re
import stat
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, NoReturn

from google.protobuf.message import DecodeError

from ts.protocol import open_inference_pb2 as pb
from ts.protocol.frames import Buffer, Pairs
from ts.protocol.wire import SIZED, Field, Malformed, fields, prefix, varint
from ts_frontend.errors import Code, InvalidArgument, ModelNotFound, ModelVersionNotFound, ServeError, Unimplemented
from ts_frontend.limits.clients import counting_items
from ts_frontend.models.model import Model, Registry
from ts_frontend.scheduling import queues as ranked_queue
from ts_frontend.scheduling.queues import SequenceHeaders

#: Smaller requests are parsed entirely, which takes a fraction of a millisecond, less than the search for their heads.
WHOLE_BYTES_MAX = 16 * 1024
#: The most fields or members on the top level of a larger request, which are scanned one by one.
FIELDS_MAX = 16_384

#: The largest members of such a request that are parsed at once, and the longest texts with escapes.
MEMBER_BYTES_MAX, TEXT_BYTES_MAX = 16 * 1024, 512 * 1024

# --- protobuf

_INPUT, _RAW_CONTENTS = 5, 7
_TENSOR_FIELDS = frozenset((_INPUT, 6, _RAW_CONTENTS))
_INPUT_NAME, _INPUT_DATATYPE, _INPUT_SHAPE, _INPUT_CONTENTS = 1, 2, 3, 5
_EMPTY_CONTENTS = b"\x2a\x00"


def head_of_message(data: bytes, *, forms: bool = False) -> pb.ModelInferRequest:
    """The ModelInferRequest in `data`; without inputs and outputs if it is large. `forms`: with the datatypes of its
    inputs, whether their `contents` are filled, and `raw_input_contents`.

    Raises InvalidArgument for anything else; the worker reports errors inside a large message's tensors."""
    try:
        return pb.ModelInferRequest.FromString(
            data if len(data) <= WHOLE_BYTES_MAX else b"".join(_pieces(data, forms=forms))
        )
    except (DecodeError, Malformed) as error:
        raise InvalidArgument(f"The {len(data)} bytes of the request are not a ModelInferRequest: {error}") from None


def check_fields(data: bytes, name: str, fields_max: int = FIELDS_MAX) -> None:
    """Raises InvalidArgument for a large message, of type `name`, with too many fields to parse at once, or malformed.
    The parser itself checks a small one."""
    if len(data) <= WHOLE_BYTES_MAX:
        return
    try:
        if any(count >= fields_max for count, _ in enumerate(fields(data, 0, len(data)))):
            raise Malformed(f"it has more than {fields_max} fields")
    except Malformed as error:
        raise InvalidArgument(f"The {len(data)} bytes of the request are not a {name}: {error}") from None


def _pieces(data: bytes, *, forms: bool) -> Iterator[bytes]:
    for count, field in enumerate(fields(data, 0, len(data))):
        if count >= FIELDS_MAX:
            raise Malformed(f"it has more than {FIELDS_MAX} fields")
        if field.kind != SIZED or field.number not in _TENSOR_FIELDS or (forms and field.number == _RAW_CONTENTS):
            yield data[field.start : field.end]
        elif forms and field.number == _INPUT:
            tensor = _form_of(data, field)
            yield prefix(_INPUT, len(tensor)) + tensor


def _form_of(data: bytes, tensor: Field) -> bytes:
    """Returns an InferInputTensor with the tensor's name and datatype, and empty contents if it has any."""
    found = []
    for count, field in enumerate(fields(data, tensor.value, tensor.end)):
        if count >= FIELDS_MAX:
            raise Malformed(f"an input of it has more than {FIELDS_MAX} fields")
        if field.kind == SIZED and field.number in (_INPUT_NAME, _INPUT_DATATYPE):
            found.append(data[field.start : field.end])
        elif field.kind == SIZED and field.number == _INPUT_CONTENTS:
            found.append(_EMPTY_CONTENTS)
    return b"".join(found)


def items_of_message(data: bytes) -> int:
    """The items of a ModelInferRequest: the largest first dimension of its inputs. 1 if it has none, or is malformed,
    which others report."""
    most = 1
    try:
        for field in islice(fields(data, 0, len(data)), FIELDS_MAX):
            if field.number == _INPUT and field.kind == SIZED:
                most = max(most, _first_size(data, field))
    except Malformed:
        pass
    return min(most, FIELDS_MAX)


def _first_size(data: bytes, tensor: Field) -> int:
    for field in islice(fields(data, tensor.value, tensor.end), FIELDS_MAX):
        if field.number == _INPUT_SHAPE and field.value < field.end:
            size, _ = varint(data, field.value, field.end)
            return 1 if size >> 63 else size  # negative
    return 1


# --- JSON

_BLANK = re.compile(rb"[ \t\n\r]*")
_PLAIN = re.compile(rb"[^ \t\n\r,\]}]+")
#: A run of bytes without nesting: numbers, texts, and lists of numbers.
_INNER = re.compile(rb'(?:[^"\[\]{}]+|"[^"\\]*(?:\\.[^"\\]*)*"|\[[^"\[\]{}]*\])*', re.DOTALL)
_STEP_BYTES = 64 * 1024  # bytes searched at once; between two searches, other threads may run
_DEPTH_MAX = 1000  # the limit of Python's own parser
_BACKSLASH = 0x5C
_BOM = b"\xef\xbb\xbf"
_STANDS_FOR: dict[bytes, dict[str, Any] | list[Any]] = {b"{": {}, b"[": []}


class NotRead(ValueError):
    """The part of the text that was read isn't a JSON object, or has too many members."""


def members(data: bytes, names: Collection[str] | None = None) -> dict[str, tuple[int, int]]:
    """Returns (begin, end) of the values of the members `names` (None: all) in a JSON object; of equal names the last
    counts. Skipped members are not checked. Raises NotRead."""
    found: dict[str, tuple[int, int]] = {}
    at = _token(data, len(_BOM) if data.startswith(_BOM) else 0, b"{")
    if data[at : at + 1] == b"}":
        return found
    for _ in range(FIELDS_MAX):
        key = _string_end(data, at)
        name = json.loads(data[at:key])
        value = _token(data, _after_blanks(data, key), b":")
        end = _value_end(data, value)
        if names is None or name in names:
            found[name] = value, end
        at = _after_blanks(data, end)
        if data[at : at + 1] == b"}":
            return found
        at = _token(data, at, b",")
    raise NotRead(f"it has more than {FIELDS_MAX} members")


def _elements(data: bytes, at: int) -> Iterator[tuple[int, int]]:
    """Yields (begin, end) of the elements of the JSON list at `at`, which aren't checked, FIELDS_MAX at most. Raises
    NotRead."""
    at = _token(data, at, b"[")
    for _ in range(0 if data[at : at + 1] == b"]" else FIELDS_MAX):
        end = _value_end(data, at)
        yield at, end
        at = _after_blanks(data, end)
        if data[at : at + 1] == b"]":
            return
        at = _token(data, at, b",")


def items_of_json(data: bytes) -> int:
    """The items of a request in JSON: the number of its `instances` (V1), or the largest first dimension of its
    `inputs` (V2), FIELDS_MAX at most. 1 if it has neither. To be called in a thread: the time grows with the size."""
    try:
        places = members(data, ("instances", "inputs"))
        if "instances" in places:
            return max(1, sum(1 for _ in _elements(data, places["instances"][0])))
        return max(_first_sizes(data, places["inputs"][0]), default=1)
    except (ValueError, LookupError, RecursionError):
        return 1


def _first_sizes(data: bytes, at: int) -> Iterator[int]:
    for begin, end in _elements(data, at):
        tensor = data[begin:end]
        for first, last in islice(_elements(tensor, members(tensor, ("shape",))["shape"][0]), 1):
            size = json.loads(tensor[first:last])
            yield min(max(1, size), FIELDS_MAX) if type(size) is int else 1


def parameters_of_json(data: bytes, names: Collection[str], words: Collection[bytes]) -> dict[str, Any]:
    """Returns a request's parameters with these `names`, with lists and objects replaced by empty ones; {} if it has
    none, isn't JSON, or contains none of the `words`. To be called in a thread: the time grows with the size."""
    if not mention(data, words):
        return {}
    try:
        place = members(data, ("parameters",)).get("parameters")
        if place is None:
            return {}
        inside = data[slice(*place)]
        return {name: _plain(inside[slice(*at)]) for name, at in members(inside, names).items()}
    except ValueError:
        return {}


def small_members(data: bytes) -> dict[str, Any]:
    """Returns the members of a JSON object without those of more than MEMBER_BYTES_MAX bytes, which aren't checked.
    Raises ValueError, RecursionError. To be called in a thread: the time grows with the size."""
    places = members(data)
    return {name: json.loads(data[at:end]) for name, (at, end) in places.items() if end - at <= MEMBER_BYTES_MAX}


def texts_of_member(data: bytes, member: str) -> dict[str, Any]:
    """Returns the members of the object in a JSON object's `member`; {} without it. Long texts are returned without
    unescaping; other long values are None. Raises ValueError, RecursionError. To be called in a thread."""
    place = members(data, (member,)).get(member)
    inside = b"null" if place is None else data[slice(*place)]
    if inside[:1] != b"{":
        if len(inside) <= MEMBER_BYTES_MAX and not json.loads(inside):
            return {}
        raise NotRead(f"{member} is an object, not {inside[:40]!r}")
    return {name: _long_text(inside[at:end]) for name, (at, end) in members(inside).items()}


def _long_text(value: bytes) -> Any:
    """A long text, None for another long value. Only slashes are unescaped: some encoders escape base64's."""
    if len(value) <= MEMBER_BYTES_MAX:
        return json.loads(value)
    if value[:1] != b'"':
        return None
    text = value[1:-1].replace(b"\\/", b"/")
    if b"\\" not in text:
        return text.decode()
    return json.loads(value) if len(value) <= TEXT_BYTES_MAX else None


def _plain(value: bytes) -> Any:
    return _STANDS_FOR[value[:1]] if value[:1] in _STANDS_FOR else json.loads(value)


def _after_blanks(data: bytes, at: int) -> int:
    return _matched(_BLANK, data, at)


def _token(data: bytes, at: int, expected: bytes) -> int:
    at = _after_blanks(data, at)
    if data[at : at + 1] != expected:
        raise NotRead(f"its byte {at} is not {expected.decode()}")
    return _after_blanks(data, at + 1)


def _matched(expression: re.Pattern[bytes], data: bytes, at: int) -> int:
    match = expression.match(data, at)
    if match is None:
        raise NotRead(f"its byte {at} is not JSON")
    return match.end()


def _string_end(data: bytes, at: int) -> int:
    """The end of the text that begins at `at`: after a quote with an even number of backslashes before it."""
    if data[at : at + 1] != b'"':
        raise NotRead(f"its byte {at} is not JSON")
    quote = at
    while (quote := data.find(b'"', quote + 1)) > 0:
        before = quote
        while data[before - 1] == _BACKSLASH:
            before -= 1
        if (quote - before) % 2 == 0:
            return quote + 1
    raise NotRead(f"its byte {at} begins a text without an end")


def _value_end(data: bytes, at: int) -> int:
    first = data[at : at + 1]
    if first == b'"':
        return _string_end(data, at)
    return _nested_end(data, at) if first in _STANDS_FOR else _matched(_PLAIN, data, at)


def _nested_end(data: bytes, at: int) -> int:
    depth = 0
    while at < len(data):
        first = data[at : at + 1]
        if first == b'"':
            at = _string_end(data, at)
        elif first in b"[{":
            at, depth = at + 1, depth + 1
            if depth > _DEPTH_MAX:
                raise NotRead(f"its lists and objects are over {_DEPTH_MAX} deep")
        elif first in b"]}":
            at, depth = at + 1, depth - 1
            if not depth:
                return at
        match = _INNER.match(data, at, at + _STEP_BYTES)
        assert match is not None, "the pattern also matches an empty text"
        at = match.end()
    raise NotRead("it ends inside a list or an object")


def mention(data: bytes, words: Collection[bytes]) -> bool:
    more = max(map(len, words)) - 1
    steps = range(0, len(data), _STEP_BYTES)
    return any(data.find(word, at, at + _STEP_BYTES + more) >= 0 for at in steps for word in words)


TIMEOUT, PRIORITY, SEQUENCE_ID = "timeout", "priority", "sequence_id"
SEQUENCE_START, SEQUENCE_END = "sequence_start", "sequence_end"
_NAMES = (TIMEOUT, PRIORITY, SEQUENCE_ID, SEQUENCE_START, SEQUENCE_END)
#: Bodies without any of these words are not parsed.
_WORDS = (b'"timeout"', b'"sequence_id"', b'"priority"')
LENGTH_HEADER = b"inference-header-content-length"
LENGTH_DIGITS_MAX = 18


def of_parameters(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value_of(found[name]) for name in _NAMES if name in found}


def value_of(parameter: Any) -> Any:
    """The value of a message's parameter, None without one."""
    choice = parameter.WhichOneof("parameter_choice")
    return getattr(parameter, choice) if choice else None


def head_of_json(body: bytes, size: str) -> bytes:
    """Returns the JSON of a V2 request. `size`: the value of LENGTH_HEADER, "" without it."""
    return body[: int(size)] if size.isdecimal() and len(size) <= LENGTH_DIGITS_MAX else body


async def of_large_json(head: bytes) -> dict[str, Any]:
    """As `of_json`, for JSON of more than WHOLE_BYTES_MAX."""
    return await asyncio.to_thread(parameters_of_json, head, _NAMES, _WORDS)


def of_json(head: bytes) -> dict[str, Any]:
    """The parameters of a V2 request in JSON that are applied here. The worker reports errors in the body."""
    for word in _WORDS:
        if head.find(word) >= 0:  # `in` costs a dozen times as much: it makes and drops an exception
            break
    else:
        return {}
    try:
        found = json.loads(head)["parameters"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


async def count_items(model: Model, head: bytes) -> None:
    """Tells the limits of clients how many items a request in JSON has, if there is one that needs it."""
    own = counting_items()
    if own is None or not model.takes_batches:
        return
    own.items = items_of_json(head) if len(head) <= WHOLE_BYTES_MAX else await asyncio.to_thread(items_of_json, head)


def scheduled(
    model: Model, parameters: Mapping[str, Any], headers: Pairs, until_s: float, keys: SequenceHeaders
) -> tuple[Pairs, float]:
    """The headers for the handler and the deadline (`until_s` without parameters). Raises InvalidArgument."""
    if model.stateful:
        headers = [*headers, *sequence_headers(parameters, keys)]
    if model.has_priorities:  # its queue policy applies the timeout
        deadline_s(parameters, until_s)
        return [*headers, *_rank_headers(parameters)], until_s
    return headers, deadline_s(parameters, until_s)


def _rank_headers(parameters: Mapping[str, Any]) -> Pairs:
    priority = parameters.get(PRIORITY)
    if priority is not None and (type(priority) is not int or priority < 0):
        raise InvalidArgument(f"parameter priority is a number, at least 0, not {priority!r}")
    found = ((ranked_queue.PRIORITY, priority), (ranked_queue.TIMEOUT_US, parameters.get(TIMEOUT)))
    return [(name, str(value)) for name, value in found if value]


def deadline_s(parameters: Mapping[str, Any], deadline_s: float) -> float:
    """The earlier of the call's deadline and `timeout`, microseconds from now. Raises InvalidArgument."""
    timeout = parameters.get(TIMEOUT)
    if timeout is None or timeout == 0:
        return deadline_s
    if type(timeout) is not int or timeout < 0:
        raise InvalidArgument(f"parameter timeout is a number of microseconds, not {timeout!r}")
    return min(deadline_s, time.monotonic() + min(timeout / 1e6, math.inf))


def sequence_headers(parameters: Mapping[str, Any], keys: SequenceHeaders) -> Pairs:
    """Returns the headers that assign a request to a sequence. Raises InvalidArgument."""
    sequence_id = parameters.get(SEQUENCE_ID)
    if sequence_id is None or sequence_id == 0 or sequence_id == "":
        return ()
    if isinstance(sequence_id, bool) or not isinstance(sequence_id, (int, str)):
        raise InvalidArgument(f"parameter sequence_id is a number or a text, not {sequence_id!r}")
    found = [(keys.id, str(sequence_id))]
    for name, key in ((SEQUENCE_START, keys.start), (SEQUENCE_END, keys.end)):
        if parameters.get(name) is True:
            found.append((key, "true"))
    return found


CONTENT_TYPE, BASE64 = "content_type", "base64"
_OF_MODEL = frozenset({"id", "model_name", "model_version"})


def refused(count: int) -> Unimplemented:
    """Returns the error of a call with exactly one answer, for a model that sent `count`."""
    if not count:
        return Unimplemented("The model sent no answer: ask it by a call that streams")
    return Unimplemented(f"The model sent {count} answers where this call has one: ask it by a call that streams")


def joined_messages(pieces: Sequence[bytes]) -> bytes:
    """Joins several answers of one text element each to one answer. Raises Unimplemented for any other."""
    found = [pb.ModelInferResponse.FromString(piece) for piece in pieces]
    if not found:
        raise Unimplemented("The model sent no answer: ask it by ModelStreamInfer")
    for response in found:
        if [output.datatype for output in response.outputs] not in (["BYTES"], [""]):
            raise Unimplemented(
                f"The model sent {len(found)} answers, ModelInfer takes one: ask it by ModelStreamInfer"
            )
    last = found[-1]
    if last.raw_output_contents:
        bare = all(_is_bare(response) for response in found)
        texts = [response.raw_output_contents[0][0 if bare else 4 :] for response in found]
        joined = b"".join(texts)
        last.raw_output_contents[0] = joined if bare else len(joined).to_bytes(4, "little") + joined
        return last.SerializeToString()
    contents = last.outputs[0].contents
    texts = [b"".join(response.outputs[0].contents.bytes_contents) for response in found]
    points = [number for response in found for number in response.outputs[0].contents.int_contents]
    contents.ClearField("bytes_contents")
    contents.ClearField("int_contents")
    if points:
        contents.int_contents.extend(points)
    else:
        contents.bytes_contents.append(b"".join(texts))
    return last.SerializeToString()


def _is_bare(response: pb.ModelInferResponse) -> bool:
    """Returns whether the response's one element has no length prefix."""
    data = response.raw_output_contents[0]
    return len(data) < 4 or int.from_bytes(data[:4], "little") != len(data) - 4


def joined_json(pieces: Sequence[Buffer]) -> bytes:
    found = _read(pieces)
    if not found or any([one.get("datatype") for one in answer["outputs"]] != ["BYTES"] for answer in found):
        raise refused(len(found))
    last = found[-1]
    output = last["outputs"][0]
    data = b"".join(_bytes(one["outputs"][0]) for one in found)
    parameters = {name: value for name, value in output.get("parameters", {}).items() if name != CONTENT_TYPE}
    try:
        text = data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        text, parameters[CONTENT_TYPE] = base64.b64encode(data).decode(), BASE64
    output |= {"shape": [1], "data": [text]} | ({"parameters": parameters} if parameters else {})
    if not parameters:
        output.pop("parameters", None)
    return _written(last)


def _bytes(output: dict[str, Any]) -> bytes:
    """Returns an output's bytes: a text that ends inside a character is in base64."""
    if output.get("parameters", {}).get(CONTENT_TYPE) == BASE64:
        return b"".join(map(base64.b64decode, output["data"]))
    return "".join(output["data"]).encode("utf-8", "surrogatepass")


def _read(pieces: Sequence[Buffer]) -> list[dict[str, Any]]:
    """Reads answers in JSON. Raises Unimplemented for binary tensors after the JSON."""
    try:
        return [json.loads(bytes(piece)) for piece in pieces]
    except ValueError:
        raise refused(len(pieces)) from None


def _written(answer: dict[str, Any]) -> bytes:
    try:
        return json.dumps(answer, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(answer).encode()


def joined_generate(pieces: Sequence[Buffer]) -> bytes:
    """Joins answers of `generate`, flat or nested (in reply to a V2 request): texts are concatenated, other members are
    those of the last answer."""
    found = _read(pieces)
    if not found or isinstance(found[0].get("outputs"), list):
        return joined_json(pieces)
    last = found[-1]
    for name, value in last.items():
        if isinstance(value, str) and name not in _OF_MODEL:
            last[name] = "".join(str(one.get(name, "")) for one in found)
    return _written(last)


# --- regions of shared memory

DIRECTORY = "/dev/shm"
REGIONS_MAX = 1024
NAME_CHARACTERS_MAX = 256
#: The parameter for a region in every form of a request.
MARK = b"shared_memory_region"
NO_CUDA = "CUDA shared memory is not supported: send tensors in the request, or use system shared memory"
_KEY = re.compile(r"/?[^/\0]{1,255}")


class RegionExists(ServeError):
    remedy = "Unregister the region first, or take another name."
    code, http_status, type_name = Code.ALREADY_EXISTS, 400, "BadRequestException"


class RegionNotFound(ServeError):
    remedy = "Register the region first."
    code, http_status, type_name = Code.NOT_FOUND, 404, "ResourceNotFoundException"


class Forbidden(ServeError):
    """The settings don't allow clients this shared memory."""

    remedy = "Allow the key with `shared_memory_keys`."
    code, http_status, type_name = Code.PERMISSION_DENIED, 403, "ForbiddenException"


class Region(NamedTuple):
    """`key` is a file of DIRECTORY."""

    name: str
    key: str
    offset: int
    byte_size: int


class Regions:
    """The registered regions. `keys`: the pattern of allowed keys, matched whole; "" for none."""

    def __init__(self, keys: str) -> None:
        self._allowed = re.compile(keys) if keys else None
        self._regions: dict[str, Region] = {}

    @property
    def allowed(self) -> bool:
        return self._allowed is not None

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Registers a region. Raises Forbidden, RegionExists, InvalidArgument for missing or smaller shared memory."""
        if self._allowed is None:
            raise Forbidden("shared memory is not allowed: shared_memory_keys says which keys are")
        if not self._allowed.fullmatch(key):
            raise Forbidden(f"shared memory key {key!r} is not one that shared_memory_keys allows")
        if not _KEY.fullmatch(key) or key.lstrip("/") in (".", ".."):
            raise InvalidArgument(f"shared memory key {key!r} is not the name of a file of {DIRECTORY}")
        if not name or len(name) > NAME_CHARACTERS_MAX:
            raise InvalidArgument(f"the name of a region has 1 to {NAME_CHARACTERS_MAX} characters, not {name[:80]!r}")
        if name in self._regions:
            raise RegionExists(f"shared memory region {name!r} is registered already")
        if len(self._regions) >= REGIONS_MAX:
            raise InvalidArgument(f"{REGIONS_MAX} regions of shared memory are registered: unregister some")
        if byte_size <= 0 or offset < 0:
            raise InvalidArgument(f"region {name!r}: offset {offset} and byte_size {byte_size} are not a valid range")
        size = _size_of(key)
        if offset + byte_size > size:
            raise InvalidArgument(
                f"region {name!r}: {key!r} has {size} bytes, fewer than offset {offset} and byte_size {byte_size} take"
            )
        self._regions[name] = Region(name, key, offset, byte_size)

    def unregister(self, name: str = "") -> None:
        """Unregisters a region, or all for "". An unknown name isn't an error: Triton's clients use it to clean up."""
        if name:
            self._regions.pop(name, None)
        else:
            self._regions.clear()

    def status(self, name: str = "") -> list[Region]:
        """Returns one region, or all for "". Raises RegionNotFound."""
        if name and name not in self._regions:
            raise RegionNotFound(f"Unable to find system shared memory region: {name!r}")
        return [self._regions[name]] if name else list(self._regions.values())

    def option(self, data: bytes) -> str:
        """Returns the form option with the locations of the request's regions, for the worker; "" without regions."""
        if not self._regions or MARK not in data:
            return ""
        places = {one.name: [one.key.lstrip("/"), one.offset, one.byte_size] for one in self._regions.values()}
        return f";regions={json.dumps(places).encode().hex()}"


def _size_of(key: str) -> int:
    """Returns the size of a regular file of DIRECTORY. Raises InvalidArgument for anything else."""
    try:
        fd = os.open(f"{DIRECTORY}/{key.lstrip('/')}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise InvalidArgument(f"shared memory {key!r} can't be opened: {error.strerror}") from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise InvalidArgument(f"shared memory {key!r} is not a regular file of {DIRECTORY}")
        return found.st_size
    finally:
        os.close(fd)


def check_cuda(name: str) -> None:
    """Raises RegionNotFound when a region is named."""
    if name:
        raise RegionNotFound(f"Unable to find cuda shared memory region: {name!r}")


def refuse_cuda() -> NoReturn:
    raise Unimplemented(NO_CUDA)


def region_given(name: str, body: Mapping[str, Any]) -> tuple[str, str, int, int]:
    """Returns the arguments of `Regions.register` from a body in JSON. Raises InvalidArgument."""
    key, offset, byte_size = body.get("key"), body.get("offset", 0), body.get("byte_size")
    if not isinstance(key, str) or type(offset) is not int or type(byte_size) is not int:
        raise InvalidArgument(
            "a region needs a text `key` and a number `byte_size`; the number `offset` is 0 by default"
        )
    return name, key, offset, byte_size


# --- models

#: Clients of MAX send version 0 for the served one.
ANY_VERSION = "0"


def find(models: Registry, name: str, version: str) -> Model:
    """Returns the model version for a client's name and version. Raises ModelNotFound, ModelVersionNotFound."""
    if version != ANY_VERSION:
        return models.find(name, version or None)
    try:
        return models.find(name, version)
    except ModelVersionNotFound:
        return models.find(name)


def is_ready(models: Registry, name: str, version: str) -> bool:
    """Returns whether a model is ready; False for an unknown model."""
    try:
        return find(models, name, version).ready
    except (ModelNotFound, ModelVersionNotFound):
        return False
