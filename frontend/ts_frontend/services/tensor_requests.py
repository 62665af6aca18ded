"""What of a tensor request's parameters the frontend acts on: when it may start, and which sequence it belongs to."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping
from typing import Any, Protocol

from google.protobuf.message import Message

from ts.protocol.frames import Pairs
from ts_frontend.batching import ranked_queue
from ts_frontend.batching.sequence_jobs import Keys
from ts_frontend.errors import InvalidArgument
from ts_frontend.services.tensor_heads import WHOLE_BYTES_MAX, parameters_of_json

TIMEOUT, PRIORITY, SEQUENCE_ID = "timeout", "priority", "sequence_id"
SEQUENCE_START, SEQUENCE_END = "sequence_start", "sequence_end"
_NAMES = (TIMEOUT, PRIORITY, SEQUENCE_ID, SEQUENCE_START, SEQUENCE_END)
#: Bodies without any of these words are not looked into.
_WORDS = (b'"timeout"', b'"sequence_id"', b'"priority"')
LENGTH_HEADER = b"inference-header-content-length"
LENGTH_DIGITS_MAX = 18


def of_message(request: Message) -> dict[str, Any]:
    """The parameters of a ModelInferRequest."""
    found: Mapping[str, Any] = request.parameters  # type: ignore[attr-defined]
    return {name: _value(found[name]) for name in _NAMES if name in found}


def _value(parameter: Any) -> Any:
    choice = parameter.WhichOneof("parameter_choice")
    return getattr(parameter, choice) if choice else None


async def of_json(body: bytes, head_bytes: str) -> dict[str, Any]:
    """The parameters of a V2 request in JSON, {} when none of them counts here; what is wrong with the body is for the
    worker to say. `head_bytes`: the value of LENGTH_HEADER, "" without it."""
    head = body[: int(head_bytes)] if head_bytes.isdecimal() and len(head_bytes) <= LENGTH_DIGITS_MAX else body
    if len(head) > WHOLE_BYTES_MAX:
        return await asyncio.to_thread(parameters_of_json, head, _NAMES, _WORDS)
    if not any(word in head for word in _WORDS):
        return {}
    try:
        found = json.loads(head)["parameters"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


class Scheduling(Protocol):
    """What of a model says which parameters count for it (`ts_frontend.models.model.Model`)."""

    @property
    def stateful(self) -> bool: ...
    @property
    def ranked(self) -> bool: ...


def scheduled(
    model: Scheduling, parameters: Mapping[str, Any], headers: Pairs, until_s: float, keys: Keys
) -> tuple[Pairs, float]:
    """The headers and the deadline (`until_s` without parameters) with which the model gets the request. Raises
    InvalidArgument."""
    if model.stateful:
        headers = [*headers, *sequence_headers(parameters, keys)]
    if model.ranked:  # whose own rules say what the time in the queue ends with
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
    """The earlier of the call's deadline and `timeout`, in microseconds from now. Raises InvalidArgument."""
    timeout = parameters.get(TIMEOUT)
    if timeout is None or timeout == 0:
        return deadline_s
    if type(timeout) is not int or timeout < 0:
        raise InvalidArgument(f"parameter timeout is a number of microseconds, not {timeout!r}")
    return min(deadline_s, time.monotonic() + min(timeout / 1e6, math.inf))


def sequence_headers(parameters: Mapping[str, Any], keys: Keys) -> Pairs:
    """The headers by which a model with sequences knows where the request belongs. Raises InvalidArgument."""
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
