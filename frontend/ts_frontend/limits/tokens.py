"""The tokens of language models' requests: the most that one may use, and those that its answer says it has used."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Final

from google.protobuf.message import DecodeError

from ts.protocol import open_inference_pb2 as pb
from ts.protocol.frames import Buffer, Input, size_of
from ts.protocol.wire import Malformed, fields
from ts_frontend.job import Job

#: Bytes of a text for each of its tokens, about; and the tokens of an answer whose request names no limit.
TOKEN_BYTES: Final = 4
TOKENS_USUAL: Final = 256
#: Bytes of an event of OpenAI's streams, about, which has a token.
EVENT_BYTES: Final = 200
_EVENTS: Final = "text/event-stream"
#: OpenAI's and Anthropic's members of `usage`.
_COUNTS: Final = re.compile(rb'"(total_tokens|input_tokens|output_tokens)"\s*:\s*(\d{1,15})\b')
_LIMITS: Final = ("max_tokens", "max_new_tokens", "max_output_tokens", "max_completion_tokens")
_LIMIT: Final = re.compile(rb'"max_(?:new_|output_|completion_)?tokens"\s*:\s*(\d{1,9})\b')
#: What the answers of other APIs say, as parameters.
_SAID: Final = ("prompt_tokens", "completion_tokens")
_SAID_IN_JSON: Final = re.compile(rb'"(?:prompt_tokens|completion_tokens)"\s*:\s*(\d{1,15})\b')
#: The beginning of the forms in protobuf, and their option for Triton's streams (`ts.tensors.forms`).
_GRPC: Final = "\0grpc"
_TRITON: Final = ";triton"
#: Fields of a ModelInferRequest and a ModelInferResponse, and of a ModelStreamInferResponse.
_PARAMETERS: Final = 4
_RESPONSE: Final = 2
_FIELDS_MAX: Final = 16_384


def most_tokens(inputs: Sequence[Input]) -> float:
    """The number of tokens that a request of any API but OpenAI's may use, its prompt and its answer together."""
    return size_of(inputs) / TOKEN_BYTES + next(filter(None, map(_limit_in, inputs)), TOKENS_USUAL)


def _limit_in(given: Input) -> int:
    """The length of the answer that an input asks for, 0 if it names none."""
    if given.content_type.startswith(_GRPC):
        found = _parameters(given.data)
        for name in _LIMITS:
            if name in found:
                return max(0, int(found[name].int64_param or found[name].uint64_param))
    limit = _LIMIT.search(given.data)
    return int(limit[1]) if limit else 0


def used_by(job: Job, reserved: float) -> float:
    """The tokens that an ended job has used: those that the last pieces say, or else an estimate by the sizes, at most
    what was reserved."""
    if not job.received_bytes:
        return 0.0
    form = job.inputs[0].content_type if job.inputs else ""
    for piece in reversed(job.at_hand):
        used = _used_in_message(piece, form) if form.startswith(_GRPC) else _used_in_json(bytes(piece))
        if used is not None:
            return used
    events = any(name.lower() == "content-type" and value.startswith(_EVENTS) for name, value in job.headers)
    given = job.received_bytes / (EVENT_BYTES if events else TOKEN_BYTES)
    return min(reserved, job.size_bytes / TOKEN_BYTES + given)


def used_tokens(data: bytes) -> int | None:
    """The tokens that an answer of OpenAI's API, or an event of one, says that it used; None if it doesn't say so."""
    if b'"usage"' not in data:
        return None
    found = {name: int(count) for name, count in _COUNTS.findall(data, data.rindex(b'"usage"'))}
    return found.get(b"total_tokens", sum(found.values())) if found else None


def _used_in_json(data: bytes) -> int | None:
    used = used_tokens(data)
    if used is None and (at := data.rfind(b'"parameters"')) >= 0:
        used = sum(map(int, _SAID_IN_JSON.findall(data, at))) or None
    return used


def _used_in_message(data: Buffer, form: str) -> int | None:
    found = _parameters(data, inner=_RESPONSE if _TRITON in form else 0)
    return sum([int(found[name].int64_param) for name in _SAID if name in found]) or None


def _parameters(data: Buffer, inner: int = 0) -> Mapping[str, Any]:
    """The parameters in a ModelInferRequest or -Response, or in one in the field `inner`; none in a broken one, which
    others report."""
    at, end = 0, len(data)
    try:
        if inner:
            at, end = next(((one.value, one.end) for one in fields(data, at, end) if one.number == inner), (0, 0))
        found = [one for one in islice(fields(data, at, end), _FIELDS_MAX) if one.number == _PARAMETERS]
        message = pb.ModelInferRequest.FromString(b"".join([data[one.start : one.end] for one in found]))
    except (Malformed, DecodeError):
        return {}
    return message.parameters
