"""The door `InferenceAPIsService`: translate, submit, drain the reply (`protos/inference.proto`)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from google.protobuf.message import DecodeError

from ts.protocol.frames import Buffer, Input, Pairs
from ts_frontend.errors import InvalidArgument, ServeError
from ts_frontend.grpc.call import Call, Method, RequestIds, Shape, identified, response_metadata
from ts_frontend.grpc.protocol import status_of
from ts_frontend.job import Job
from ts_frontend.models.health import Health
from ts_frontend.models.registry import Registry
from ts_frontend.protos.inference_pb2 import PredictionResponse, PredictionsRequest, TorchServeHealthResponse
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub as Names
from ts_frontend.scheduling.sequence_queue import SequenceHeaders
from ts_frontend.scheduling.stream import ReadAhead, ReadyAnswers
from ts_frontend.tasks import owned, watched

INPUTS_MAX = 4096
INPUT_NAME_BYTES_MAX = 1024
VIEW_BYTES_MIN = 4096

_NAME, _VERSION, _INPUT, _SEQUENCE = 0x0A, 0x12, 0x1A, 0x22
_KEY, _VALUE = 0x0A, 0x12
_LENGTH_SHIFT_MAX = 28
_PREFIXES = tuple(bytes((0x0A, size)) for size in range(128))


class PredictionRequest(NamedTuple):
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


def _parse_usual(data: bytes) -> PredictionRequest:
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


Start: TypeAlias = Callable[[PredictionRequest], Job]


class _Conversation:
    """The state of one call."""

    def __init__(self, method: str, start: Start) -> None:
        self._method, self._start = method, start
        self._room = ReadAhead()
        self._last: dict[str | None, asyncio.Task[None]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._answers = ReadyAnswers()

    async def read(self, requests: AsyncIterator[bytes]) -> None:
        """Starts every request and waits for their ends; `ready` ends after that, or with the first error here."""
        try:
            async for data in requests:
                await self._room.enter(len(data))
                await self._take(data)
            if self._running:
                await asyncio.wait(self._running)
        finally:
            for task in self._running:
                task.cancel()
            self._answers.end()

    async def ready(self) -> list[bytes] | None:
        """The answers that are ready, at least one; None after the last."""
        answers = await self._answers.get()
        return answers if answers is None else answers + self._answers.get_waiting()

    async def _take(self, data: bytes) -> None:
        try:
            request = parse(self._method, data)
        except ServeError as error:
            self._room.leave(len(data))
            await self._answers.put([failure_response(error, None)])
            return
        sequence_id = request.sequence_id
        task = watched(self._run(request, self._last.get(sequence_id)), f"A request of {self._method}")
        self._last[sequence_id] = task
        self._running.add(task)
        task.add_done_callback(partial(self._ended, sequence_id, len(data)))

    def _ended(self, sequence_id: str | None, size_bytes: int, task: asyncio.Task[None]) -> None:
        self._room.leave(size_bytes)
        self._running.discard(task)
        if self._last.get(sequence_id) is task:
            del self._last[sequence_id]

    async def _run(self, request: PredictionRequest, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait({before})
        try:
            answer = self._start(request)
            await self._drain(answer, request.sequence_id or answer.sequence_id or None)
        except ServeError as error:
            await self._answers.put([failure_response(error, request.sequence_id)])
        except Exception as error:
            internal = ServeError(f"{self._method}: {type(error).__name__} in the server, see its log")
            await self._answers.put([failure_response(internal, request.sequence_id)])
            raise

    async def _drain(self, answer: Job, sequence_id: str | None) -> None:
        try:
            async for pieces in answer.chunks():
                await self._answers.put([sequence_response(piece, sequence_id) for piece in pieces])
        finally:
            answer.cancel()


async def converse(method: str, requests: AsyncIterator[bytes], start: Start) -> AsyncGenerator[Sequence[bytes], None]:
    """The answers to `requests`; `start` begins one. Leaving early cancels what is running."""
    conversation = _Conversation(method, start)
    reader = owned(conversation.read(requests))
    try:
        while (answers := await conversation.ready()) is not None:
            yield answers
        await reader
    finally:
        reader.cancel()
        del reader  # the exception that it ended with may be on its way through this frame


class InferenceService:
    """The four methods, over what is served."""

    def __init__(self, models: Registry, health: Health, sequence_keys: SequenceHeaders | None = None) -> None:
        self._models = models
        self._health = health
        self._keys = sequence_keys or SequenceHeaders()
        self._ids = RequestIds()

    def methods(self) -> tuple[Method, ...]:
        return (
            Method(Names.Ping_PATH, Shape.UNARY, self.ping),
            Method(Names.Predictions_PATH, Shape.UNARY, self.predictions),
            Method(Names.StreamPredictions_PATH, Shape.SERVER_STREAM, self.stream_predictions),
            Method(Names.StreamPredictions2_PATH, Shape.BIDI, self.stream_predictions_2),
        )

    async def ping(self, call: Call, data: bytes) -> bytes:
        """TorchServeHealthResponse with the text of `/ping`; never an error."""
        try:
            _, report = await self._health.health()
        except ServeError:
            report = {"status": "Unhealthy"}
        return TorchServeHealthResponse(health=json.dumps(report, indent=2, ensure_ascii=False)).SerializeToString()

    def _submit(self, call: Call, request: PredictionRequest, stream: bool) -> Job:
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
        """What HTTP clients say in headers: which sequence, and, as inputs of these names, whether it begins or ends.
        Also the other inputs."""
        marks = self._keys.start, self._keys.end
        found = [part for part in inputs if part.name.lower() in marks]
        named = [(part.name.lower(), str(part.data, "utf-8", "replace")) for part in found]
        return [(self._keys.id, sequence_id), *named], [part for part in inputs if part not in found]

    async def predictions(self, call: Call, data: bytes) -> bytes:
        """One PredictionsRequest -> one PredictionResponse, the pieces of a streamed answer joined."""
        answer = self._submit(call, parse(call.path, data), False)
        prediction = await answer.result()
        if answer.headers or answer.status != 200:
            call.trailing.extend(response_metadata(answer.status, answer.headers))
        return response(prediction)

    async def stream_predictions(self, call: Call, data: bytes) -> AsyncIterator[Sequence[bytes]]:
        """One PredictionsRequest -> a PredictionResponse for every piece the handler sends."""
        answer = self._submit(call, parse(call.path, data), True)
        try:
            async for pieces in answer.chunks():
                yield [response(piece) for piece in pieces]
        finally:
            answer.cancel()
        if answer.headers or answer.status != 200:
            call.trailing.extend(response_metadata(answer.status, answer.headers))

    def stream_predictions_2(self, call: Call, requests: AsyncIterator[bytes]) -> AsyncIterator[Sequence[bytes]]:
        """PredictionsRequests -> the PredictionResponses of each, failures among them (`conversation.py`)."""
        return converse(call.path, requests, lambda request: self._submit(call, request, True))
