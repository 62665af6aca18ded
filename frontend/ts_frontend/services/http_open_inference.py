"""The door of the Open Inference Protocol over HTTP: `/v2` (docs/open-inference.md).

Bodies pass through as bytes: the worker reads and writes them. Errors are `{"error": text}`.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias

from ts.protocol.frames import Buffer, Input, Pairs
from ts_frontend.batching.sequence_jobs import Keys
from ts_frontend.errors import InvalidArgument, ModelNotFound, ServeError
from ts_frontend.ingress.http_call import Header, HttpAnswer, HttpRequest, Serve
from ts_frontend.models.signature import TensorSpec
from ts_frontend.repository.config import as_json
from ts_frontend.services import tensor_models, tensor_requests
from ts_frontend.services.http_answers import compact_json, json_object
from ts_frontend.services.http_v2 import body_of, compressed, refusal, served
from ts_frontend.services.repository import Repository, check_unload_parameters, config_of, load_parameters
from ts_frontend.services.served import Answer
from ts_frontend.services.tensor_joining import joined_generate, joined_json
from ts_frontend.services.tensor_models import Health, Models, Regions, Served

EVENTS: Header = (b"content-type", b"text/event-stream; charset=utf-8")

Act: TypeAlias = "Callable[[HttpRequest, Served], Awaitable[HttpAnswer]]"


class HttpOpenInference:
    """`keys`: as in `OpenInferenceService`.

    `always`: also `/v2/models/M/infer` of models that declare no tensors; TorchServe hands their body to the handler
    as it is."""

    def __init__(
        self,
        models: Models,
        health: Health,
        repository: Repository,
        about: tensor_models.About,
        regions: Regions,
        keys: Keys,
        *,
        always: bool,
    ) -> None:
        self._models = models
        self._repository = repository
        self._health = health
        self._about = about
        self._regions = regions
        self._keys = keys
        self._always = always
        self._of_model: dict[tuple[str, ...], tuple[str, Act]] = {
            (): ("GET", self._metadata),
            ("ready",): ("GET", self._ready),
            ("config",): ("GET", self._config),
            ("infer",): ("POST", self._infer),
            ("infer_stream",): ("POST", self._infer_stream),
            ("generate",): ("POST", self._generate),
            ("generate_stream",): ("POST", self._generate_stream),
        }

    def route(self, request: HttpRequest) -> Serve | None:
        segments = request.segments
        if not segments or segments[0] != "v2":
            return None
        match segments[1:]:
            case []:
                return served(["GET"], self._server)
            case ["health", "live"]:
                return served(["GET"], self._live)
            case ["health", "ready"]:
                return served(["GET"], self._server_ready)
            case ["models"]:
                return served(["GET"], self._list)
            case ["models", name, "versions", version, *rest] if tuple(rest) in self._of_model:
                return self._model(name, version, tuple(rest))
            case ["models", name, *rest] if tuple(rest) in self._of_model and not self._is_torchserves(request, rest):
                return self._model(name, "", tuple(rest))
            case ["repository", "index"] | ["repository", _, "index"]:
                return served(["POST"], self._index)
        return None

    def managing(self, request: HttpRequest) -> Serve | None:
        """The calls that change what is served."""
        match request.segments:
            case ["v2", "repository", "models", name, "load"] | ["v2", "repository", _, "models", name, "load"]:
                return served(["POST"], partial(self._load, name))
            case ["v2", "repository", "models", name, "unload"] | ["v2", "repository", _, "models", name, "unload"]:
                return served(["POST"], partial(self._unload, name))
        return None

    def _is_torchserves(self, request: HttpRequest, rest: list[str]) -> bool:
        """Whether a request goes to the handler as TorchServe would hand it on. One with binary tensors never does."""
        if rest != ["infer"] or self._always or request.header(tensor_requests.LENGTH_HEADER):
            return False
        try:
            return not self._models.find(request.segments[2]).takes_tensors
        except ModelNotFound:
            return False

    def _model(self, name: str, version: str, rest: tuple[str, ...]) -> Serve:
        method, act = self._of_model[rest]

        async def serve(request: HttpRequest) -> HttpAnswer:
            return await act(request, tensor_models.find(self._models, name, version))

        return served([method], serve)

    # --- health and metadata

    async def _server(self, request: HttpRequest) -> HttpAnswer:
        extensions = tensor_models.extensions(self._regions)
        return compact_json(200, {**self._about._asdict(), "extensions": extensions})

    async def _live(self, request: HttpRequest) -> HttpAnswer:
        return compact_json(200, {"live": True})

    async def _server_ready(self, request: HttpRequest) -> HttpAnswer:
        """KServe's clients read `ready`, the protocol's text says `live`."""
        ready = self._health.ready
        return compact_json(200 if ready else 503, {"ready": ready, "live": ready})

    async def _list(self, request: HttpRequest) -> HttpAnswer:
        return compact_json(200, {"models": sorted(model.name for model in self._models.defaults())})

    async def _ready(self, request: HttpRequest, model: Served) -> HttpAnswer:
        return compact_json(200 if model.ready else 503, {"name": model.name, "ready": model.ready})

    async def _metadata(self, request: HttpRequest, model: Served) -> HttpAnswer:
        signature = model.signature
        found: dict[str, Any] = {
            "name": model.name,
            "versions": [one.version for one in self._models.versions(model.name)],
            "platform": signature.platform,
            "inputs": [tensor_metadata(spec) for spec in signature.inputs],
            "outputs": [tensor_metadata(spec) for spec in signature.outputs],
        }
        if signature.metadata:
            found["parameters"] = dict(signature.metadata)
        return compact_json(200, found)

    async def _index(self, request: HttpRequest) -> HttpAnswer:
        asked = json_object(await request.body())
        found = await self._repository.index(asked.get("ready") is True)
        return compact_json(
            200, [{"name": one.name, "version": one.version, "state": one.state, "reason": one.reason} for one in found]
        )

    async def _config(self, request: HttpRequest, model: Served) -> HttpAnswer:
        return compact_json(200, as_json(config_of(self._models, model.name, model.version)))

    async def _load(self, name: str, request: HttpRequest) -> HttpAnswer:
        await self._repository.load(name, *load_parameters(_parameters(json_object(await request.body()))))
        return compact_json(200, {"name": name, "load": True})

    async def _unload(self, name: str, request: HttpRequest) -> HttpAnswer:
        check_unload_parameters(set(_parameters(json_object(await request.body()))))
        await self._repository.unload(name)
        return compact_json(200, {"name": name, "unload": True})

    # --- inference

    async def _submit(self, request: HttpRequest, model: Served, form: str) -> Answer:
        """Of a form that isn't streamed all answers together may take max_response_size."""
        body = await body_of(request)
        given = await tensor_requests.of_json(body, request.header(tensor_requests.LENGTH_HEADER))
        named = "versions" in request.segments
        model = tensor_models.find(self._models, model.name, model.version if named else "")  # replaced meanwhile?
        headers: Pairs = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in request.headers]
        deadline_s = math.inf
        if given:
            headers, deadline_s = tensor_requests.scheduled(model, given, headers, deadline_s, self._keys)
        answer = model.submit(
            [Input("", f"\0{form}{self._regions.option(body)}", body)],
            headers=headers,
            deadline_s=deadline_s,
            request_id=request.request_id,
            stream=form.endswith(";stream"),
            version_named=named,
        )
        request.when_gone(answer.cancel)
        return answer

    async def _infer(self, request: HttpRequest, model: Served) -> HttpAnswer:
        answer = await self._one(await self._submit(request, model, "json"), joined_json)
        return await compressed(request, answer)

    async def _infer_stream(self, request: HttpRequest, model: Served) -> HttpAnswer:
        return await self._events(await self._submit(request, model, "json;stream"))

    async def _generate(self, request: HttpRequest, model: Served) -> HttpAnswer:
        return await self._one(await self._submit(request, model, "generate"), joined_generate)

    async def _generate_stream(self, request: HttpRequest, model: Served) -> HttpAnswer:
        return await self._events(await self._submit(request, model, "generate;stream"))

    async def _one(self, answer: Answer, join: Callable[[list[Buffer]], bytes]) -> HttpAnswer:
        pieces = await answer.pieces()
        body = pieces[0] if len(pieces) == 1 else join(pieces)
        return HttpAnswer(200, [(name.encode(), value.encode("latin-1")) for name, value in answer.headers], body)

    async def _events(self, answer: Answer) -> HttpAnswer:
        """An event for each answer; a failure before the first has its status, a later one is an event."""
        pieces = answer.chunks()
        first = await anext(pieces)
        return HttpAnswer(200, (EVENTS,), _events(first, pieces))


async def _events(first: list[Buffer], rest: AsyncIterator[list[Buffer]]) -> AsyncIterator[list[bytes]]:
    try:
        yield [event(piece) for piece in first if len(piece)]
        async for pieces in rest:
            yield [event(piece) for piece in pieces if len(piece)]
    except ServeError as error:
        yield [event(refusal(error).body)]  # type: ignore[arg-type]
    finally:
        await rest.aclose()  # type: ignore[attr-defined]


def _parameters(body: dict[str, Any]) -> dict[str, Any]:
    found = body.get("parameters") or {}
    if not isinstance(found, dict):
        raise InvalidArgument(f"parameters is an object, not {found!r}")
    return found


def event(data: Buffer) -> bytes:
    """A server-sent event."""
    return b"data: " + bytes(data) + b"\n\n"


def tensor_metadata(spec: TensorSpec) -> dict[str, Any]:
    found: dict[str, Any] = {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}
    if spec.parameters:
        found["parameters"] = dict(spec.parameters)
    return found
