"""The service `InferenceAPIsService`: TorchServe's inference API over gRPC (`protos/inference.proto`)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence

from ts.protocol.frames import Buffer
from ts_frontend.errors import Ending, ServeError
from ts_frontend.grpc.call import Call, Method, Shape, response_metadata
from ts_frontend.grpc.predictions import PredictionRequest, Predictions, parse, response, responses
from ts_frontend.grpc.protocol import status_of
from ts_frontend.job import Job
from ts_frontend.models.health import Health
from ts_frontend.models.model import Registry
from ts_frontend.protos.inference_pb2 import PredictionResponse, TorchServeHealthResponse
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub as Names
from ts_frontend.scheduling.queues import SequenceHeaders
from ts_frontend.scheduling.stream import Multiplexer, StreamRequest, chunks


def sequence_response(prediction: Buffer, sequence_id: str | None) -> bytes:
    """Returns a PredictionResponse for StreamPredictions2: concatenated encodings are one message."""
    if sequence_id is None:
        return response(prediction)
    return response(prediction) + PredictionResponse(sequence_id=sequence_id).SerializeToString()


def failure_response(error: ServeError, sequence_id: str | None) -> bytes:
    """Returns a PredictionResponse with the error in place of an answer (StreamPredictions2)."""
    return PredictionResponse(status=status_of(error), sequence_id=sequence_id).SerializeToString()


class _StreamedPrediction(StreamRequest):
    """A request of StreamPredictions2. The requests of one sequence run one after another, as do those without an id. A
    request that can't be parsed fails alone."""

    starts_in_turn = True

    def __init__(self, method: str, data: bytes, submit: Callable[[PredictionRequest], Job]) -> None:
        self._submit = submit
        self._sequence_id: str | None = None
        self._request: PredictionRequest | Ending
        try:
            self._request = parse(method, data)
        except ServeError as error:
            self._request = error.ending()
        else:
            self._sequence_id = self._request.sequence_id
            self.lane = ("sequence", self._sequence_id)

    def start(self) -> Job:
        if isinstance(self._request, Ending):
            raise self._request.error()
        return self._submit(self._request)

    def answers(self, job: Job, pieces: list[Buffer]) -> list[bytes]:
        sequence_id = self._sequence_id or job.sequence_id or None
        return [sequence_response(piece, sequence_id) for piece in pieces]

    def failure(self, error: ServeError, started: bool) -> bytes:
        return failure_response(error, self._sequence_id)


class InferenceService:
    """The four inference methods, over the served models."""

    def __init__(self, models: Registry, health: Health, sequence_keys: SequenceHeaders | None = None) -> None:
        self._health = health
        self._predictions = Predictions(models, sequence_keys or SequenceHeaders())

    def methods(self) -> tuple[Method, ...]:
        return (
            Method(Names.Ping_PATH, Shape.UNARY, self.ping),
            Method(Names.Predictions_PATH, Shape.UNARY, self._predictions.answer),
            Method(Names.StreamPredictions_PATH, Shape.SERVER_STREAM, self.stream_predictions),
            Method(Names.StreamPredictions2_PATH, Shape.BIDI, self.stream_predictions_2),
        )

    async def ping(self, call: Call, data: bytes) -> bytes:
        """TorchServeHealthResponse with the text of `/ping`; never raises."""
        try:
            _, report = await self._health.health()
        except ServeError:
            report = {"status": "Unhealthy"}
        return TorchServeHealthResponse(health=json.dumps(report, indent=2, ensure_ascii=False)).SerializeToString()

    async def stream_predictions(self, call: Call, data: bytes) -> AsyncIterator[Sequence[bytes]]:
        answer = self._predictions.submit(call, parse(call.path, data), True)
        try:
            async for pieces in chunks(answer):
                yield responses(pieces)
        finally:
            answer.cancel()
        if answer.headers or answer.status != 200:
            call.trailing.extend(response_metadata(answer.status, answer.headers))

    def stream_predictions_2(self, call: Call, requests: AsyncIterator[bytes]) -> AsyncIterator[Sequence[bytes]]:
        """PredictionsRequests -> the PredictionResponses of each, with failures as PredictionResponses."""

        def accept(data: bytes) -> _StreamedPrediction:
            return _StreamedPrediction(call.path, data, submit)

        def submit(request: PredictionRequest) -> Job:
            return self._predictions.submit(call, request, True)

        return Multiplexer(call.path, accept).answers(requests)
