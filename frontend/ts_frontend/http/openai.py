"""OpenAI's completions and chat completions for text models: `/v1/completions`, `/v1/chat/completions`, `/v1/models`.

A completion is a request like any other: the same queue, batches and workers (docs/openai.md).
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

from ts.protocol.frames import Buffer, Input
from ts_frontend.errors import InvalidArgument, ServeError
from ts_frontend.http.errors import ErrorDialect, refusal
from ts_frontend.http.open_inference import EVENTS, event
from ts_frontend.http.request import HttpAnswer, HttpRequest, compact_json, json_head
from ts_frontend.job import Job
from ts_frontend.models.registry import Registry
from ts_frontend.open_inference.models import find

Fields: TypeAlias = "dict[str, Any]"
DONE = b"data: [DONE]\n\n"


class HttpOpenAI:
    """Answers in OpenAI's form."""

    def __init__(self, models: Registry) -> None:
        self._models = models

    async def list_models(self, request: HttpRequest) -> HttpAnswer:
        """OpenAI's list and KServe's (`models`) in one."""
        names = sorted(model.name for model in self._models.defaults())
        return compact_json(200, {"object": "list", "data": [_object(name) for name in names], "models": names})

    async def retrieve(self, request: HttpRequest) -> HttpAnswer:
        """OpenAI's object and KServe's readiness in one."""
        name = request.path_params["model_name"]
        ready = find(self._models, name, "").ready
        return compact_json(200 if ready else 503, _object(name) | {"name": name, "ready": ready})

    async def completion(self, request: HttpRequest) -> HttpAnswer:
        return await self._complete(request, Completion)

    async def chat_completion(self, request: HttpRequest) -> HttpAnswer:
        return await self._complete(request, ChatCompletion)

    async def _complete(self, request: HttpRequest, form: type[Completion]) -> HttpAnswer:
        body = await request.body()
        asked = await json_head(body)
        name = asked.get("model")
        if not isinstance(name, str) or not name:
            raise InvalidArgument("model is the name of the model to ask")
        if asked.get("n") not in (None, 1):
            raise InvalidArgument(f"n is {asked['n']!r}: one choice for each request is all there is")
        stream = asked.get("stream") or False
        if not isinstance(stream, bool):
            raise InvalidArgument(f"stream is true or false, not {stream!r}")
        model = find(self._models, name, "")
        answer = model.submit(
            [Input("", f"\0openai{form.option}{';stream' if stream else ''}", body)],
            headers=[(key.decode("latin-1"), value.decode("latin-1")) for key, value in request.headers],
            request_id=request.request_id,
            stream=stream,
        )
        request.when_gone(answer.cancel)
        completion = form(request.request_id, name)
        if stream:
            return await _streamed(answer, completion, asked)
        return compact_json(200, completion.whole([json.loads(bytes(piece)) for piece in await answer.pieces()]))


def _object(name: str) -> Fields:
    return {"id": name, "object": "model", "created": 0, "owned_by": "torchrelay"}


class Completion:
    """The objects of one completion."""

    option = ""
    prefix, whole_object, piece_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, request_id: str, model: str) -> None:
        self._fields = {"id": f"{self.prefix}-{request_id}", "created": int(time.time()), "model": model}

    def whole(self, pieces: list[Fields]) -> Fields:
        """The answer that isn't streamed."""
        text = "".join(piece["text"] for piece in pieces)
        choice = {"index": 0, **self._text(text), "logprobs": None, "finish_reason": finish_reason(pieces)}
        return {**self._fields, "object": self.whole_object, "choices": [choice], **usage(pieces)}

    def piece(self, text: str, first: bool) -> Fields:
        return self._event({**self._delta(text, first), "finish_reason": None})

    def end(self, pieces: list[Fields]) -> Fields:
        return self._event({**self._end_delta(), "finish_reason": finish_reason(pieces)})

    def of_usage(self, pieces: list[Fields]) -> Fields:
        """What a client that asked for it gets last."""
        return {**self._fields, "object": self.piece_object, "choices": [], **(usage(pieces) or {"usage": None})}

    def _event(self, choice: Fields) -> Fields:
        return {**self._fields, "object": self.piece_object, "choices": [{"index": 0, "logprobs": None, **choice}]}

    def _text(self, text: str) -> Fields:
        return {"text": text}

    def _delta(self, text: str, first: bool) -> Fields:
        return {"text": text}

    def _end_delta(self) -> Fields:
        return {"text": ""}


class ChatCompletion(Completion):
    """The same for a conversation."""

    option = ";chat"
    prefix, whole_object, piece_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _text(self, text: str) -> Fields:
        return {"message": {"role": "assistant", "content": text}}

    def _delta(self, text: str, first: bool) -> Fields:
        return {"delta": {"role": "assistant", "content": text} if first else {"content": text}}

    def _end_delta(self) -> Fields:
        return {"delta": {}}


def finish_reason(pieces: list[Fields]) -> str:
    """What the model said last of why it ended; `stop` when it said nothing."""
    said = [piece["finish_reason"] for piece in pieces if piece.get("finish_reason")]
    return str(said[-1]) if said else "stop"


def usage(pieces: list[Fields]) -> Fields:
    """The numbers of tokens, when the model said them."""
    found = {name: piece[name] for piece in pieces for name in ("prompt_tokens", "completion_tokens") if name in piece}
    if len(found) < 2:
        return {}
    return {"usage": {**found, "total_tokens": sum(found.values())}}


async def _streamed(answer: Job, completion: Completion, asked: Fields) -> HttpAnswer:
    pieces = answer.chunks()
    first = await anext(pieces)
    options = asked.get("stream_options")
    with_usage = isinstance(options, dict) and options.get("include_usage") is True
    return HttpAnswer(200, (EVENTS,), _events(first, pieces, completion, with_usage))


async def _events(
    first: list[Buffer], rest: AsyncIterator[list[Buffer]], completion: Completion, with_usage: bool
) -> AsyncIterator[list[bytes]]:
    said: list[Fields] = []

    def taken(ready: list[Buffer]) -> list[bytes]:
        found = []
        for data in ready:
            if len(data):
                piece = json.loads(bytes(data))
                found.append(_event(completion.piece(piece["text"], not said)))
                said.append(piece | {"text": ""})
        return found

    try:
        yield taken(first)
        async for ready in rest:
            yield taken(ready)
        ends = [_event(completion.end(said))]
        if with_usage:
            ends.append(_event(completion.of_usage(said)))
        yield [*ends, DONE]
    except ServeError as error:
        yield [event(refusal(error, ErrorDialect.OPENAI).body)]  # type: ignore[arg-type]
    finally:
        await rest.aclose()  # type: ignore[attr-defined]


def _event(value: Fields) -> bytes:
    return event(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
