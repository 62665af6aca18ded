"""Predictions over gRPC: the bytes of a PredictionsRequest, its job, and the bytes of the PredictionResponse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from ts.protocol.frames import Buffer, Input, Pairs
from ts.protocol.wire import prefix, size_at
from ts_frontend.errors import InvalidArgument
from ts_frontend.grpc.call import JOIN_BYTES_MAX, Answer, Call, identified, response_metadata
from ts_frontend.job import Job, RequestIds
from ts_frontend.models.model import Registry
from ts_frontend.open_inference.requests import WHOLE_BYTES_MAX, check_fields
from ts_frontend.protos.inference_pb2 import PredictionsRequest
from ts_frontend.scheduling.queues import SequenceHeaders

INPUTS_MAX: Final = 4096
#: The most fields of a large request, which are parsed one by one: inputs, names, and some that are unknown here.
FIELDS_MAX: Final = INPUTS_MAX + 16
INPUT_NAME_BYTES_MAX: Final = 1024
VIEW_BYTES_MIN: Final = 4096

_NAME: Final = 0x0A
_VERSION: Final = 0x12
_INPUT: Final = 0x1A
_SEQUENCE: Final = 0x22
_KEY: Final = 0x0A
_VALUE: Final = 0x12


class PredictionRequest(NamedTuple):
    """A PredictionsRequest. `version`: "" for the default; `sequence_id`: None if it isn't set."""

    name: str
    version: str
    inputs: list[Input]
    sequence_id: str | None


class _Unusual(ValueError):
    """A request in an unusual encoding, to be parsed by protobuf."""


def _entry(data: bytes, at: int, stop: int) -> Input:
    """Returns the map entry between `at` and `stop`. Raises _Unusual unless it is a short key followed by a value."""
    key_size = data[at + 1]
    value_at = at + 2 + key_size
    if data[at] != _KEY or key_size > 127 or value_at + 2 > stop or data[value_at] != _VALUE:
        raise _Unusual
    size, start = data[value_at + 1], value_at + 2
    if size > 127:
        size, start = size_at(data, value_at + 1, stop)
    if start + size != stop:
        raise _Unusual
    value = data[start:stop] if size < VIEW_BYTES_MIN else memoryview(data)[start:stop]
    return Input(str(data[at + 2 : value_at], "utf-8"), "", value)


def _parse_usual(data: bytes) -> PredictionRequest:
    name = version = ""
    sequence_id = None
    inputs: list[Input] = []
    at, end = 0, len(data)
    while at < end:
        tag, size = data[at], data[at + 1]
        at += 2
        if size > 127:
            size, at = size_at(data, at - 1, end)
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
    return PredictionRequest(name, version, inputs, sequence_id)


def _parse_any(method: str, data: bytes) -> PredictionRequest:
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
    return PredictionRequest(message.model_name, message.model_version, inputs, sequence_id)


def parse(method: str, data: bytes) -> PredictionRequest:
    """The request in `data`; large inputs are views of it. Raises InvalidArgument, naming `method`."""
    if len(data) > WHOLE_BYTES_MAX:
        check_fields(data, "PredictionsRequest", FIELDS_MAX)
    try:
        return _parse_usual(data)
    except (IndexError, ValueError):
        return _parse_any(method, data)


def response(prediction: Buffer) -> bytes:
    return b"".join((prefix(1, len(prediction)), prediction))


def responses(predictions: Sequence[Buffer]) -> list[bytes]:
    return [response(one) for one in predictions]


class Predictions:
    """The method Predictions, and the jobs of all predictions over gRPC. `keys`: headers that name a sequence."""

    def __init__(self, models: Registry, keys: SequenceHeaders) -> None:
        self._models = models
        self._keys = keys
        self._ids = RequestIds()

    def submit(self, call: Call, request: PredictionRequest, stream: bool) -> Job:
        name, version, inputs, sequence_id = request
        headers, request_id = identified(call, self._ids)
        if not name:
            raise InvalidArgument("Parameter model_name is required.")
        model = self._models.find(name, version or None)
        if sequence_id:
            named, inputs = self._sequence(sequence_id, inputs)
            headers = [*headers, *named]
        return model.submit(
            inputs,
            headers=headers,
            deadline_s=call.deadline_s,
            request_id=request_id,
            stream=stream,
            version_named=bool(version),
        )

    def _sequence(self, sequence_id: str, inputs: list[Input]) -> tuple[Pairs, list[Input]]:
        """Returns the headers that an HTTP client sends for a sequence (its id, and the inputs with the names of the
        start and end headers), and the other inputs."""
        marks = self._keys.start, self._keys.end
        found = [part for part in inputs if part.name.lower() in marks]
        named = [(part.name.lower(), str(part.data, "utf-8", "replace")) for part in found]
        return [(self._keys.id, sequence_id), *named], [part for part in inputs if part not in found]

    async def answer(self, call: Call, data: bytes) -> Answer:
        answer = self.submit(call, parse(call.path, data), False)
        prediction = await answer.result()
        if answer.headers or answer.status != 200:
            call.trailing.extend(response_metadata(answer.status, answer.headers))
        if len(prediction) <= JOIN_BYTES_MAX:
            return response(prediction)
        return prefix(1, len(prediction)), prediction
