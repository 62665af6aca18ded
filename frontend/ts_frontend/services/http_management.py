"""The door of the HTTP management API: register, scale, describe, list, unregister (docs/management-api.md)."""

from __future__ import annotations

from typing import Protocol

from ts_frontend.ingress.http import MethodNotAllowed, ResourceNotFound
from ts_frontend.ingress.http_call import HttpAnswer, HttpRequest, Serve
from ts_frontend.services.actions import Administration
from ts_frontend.services.http_answers import Parameters, json_answer, query_pairs
from ts_frontend.services.http_managing import admitted, outcome_answer, page_asked, register_parameters


class Served(Protocol):
    @property
    def ready(self) -> bool: ...


class Models(Protocol):
    """Where models are found by name (`ts_frontend.models.registry.Registry`)."""

    def find(self, name: str, version: str | None = None) -> Served: ...


class HttpManagement:
    """`model_api` False: there are no methods to register and unregister."""

    def __init__(self, administration: Administration, models: Models, *, model_api: bool = True) -> None:
        self._administration = administration
        self._models = models
        self._switched_off = () if model_api else (self._register, self._unregister)

    def route(self, request: HttpRequest) -> Serve | None:
        return admitted(self._find(request.method, request.segments), self._switched_off)

    def _find(self, method: str, segments: list[str]) -> Serve | None:
        match method, segments:
            case "GET", ["models"]:
                return self._list
            case "POST", ["models"]:
                return self._register
            case "GET", ["models", _] | ["models", _, _]:
                return self._describe
            case "PUT", ["models", _] | ["models", _, _]:
                return self._scale
            case "DELETE", ["models", _] | ["models", _, _]:
                return self._unregister
            case "PUT", ["models", _, _, "set-default"]:
                return self._set_default
            case "GET", ["v1", "models", _]:
                return self._ready
            case _, ["models"] | ["models", _] | ["models", _, _] | ["models", _, _, "set-default"]:
                raise MethodNotAllowed
            case _, ["v1", "models", _]:
                raise MethodNotAllowed
        return None

    # --- calls

    async def _list(self, request: HttpRequest) -> HttpAnswer:
        parameters = Parameters(query_pairs(request))
        limit, token = page_asked(parameters)
        return json_answer(200, self._administration.list_models(limit=limit, next_page_token=token))

    async def _register(self, request: HttpRequest) -> HttpAnswer:
        parameters = await register_parameters(request)
        workers = parameters.integer("initial_workers")
        outcome = await self._administration.register(
            parameters.required("url"),
            model_name=parameters.text("model_name"),
            handler=parameters.text("handler"),
            runtime=parameters.text("runtime"),
            batch_size=parameters.tuning("batch_size"),
            max_batch_delay=parameters.tuning("max_batch_delay"),
            initial_workers=workers,
            response_timeout=parameters.tuning("response_timeout"),
            startup_timeout=parameters.startup_timeout(starts=bool(workers)),
            synchronous=parameters.flag("synchronous", True),
            s3_sse_kms=parameters.flag("s3_sse_kms", False),
        )
        return outcome_answer(outcome)

    async def _scale(self, request: HttpRequest) -> HttpAnswer:
        parameters = Parameters(query_pairs(request))
        name, version = _model(request)
        minimum = parameters.integer("min_worker")
        outcome = await self._administration.scale(
            name,
            version=version or parameters.text("model_version"),
            min_worker=1 if minimum is None else minimum,
            max_worker=parameters.integer("max_worker"),
            synchronous=parameters.flag("synchronous", False),
        )
        return outcome_answer(outcome)

    async def _describe(self, request: HttpRequest) -> HttpAnswer:
        name, version = _model(request)
        customized = Parameters(query_pairs(request)).flag("customized", False)
        return json_answer(200, await self._administration.describe(name, version=version, customized=customized))

    async def _unregister(self, request: HttpRequest) -> HttpAnswer:
        name, version = _model(request)
        return outcome_answer(await self._administration.unregister(name, version=version))

    async def _set_default(self, request: HttpRequest) -> HttpAnswer:
        _, name, version, _ = request.segments
        return outcome_answer(await self._administration.set_default(name, version))

    async def _ready(self, request: HttpRequest) -> HttpAnswer:
        name = request.segments[2]
        return json_answer(200, {"name": name, "ready": self._models.find(name).ready})


def _model(request: HttpRequest) -> tuple[str, str | None]:
    """/models/MODEL[/VERSION]"""
    _, name, *version = request.segments
    if not name:
        raise ResourceNotFound
    return name, version[0] if version else None
