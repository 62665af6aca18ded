"""The parameters of tensor requests that the frontend applies: deadlines, priorities and sequences."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ts.protocol import open_inference_pb2 as pb
from ts.protocol.frames import Buffer, Pairs
from ts_frontend.errors import InvalidArgument, Unimplemented
from ts_frontend.limits.clients import counting_items
from ts_frontend.models.model import Model
from ts_frontend.open_inference.heads import WHOLE_BYTES_MAX, items_of_json, parameters_of_json
from ts_frontend.scheduling import queues as ranked_queue
from ts_frontend.scheduling.sequence_queue import SequenceHeaders

TIMEOUT, PRIORITY, SEQUENCE_ID = "timeout", "priority", "sequence_id"
SEQUENCE_START, SEQUENCE_END = "sequence_start", "sequence_end"
_NAMES = (TIMEOUT, PRIORITY, SEQUENCE_ID, SEQUENCE_START, SEQUENCE_END)
#: Bodies without any of these words are not parsed.
_WORDS = (b'"timeout"', b'"sequence_id"', b'"priority"')
LENGTH_HEADER = b"inference-header-content-length"
LENGTH_DIGITS_MAX = 18


def of_parameters(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _value(found[name]) for name in _NAMES if name in found}


def _value(parameter: Any) -> Any:
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
