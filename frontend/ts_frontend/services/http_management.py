"""The door of the HTTP management API: register, scale, describe, list, unregister (docs/management-api.md)."""

from __future__ import annotations

import json
from typing import Any, Protocol

from ts_frontend.errors import InvalidArgument
from ts_frontend.ingress.http import MethodNotAllowed, ResourceNotFound
from ts_frontend.ingress.http_call import HttpAnswer, HttpRequest, Serve
from ts_frontend.services.http_answers import Parameters, json_answer, query_pairs
from ts_frontend.services.origins import Origins

LIST_LIMIT = 100


class Outcome(Protocol):
    @property
    def http_status(self) -> int: ...
    @property
    def status(self) -> str: ...


class Administration(Protocol):
    """What can be done to models (`ts_frontend.models.administration.Administration`)."""

    async def register(
        self,
        url: str,
        *,
        model_name: str | None,
        handler: str | None,
        runtime: str | None,
        batch_size: int | None,
        max_batch_delay: int | None,
        initial_workers: int | None,
        response_timeout: int | None,
        startup_timeout: int | None,
        synchronous: bool,
    ) -> Outcome: ...

    async def scale(
        self, name: str, *, version: str | None, min_worker: int, max_worker: int | None, synchronous: bool
    ) -> Outcome: ...

    async def unregister(self, name: str, *, version: str | None) -> Outcome: ...
    async def set_default(self, name: str, version: str) -> Outcome: ...
    def list_models(self, *, limit: int, next_page_token: int) -> dict[str, Any]: ...
    async def describe(self, name: str, *, version: str | None, customized: bool) -> list[dict[str, Any]]: ...


class Served(Protocol):
    @property
    def ready(self) -> bool: ...


class Models(Protocol):
    """Where models are found by name (`ts_frontend.models.registry.Registry`)."""

    def find(self, name: str, version: str | None = None) -> Served: ...


class HttpManagement:
    """`model_api` False: there are no methods to register and unregister."""

    def __init__(
        self, administration: Administration, models: Models, origins: Origins, *, model_api: bool = True
    ) -> None:
        self._administration = administration
        self._models = models
        self._origins = origins
        self._switched_off = () if model_api else (self._register, self._unregister)

    def route(self, request: HttpRequest) -> Serve | None:
        serve = self._find(request.method, request.segments)
        if serve is not None:
            self._origins.check(request)
            if serve in self._switched_off:
                raise MethodNotAllowed
        return serve

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
        outcome = await self._administration.register(
            parameters.required("url"),
            model_name=parameters.text("model_name"),
            handler=parameters.text("handler"),
            runtime=parameters.text("runtime"),
            batch_size=parameters.integer("batch_size"),
            max_batch_delay=parameters.integer("max_batch_delay"),
            initial_workers=parameters.integer("initial_workers"),
            response_timeout=parameters.integer("response_timeout"),
            startup_timeout=parameters.integer("startup_timeout"),
            synchronous=parameters.flag("synchronous", True),
        )
        return _outcome(outcome)

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
        return _outcome(outcome)

    async def _describe(self, request: HttpRequest) -> HttpAnswer:
        name, version = _model(request)
        customized = Parameters(query_pairs(request)).flag("customized", False)
        return json_answer(200, await self._administration.describe(name, version=version, customized=customized))

    async def _unregister(self, request: HttpRequest) -> HttpAnswer:
        name, version = _model(request)
        return _outcome(await self._administration.unregister(name, version=version))

    async def _set_default(self, request: HttpRequest) -> HttpAnswer:
        _, name, version, _ = request.segments
        return _outcome(await self._administration.set_default(name, version))

    async def _ready(self, request: HttpRequest) -> HttpAnswer:
        name = request.segments[2]
        return json_answer(200, {"name": name, "ready": self._models.find(name).ready})


def _outcome(outcome: Outcome) -> HttpAnswer:
    return json_answer(outcome.http_status, {"status": outcome.status})


def _model(request: HttpRequest) -> tuple[str, str | None]:
    """/models/MODEL[/VERSION]"""
    _, name, *version = request.segments
    if not name:
        raise ResourceNotFound
    return name, version[0] if version else None


def page_asked(parameters: Parameters) -> tuple[int, int]:
    """`limit` and `next_page_token`."""
    return _integer_or(parameters, "limit", LIST_LIMIT), _integer_or(parameters, "next_page_token", 0)


def _integer_or(parameters: Parameters, name: str, default: int) -> int:
    """Paging forgives what isn't a number, as TorchServe does."""
    try:
        value = parameters.integer(name)
    except InvalidArgument:
        return default
    return default if value is None else value


async def register_parameters(request: HttpRequest) -> Parameters:
    """Those of the query, or of a JSON body."""
    if request.header(b"content-type").partition(";")[0].strip().lower() == "application/json":
        return _json_parameters(await request.body())
    return Parameters(query_pairs(request))


def _json_parameters(body: bytes) -> Parameters:
    """The members of a JSON object, as parameters of those names."""
    try:
        members = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"The request's body is not JSON: {error}") from None
    if not isinstance(members, dict):
        raise InvalidArgument(f"The request's body must be a JSON object, not {type(members).__name__}")
    return Parameters([(name, _text(name, value)) for name, value in members.items() if value is not None])


def _text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) or (isinstance(value, str) and value.isprintable()):
        return str(value)
    raise InvalidArgument(f"Parameter {name} must be a text, a whole number, true or false")
