"""PredictionsRequest in, PredictionResponse out, as bytes: what every inference call pays.

The usual request (fields 1 to 4, map entries with key and value in this order) is read here, without copying
large values; whatever looks different goes through protobuf, which decides what is valid.
"""

from __future__ import annotations

from typing import NamedTuple

from google.protobuf.message import DecodeError

from ts.protocol.frames import Buffer, Input
from ts_frontend.errors import InvalidArgument, ServeError
from ts_frontend.ingress.grpc_headers import status_of
from ts_frontend.protos.inference_pb2 import PredictionResponse, PredictionsRequest

INPUTS_MAX = 4096
INPUT_NAME_BYTES_MAX = 1024
VIEW_BYTES_MIN = 4096

_NAME, _VERSION, _INPUT, _SEQUENCE = 0x0A, 0x12, 0x1A, 0x22
_KEY, _VALUE = 0x0A, 0x12
_LENGTH_SHIFT_MAX = 28
_PREFIXES = tuple(bytes((0x0A, size)) for size in range(128))


class Request(NamedTuple):
    """A PredictionsRequest; `version` "" stands for the default one, `sequence_id` None for none."""

    name: str
    version: str
    inputs: list[Input]
    sequence_id: str | None


class _Unusual(ValueError):
    """Nothing wrong yet: protobuf shall look at it."""


def _length(data: bytes, at: int) -> tuple[int, int]:
    """The length that is written at `at` in more than one byte, and where it ends."""
    size = shift = 0
    while shift <= _LENGTH_SHIFT_MAX:
        byte = data[at]
        at += 1
        size |= (byte & 127) << shift
        if byte < 128:
            return size, at
        shift += 7
    raise _Unusual


def _entry(data: bytes, at: int, stop: int) -> Input:
    """The map entry between `at` and `stop`: its short key, then its value, and nothing else."""
    key_size = data[at + 1]
    value_at = at + 2 + key_size
    if data[at] != _KEY or key_size > 127 or value_at + 2 > stop or data[value_at] != _VALUE:
        raise _Unusual
    size, start = data[value_at + 1], value_at + 2
    if size > 127:
        size, start = _length(data, value_at + 1)
    if start + size != stop:
        raise _Unusual
    value = data[start:stop] if size < VIEW_BYTES_MIN else memoryview(data)[start:stop]
    return Input(str(data[at + 2 : value_at], "utf-8"), "", value)


def _parse_usual(data: bytes) -> Request:
    name = version = ""
    sequence_id = None
    inputs: list[Input] = []
    at, end = 0, len(data)
    while at < end:
        tag, size = data[at], data[at + 1]
        at += 2
        if size > 127:
            size, at = _length(data, at - 1)
        stop = at + size
        if stop > end:
            raise _Unusual
        if tag == _INPUT:
            inputs.append(_entry(data, at, stop))
        elif tag == _NAME:
            name = str(data[at:stop], "utf-8")
        elif tag == _VERSION:
            version = str(data[at:stop], "utf-8")
        elif tag == _SEQUENCE:
            sequence_id = str(data[at:stop], "utf-8")
        else:
            raise _Unusual
        at = stop
    if len(inputs) > 1 and (len(inputs) > INPUTS_MAX or len({part.name for part in inputs}) < len(inputs)):
        raise _Unusual
    return Request(name, version, inputs, sequence_id)


def _parse_any(method: str, data: bytes) -> Request:
    try:
        message = PredictionsRequest.FromString(data)
    except DecodeError as error:
        raise InvalidArgument(f"{method}: the {len(data)} bytes of the request aren't a PredictionsRequest") from error
    if len(message.input) > INPUTS_MAX:
        raise InvalidArgument(f"{method}: {len(message.input)} inputs are more than {INPUTS_MAX}")
    for name in message.input:
        if len(name.encode()) > INPUT_NAME_BYTES_MAX:
            raise InvalidArgument(f"{method}: an input's name is longer than {INPUT_NAME_BYTES_MAX} bytes")
    inputs = [Input(name, "", value) for name, value in message.input.items()]
    sequence_id = message.sequence_id if message.HasField("sequence_id") else None
    return Request(message.model_name, message.model_version, inputs, sequence_id)


def parse(method: str, data: bytes) -> Request:
    """The request in `data`; InvalidArgument, naming `method`, for anything else. Large inputs are views of `data`."""
    try:
        return _parse_usual(data)
    except (IndexError, ValueError):
        return _parse_any(method, data)


def _prefix(size: int) -> bytes:
    """Tag and length of field 1 with `size` bytes."""
    prefix = bytearray((0x0A,))
    while size > 127:
        prefix.append(size & 127 | 128)
        size >>= 7
    prefix.append(size)
    return bytes(prefix)


def response(prediction: Buffer) -> bytes:
    """A PredictionResponse with that answer."""
    size = len(prediction)
    return b"".join((_PREFIXES[size] if size < 128 else _prefix(size), prediction))


def sequence_response(prediction: Buffer, sequence_id: str | None) -> bytes:
    """The same, for StreamPredictions2: fields of one message may follow each other as separate encodings."""
    if sequence_id is None:
        return response(prediction)
    return response(prediction) + PredictionResponse(sequence_id=sequence_id).SerializeToString()


def failure_response(error: ServeError, sequence_id: str | None) -> bytes:
    """A PredictionResponse that says why there's no answer (StreamPredictions2)."""
    return PredictionResponse(status=status_of(error), sequence_id=sequence_id).SerializeToString()
