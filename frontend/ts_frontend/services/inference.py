"""The door `InferenceAPIsService`: translate, submit, drain the reply (`protos/inference.proto`)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from ts.protocol.frames import Input, Pairs
from ts_frontend.batching.sequence_jobs import Keys
from ts_frontend.errors import InvalidArgument, ServeError
from ts_frontend.ingress.call import Call, Method, Shape
from ts_frontend.protos.inference_pb2 import TorchServeHealthResponse
from ts_frontend.protos.inference_pb2_grpc import InferenceAPIsServiceStub as Names
from ts_frontend.services.conversation import converse
from ts_frontend.services.metadata import RequestIds, identified, response_metadata
from ts_frontend.services.predictions import Request, parse, response
from ts_frontend.services.served import Answer, Models


class Health(Protocol):
    """Who knows whether all is well (`ts_frontend.models.administration.Administration`)."""

    async def health(self) -> tuple[bool, dict[str, Any]]: ...


class InferenceService:
    """The four methods, over what is served."""

    def __init__(self, models: Models, health: Health, sequence_keys: Keys | None = None) -> None:
        self._models = models
        self._health = health
        self._keys = sequence_keys or Keys()
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

    def _submit(self, call: Call, request: Request, stream: bool) -> Answer:
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
