"""The inference service over a model that is played by a function."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from streams import Answer, Http2Client
from ts.protocol.frames import Chunk, Input, Pairs
from ts_frontend.errors import ModelNotFound, NoWorker, ServeError
from ts_frontend.grpc.call import Call, Exchange, response_metadata, routes
from ts_frontend.grpc.inference import InferenceService
from ts_frontend.grpc.protocol import Decoder, encode
from ts_frontend.http.torchserve import json_of_model
from ts_frontend.job import Job, JobState, Ledger
from ts_frontend.protos.inference_pb2 import PredictionResponse, PredictionsRequest, TorchServeHealthResponse
from ts_frontend.transport.limits import ListenerLimits

pytestmark = pytest.mark.pure_form  # its models stand in for `Model`, by which compiled code means that class

Play = Callable[[Job], None]
SERVICE = "/org.pytorch.serve.grpc.inference.InferenceAPIsService"


class PlayedModel:
    """Passes every job to `play`, which delivers pieces in place of a worker."""

    def __init__(self, play: Play) -> None:
        self.play = play
        self.jobs: list[Job] = []

    def submit(
        self,
        inputs: Sequence[Input],
        *,
        headers: Pairs = (),
        deadline_s: float = math.inf,
        request_id: str | None = None,
        stream: bool,
        version_named: bool = False,
    ) -> Job:
        job = Job(Ledger(), inputs, headers=headers, deadline_s=deadline_s, request_id=request_id or "", stream=stream)
        job.move(JobState.QUEUED)
        job.move(JobState.SENT)
        self.jobs.append(job)
        self.play(job)
        return job


class Models:
    def __init__(self, **models: PlayedModel) -> None:
        self.models = models

    def find(self, name: str, version: str | None) -> PlayedModel:
        if name not in self.models:
            raise ModelNotFound(name)
        return self.models[name]


class Health:
    def __init__(self, report: dict[str, Any] | ServeError) -> None:
        self.report = report

    async def health(self) -> tuple[bool, dict[str, Any]]:
        if isinstance(self.report, ServeError):
            raise self.report
        return True, self.report


def echo(job: Job) -> None:
    job.deliver(Chunk(job.id, b"|".join(bytes(part.data) for part in job.inputs)))


def over(models: Any, report: dict[str, Any] | ServeError) -> InferenceService:
    health: Any = Health(report)
    return InferenceService(models, health)


def service(play: Play = echo, report: dict[str, Any] | ServeError | None = None) -> InferenceService:
    return over(Models(m=PlayedModel(play)), report or {"status": "Healthy"})


def request(**fields: Any) -> bytes:
    return PredictionsRequest(**{"model_name": "m", "input": {"data": b"x"}, **fields}).SerializeToString()


async def collect(answers: AsyncIterator[Sequence[bytes]]) -> list[PredictionResponse]:
    return [PredictionResponse.FromString(data) async for group in answers for data in group]


async def feed(*messages: bytes) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


@pytest.mark.parametrize(
    ("report", "text"),
    [
        ({"status": "Healthy"}, '{\n  "status": "Healthy"\n}'),
        ({"status": "Unhealthy"}, '{\n  "status": "Unhealthy"\n}'),
        (NoWorker("gone"), '{\n  "status": "Unhealthy"\n}'),
    ],
)
def test_ping(report: dict[str, Any] | ServeError, text: str) -> None:
    answer = asyncio.run(service(report=report).ping(Call("/p"), b""))
    assert TorchServeHealthResponse.FromString(answer).health == text


def converse(play: Play, *messages: bytes) -> list[PredictionResponse]:
    return asyncio.run(collect(service(play).stream_predictions_2(Call("/p"), feed(*messages))))


def test_conversation_goes_on_after_failures() -> None:
    answers = converse(echo, request(model_name="nope"), b"\x0a\x09", request(sequence_id="s"))
    failures = {answer.status.code: answer.status.message for answer in answers if answer.HasField("status")}
    assert failures[5] == "Model not found: nope"
    assert "aren't a PredictionsRequest" in failures[3]
    assert [answer.prediction for answer in answers if not answer.HasField("status")] == [b"x"]


def test_unfit_response_headers_are_left_out() -> None:
    headers = [("grpc-status", "0"), ("a b", "x"), ("x-bin", "x"), ("x", "é"), ("Content-Type", "a/b"), ("ok", "1")]
    assert response_metadata(200, headers) == [("ok", "1")]


def test_an_answer_over_the_limit_leaves_those_that_were_ready_with_it() -> None:
    def play(job: Job) -> None:
        for size in (10, 20, 2000):
            job.deliver(Chunk(job.id, bytes(size), last=size == 2000))

    async def answered() -> Answer:
        client = Http2Client()
        stream = client.request(headers=[(b"te", b"trailers")], body=encode([request()]))
        await Exchange(stream, ListenerLimits(response_bytes_max=1000)).run(method)
        return client.answer(stream)

    path = f"{SERVICE}/StreamPredictions"
    method = routes(*service(play).methods())[path]
    answer = asyncio.run(answered())
    messages = Decoder(5000).feed(answer.body)
    assert [len(PredictionResponse.FromString(one.data).prediction) for one in messages] == [10, 20]
    assert answer.grpc_status == 8 and b"max_response_size" in answer.trailers[b"grpc-message"]


@pytest.mark.parametrize(
    ("pairs", "wanted"),
    [
        ([], [("content-type", "application/json")]),
        ([("A", "b")], [("content-type", "application/json"), ("a", "b")]),
        ([("Content-Type", "text/csv")], [("content-type", "text/csv")]),
        ([("content-length", "7"), ("x-request-id", "r")], [("content-type", "application/json")]),
    ],
)
def test_an_answer_of_a_tensor_protocol_is_json_unless_its_model_says_otherwise(pairs: Pairs, wanted: Pairs) -> None:
    answer = json_of_model(b"{}", pairs)
    assert (answer.status, answer.body) == (200, b"{}")
    assert [(name.decode(), value.decode()) for name, value in answer.headers] == wanted
