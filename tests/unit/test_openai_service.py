"""The service of OpenAI's API over models that are played by functions: models that load, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from streams import Http2Client
from support import until_async
from ts.protocol.frames import Chunk, Failed
from ts.runtime.handlers import HandlerNotUsable, openai_of
from ts_frontend.errors import QueueFull, ServeError
from ts_frontend.http.errors import ErrorDialect, refusal
from ts_frontend.http.openai import HttpOpenAI
from ts_frontend.http.request import BodyLimits, HttpAnswer, HttpRequest
from ts_frontend.job import Job, JobState, Ledger
from ts_frontend.models.health import Health
from ts_frontend.models.model import OpenAIHandler, Registry

Play = Callable[[Job], None]
SPEAKS = OpenAIHandler(True, ("alias",), frozenset({"tools"}))


class Played:
    """A model that hands every job to `play`."""

    name, version, created_s, ready = "m", "1.0", 7.5, True

    def __init__(self, play: Play, openai: OpenAIHandler | None = None, loading: bool = False) -> None:
        self.play, self.openai, self.loading = play, openai, loading
        self.jobs: list[Job] = []
        self.refuses_from = 99

    def submit(self, inputs: Any, *, headers: Any, request_id: str, stream: bool, version_named: bool) -> Job:
        if len(self.jobs) >= self.refuses_from:
            raise QueueFull("full")
        job = Job(Ledger(), inputs, headers=headers, request_id=request_id, stream=stream)
        job.move(JobState.QUEUED)
        job.move(JobState.SENT)
        self.jobs.append(job)
        self.play(job)
        return job


def echo(job: Job) -> None:
    text = json.loads(bytes(job.inputs[0].data))["prompt"]
    job.deliver(Chunk(job.id, json.dumps({"text": text}).encode(), last=True))


def spoken(job: Job) -> None:
    """The answer of a handler that speaks the API: its input."""
    (given,) = job.inputs
    answer = {
        "type": given.content_type,
        "path": dict(job.request_headers)["url_path"],
        "body": bytes(given.data).decode(),
    }
    job.deliver(Chunk(job.id, json.dumps(answer).encode(), last=True))


def nothing(job: Job) -> None:
    pass


class Client(Http2Client):
    """Sends a body, and leaves when it is told to."""

    def __init__(self, **body: Any) -> None:
        super().__init__()
        self.stream = self.request(target="/v1/completions", body=json.dumps(body).encode())
        self.asked = HttpRequest(self.stream, "r", BodyLimits(1 << 20, 60))


def service(model: Any) -> tuple[HttpOpenAI, Registry]:
    models = Registry()
    models.add(model)
    return HttpOpenAI(models, Health(models, frozenset())), models


async def answered(played: Any, **body: Any) -> tuple[int, Any]:
    """The status and the content of the body, which for an error has OpenAI's form."""
    try:
        answer = await service(played)[0].completion(Client(**body).asked)
    except ServeError as error:
        answer = refusal(error, ErrorDialect.OPENAI)
    if isinstance(answer.body, (bytes, bytearray, memoryview)):
        return answer.status, json.loads(bytes(answer.body))
    return answer.status, b"".join([bytes(piece) async for pieces in answer.body for piece in pieces])


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


async def test_a_model_that_loads_is_waited_for() -> None:
    """The input of its handler is known only after the load."""

    model = Played(spoken, loading=True)
    served, models = service(model)
    task = asyncio.create_task(served.completion(Client(model="m", prompt="x").asked))
    for _ in range(3):
        await asyncio.sleep(0)
        models.changes.notify()
    assert not task.done() and not model.jobs
    model.openai, model.loading = SPEAKS, False
    models.changes.notify()
    answer: HttpAnswer = await task
    found = json.loads(bytes(answer.body))  # type: ignore[arg-type]
    assert found == {"type": "application/json", "path": "v1/completions", "body": '{"model": "m", "prompt": "x"}'}
    assert answer.headers == ((b"content-type", b"application/json"),)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_runs_for_a_request_ends_with_it(stream: bool) -> None:
    """One of three prompts fails; or the queue is full before the last."""

    def second_fails(job: Job) -> None:
        if b"y" in bytes(job.inputs[0].data):
            job.failed_by_worker(Failed(job.id, 400, "no y"))

    body = {"model": "m", "prompt": ["x", "y", "z"], "stream": stream}
    model = Played(second_fails, OpenAIHandler())
    if stream:
        status, found = await answered(model, **body)
        assert status == 400
    else:
        task = asyncio.create_task(answered(model, **body))
        await until_async(lambda: len(model.jobs) == 3)
        model.jobs[0].deliver(Chunk(model.jobs[0].id, b'{"text": ""}', last=True))
        status, found = await task
    assert (status, found["error"]["message"]) == (400, "no y")
    assert all(job.done for job in model.jobs)
    full = Played(nothing, OpenAIHandler())
    full.refuses_from = 2
    status, found = await answered(full, **body)
    assert status == 503 and [job.state for job in full.jobs] == [JobState.CANCELLED] * 2


async def test_a_failure_in_the_middle_of_a_stream_is_an_event() -> None:
    def fails(job: Job) -> None:
        kind = (("content-type", "text/event-stream"),)
        data = b'{"text": "a"}' if job.inputs[0].name == "" else b"data: 1\n\n"
        job.deliver(Chunk(job.id, data, last=False, headers=kind))
        asyncio.get_running_loop().call_soon(job.failed_by_worker, Failed(job.id, 500, "broken"))

    for handler in (OpenAIHandler(), OpenAIHandler(True, (), None)):
        status, found = await answered(Played(fails, handler), model="m", prompt="x", stream=True)
        *_, last, nothing = found.split(b"\n\n")
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert (status, error["message"], error["type"], nothing) == (200, "broken", "server_error", b"")


async def test_a_handler_that_speaks_checks_what_it_does_not_declare() -> None:
    model = Played(spoken, OpenAIHandler(True, (), None))
    status, found = await answered(model, model="m", tools=[1], anything=2)
    assert status == 200 and json.loads(found["body"])["anything"] == 2
    status, found = await answered(Played(spoken, SPEAKS), model="alias", prompt="x", tools=[1])
    assert status == 200 and found["path"] == "v1/completions"
    status, found = await answered(Played(spoken, SPEAKS), model="alias", prompt="x", n=2)
    assert (status, found["error"]["param"]) == (400, "n")


async def test_models_are_listed_by_all_their_names() -> None:
    served, _ = service(Played(echo, SPEAKS))
    answer = await served.list_models(Client().asked)
    found = json.loads(bytes(answer.body))  # type: ignore[arg-type]
    assert [(one["id"], one["created"]) for one in found["data"]] == [("alias", 7), ("m", 7)]
    assert found["models"] == ["m"]


def test_what_a_handlers_attributes_say() -> None:
    assert openai_of(SimpleNamespace()) is None and openai_of(None) is None
    assert openai_of(SimpleNamespace(openai_honours=("tools",))) == {"speaks": False, "names": [], "honours": ["tools"]}
    speaks = SimpleNamespace(openai_api=True, openai_models=["a"])
    assert openai_of(speaks) == {"speaks": True, "names": ["a"], "honours": None}
    for wrong in ("tools", [1]):
        with pytest.raises(HandlerNotUsable, match="openai_honours is a list of names"):
            openai_of(SimpleNamespace(openai_honours=wrong))
