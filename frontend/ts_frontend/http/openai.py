"""OpenAI's completions and chat completions for text models: `/v1/completions`, `/v1/chat/completions`, `/v1/models`.

A completion uses the queue, batches and workers of any other request (docs/openai.md).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any, TypeAlias

from ts.protocol import completions
from ts.protocol.completions import DONE, Asked, BadCompletion, Choice, Completion
from ts.protocol.frames import Input, Pairs
from ts_frontend.errors import ModelNotFound, ServeError
from ts_frontend.http.errors import BadParameter, ErrorDialect, refusal
from ts_frontend.http.open_inference import EVENTS, event
from ts_frontend.http.request import (
    JSON,
    JSON_BYTES_MAX,
    Body,
    HttpAnswer,
    HttpRequest,
    compact_json,
    json_head,
    json_object,
)
from ts_frontend.http.torchserve import PREDICT, answer_of, handler_headers
from ts_frontend.job import Job
from ts_frontend.limits.clients import TOKEN_BYTES, TOKENS_USUAL, expect_tokens
from ts_frontend.models.health import Health
from ts_frontend.models.model import Model, OpenAIHandler, Registry
from ts_frontend.open_inference.requests import MEMBER_BYTES_MAX, find, members
from ts_frontend.scheduling.stream import chunks
from ts_frontend.tasks import merged, owned

Fields: TypeAlias = "dict[str, Any]"
EVENT_STREAM = b"text/event-stream"
#: Members that the server reads, and those that it refuses.
DECIDING = (*completions.ASKING, "stop", "stream", "stream_options")
TEXT, CHAT = "v1/completions", "v1/chat/completions"


class HttpOpenAI:
    def __init__(self, models: Registry, health: Health) -> None:
        self._models, self._health = models, health

    async def list_models(self, request: HttpRequest) -> HttpAnswer:
        """Answers with OpenAI's list and KServe's (`models`) in one."""
        models = self._models.defaults()
        found = {name: model for model in reversed(models) for name in (model.openai or OpenAIHandler()).names}
        found |= {model.name: model for model in models}
        listed = [_object(name, found[name]) for name in sorted(found)]
        return compact_json(200, {"object": "list", "data": listed, "models": [model.name for model in models]})

    async def retrieve(self, request: HttpRequest) -> HttpAnswer:
        """Answers with OpenAI's object and KServe's readiness in one."""
        name = request.path_params["model_name"]
        model = self._find(name)
        ready = self._health.serves(model)
        return compact_json(200 if ready else 503, _object(name, model) | {"name": name, "ready": ready})

    async def completion(self, request: HttpRequest) -> HttpAnswer:
        return await self._complete(request, TEXT)

    async def chat_completion(self, request: HttpRequest) -> HttpAnswer:
        return await self._complete(request, CHAT)

    async def other(self, request: HttpRequest) -> HttpAnswer:
        """Answers a call that only engines know, such as embeddings: the model's handler gets the body unchanged."""
        path = request.path.strip("/").removeprefix("openai/")
        return await self._complete(request, path, of_engines=True)

    def _find(self, name: str, version: str = "") -> Model:
        """Returns the model of that name, or the one whose handler declares it. Raises ModelNotFound,
        ModelVersionNotFound."""
        try:
            return find(self._models, name, version)
        except ModelNotFound:
            for model in self._models.defaults():
                if model.openai is not None and name in model.openai.names:
                    return model
            raise

    async def _complete(self, request: HttpRequest, path: str, *, of_engines: bool = False) -> HttpAnswer:
        """`of_engines`: only handlers that speak the API know the call, and they check it."""
        body = await request.body()
        whole = len(body) <= JSON_BYTES_MAX
        fields = json_object(body) if whole else await json_head(body)
        path_params = request.path_params  # the console's, for one version
        model = self._find(path_params.get("model_name") or _named(fields), path_params.get("model_version", ""))
        expect_tokens(lambda: _most_tokens(fields, len(body)))
        calls = _Calls(request)
        try:
            handler = await calls.known(model, self._models)
            if handler.speaks and (of_engines or handler.honours is None):
                return await calls.passed(model, path, body)
            if of_engines:
                raise BadParameter(
                    f"model {model.name} has no /{path[:80]}: its handler gives texts alone (docs/openai.md)", "model"
                )
            honours = handler.honours or frozenset()
            if not whole:
                await _check_large(body, fields, honours)
            asked = _read(fields, path == CHAT, honours, whole)
            if handler.speaks:
                return await calls.passed(model, path, body)
            return await calls.composed(model, path == CHAT, asked, fields, body)
        except BaseException:
            calls.cancel()
            raise


def _most_tokens(fields: Fields, size_bytes: int) -> float:
    """Returns the number of tokens that a request may use, of its prompt and of its answers together, as far as that is
    known before it runs."""
    counts = [fields.get(name) for name in ("max_completion_tokens", "max_tokens", "max_output_tokens")]
    most = next((one for one in counts if isinstance(one, int) and one > 0), TOKENS_USUAL)
    choices = fields.get("n")
    return size_bytes / TOKEN_BYTES + most * (choices if isinstance(choices, int) and choices > 0 else 1)


def _named(fields: Fields) -> str:
    """Returns the name of the model of a request. Raises BadParameter."""
    name = fields.get("model")
    if not isinstance(name, str) or not name:
        raise BadParameter("model must be the name of a model", "model")
    return name


async def _check_large(body: bytes, fields: Fields, honours: frozenset[str]) -> None:
    """Raises BadParameter if a member that affects the answer is too large to be among `fields`."""
    for name in await asyncio.to_thread(members, body, DECIDING):
        if name not in fields and name not in honours:
            raise BadParameter(f"{name} is over {MEMBER_BYTES_MAX} bytes, in a body of {len(body)} bytes", name)


def _read(fields: Fields, chat: bool, honours: frozenset[str], whole: bool) -> Asked:
    """Reads a request's members. Raises BadParameter."""
    try:
        return completions.read(fields, chat, honours, whole)
    except BadCompletion as error:
        raise BadParameter(str(error), error.parameter, error.reason) from None


def _object(name: str, model: Model) -> Fields:
    return {"id": name, "object": "model", "created": int(model.created_s), "owned_by": "torchrelay"}


class _Calls:
    """The jobs and waits of one request, cancelled when its client disconnects."""

    def __init__(self, request: HttpRequest) -> None:
        self._request = request
        self._running: list[Callable[[], object]] = []
        request.when_gone(self.cancel)

    def cancel(self) -> None:
        for cancel in self._running:
            cancel()

    async def known(self, model: Model, models: Registry) -> OpenAIHandler:
        """Returns the handler's support of the API, after waiting for the model's first worker if it is still loading.
        For a model that can't load, the request itself is refused later."""
        while model.openai is None and model.loading:
            change = owned(models.changes.wait())
            self._running.append(change.cancel)
            await asyncio.wait({change})
            self._running.remove(change.cancel)
        return model.openai or OpenAIHandler()

    def _submit(self, model: Model, given: Input, stream: bool, more: Pairs = ()) -> Job:
        headers = self._request.for_handler(more)
        named = "model_version" in self._request.path_params
        job = model.submit(
            [given], headers=headers, request_id=self._request.request_id, stream=stream, version_named=named
        )
        self._running.append(job.cancel)
        return job

    async def passed(self, model: Model, path: str, body: bytes) -> HttpAnswer:
        """Returns the answer of a handler that implements the API."""
        given = Input("body", "application/json", body)
        answer = await answer_of(self._submit(model, given, True, [PREDICT, ("url_path", path)]))
        kind = dict(answer.headers).get(b"content-type")
        if kind is None:
            answer = answer._replace(headers=(*answer.headers, JSON))
        if isinstance(answer.body, (bytes, bytearray, memoryview)) or kind is None or not kind.startswith(EVENT_STREAM):
            return answer
        return answer._replace(body=_told(answer.body))

    async def composed(self, model: Model, chat: bool, asked: Asked, fields: Fields, body: bytes) -> HttpAnswer:
        """Returns the answer of a handler from text to text, with one model request for each prompt."""
        form = f"\0openai{';chat' if chat else ''}{';stream' if asked.stream else ''}"
        bodies = [body] if len(asked.prompts) < 2 else _each(fields, asked.prompts)
        jobs = [self._submit(model, Input("", form, one), asked.stream) for one in bodies]
        choices = [Choice(asked.stops, asked.max_tokens) for _ in jobs]
        answer = completions.form_of(chat)(self._request.request_id, fields["model"], asked.with_usage)
        if not asked.stream:
            texts = [await _text(job, choice) for job, choice in zip(jobs, choices, strict=True)]
            whole = compact_json(200, answer.whole(texts, choices))
            return whole._replace(headers=(*whole.headers, *handler_headers(jobs[0].told)))
        events = merged(
            [_choice(job, answer, index, choice) for index, (job, choice) in enumerate(zip(jobs, choices, strict=True))]
        )
        first = await anext(events)

        def last() -> list[bytes]:
            return [completions.event(answer.of_usage(choices))] if asked.with_usage else []

        headers = (EVENTS, *handler_headers(jobs[0].told))
        return HttpAnswer(200, headers, _told(_all(first, events, last)))


def _each(fields: Fields, prompts: Sequence[Any]) -> list[bytes]:
    """Returns the request's body for each of its prompts."""
    return [json.dumps(fields | {"prompt": prompt}).encode() for prompt in prompts]


async def _text(job: Job, choice: Choice) -> str:
    """Returns the complete text of an answer. Raises its ServeError."""
    pieces = [json.loads(bytes(piece)) for piece in await job.pieces()]
    return "".join([choice.add(piece["text"], piece) for piece in pieces]) + choice.rest()


async def _choice(job: Job, answer: Completion, index: int, choice: Choice) -> AsyncGenerator[list[bytes], None]:
    """Yields the events of one choice. The job is cancelled at the first stop text."""
    pieces = chunks(job)
    try:
        async for ready in pieces:
            said = [json.loads(bytes(data)) for data in ready if len(data)]
            texts = filter(None, [choice.add(piece["text"], piece) for piece in said])
            if events := [completions.event(answer.piece(index, choice, text)) for text in texts]:
                yield events
            if choice.cut:
                break
        rest = choice.rest()
        events = [] if choice.begun and not rest else [completions.event(answer.piece(index, choice, rest))]
        yield [*events, completions.event(answer.end(index, choice))]
    finally:
        await pieces.aclose()


async def _all(
    first: list[bytes], rest: AsyncGenerator[list[bytes], None], last: Callable[[], list[bytes]]
) -> AsyncGenerator[list[bytes], None]:
    """Yields all events of a stream. `last` makes the final events, after all others were sent."""
    try:
        yield first
        async for events in rest:
            yield events
        yield [*last(), DONE]
    finally:
        await rest.aclose()


async def _told(pieces: AsyncIterator[Sequence[Body]]) -> AsyncIterator[Sequence[Body]]:
    """Yields the pieces; a failure becomes an event."""
    try:
        async for piece in pieces:
            yield piece
    except ServeError as error:
        yield [event(refusal(error, ErrorDialect.OPENAI).body)]  # type: ignore[arg-type]
    finally:
        await pieces.aclose()  # type: ignore[attr-defined]
