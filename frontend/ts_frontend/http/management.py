"""The door of the HTTP management API: register, scale, describe, list, unregister (docs/management-api.md)."""

from __future__ import annotations

import json

from ts_frontend.errors import InvalidArgument
from ts_frontend.http.errors import MethodNotAllowed, ResourceNotFound
from ts_frontend.http.request import HttpAnswer, HttpRequest, Parameters, json_answer, query_pairs
from ts_frontend.models.description import LIST_LIMIT
from ts_frontend.models.manager import ModelManager, Outcome
from ts_frontend.models.registry import Registry


def outcome_answer(outcome: Outcome) -> HttpAnswer:
    return json_answer(outcome.http_status, {"status": outcome.status})


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


class HttpManagement:
    """`model_api` False: there are no methods to register and unregister."""

    def __init__(self, administration: ModelManager, models: Registry, *, model_api: bool = True) -> None:
        self._administration = administration
        self._models = models
        self._model_api = model_api

    def _check_model_api(self) -> None:
        if not self._model_api:
            raise MethodNotAllowed

    async def list_models(self, request: HttpRequest) -> HttpAnswer:
        parameters = Parameters(query_pairs(request))
        limit, token = page_asked(parameters)
        return json_answer(200, self._administration.list_models(limit=limit, next_page_token=token))

    async def register(self, request: HttpRequest) -> HttpAnswer:
        self._check_model_api()
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

    async def scale(self, request: HttpRequest) -> HttpAnswer:
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

    async def describe(self, request: HttpRequest) -> HttpAnswer:
        name, version = _model(request)
        customized = Parameters(query_pairs(request)).flag("customized", False)
        return json_answer(200, await self._administration.describe(name, version=version, customized=customized))

    async def unregister(self, request: HttpRequest) -> HttpAnswer:
        self._check_model_api()
        name, version = _model(request)
        return outcome_answer(await self._administration.unregister(name, version=version))

    async def set_default(self, request: HttpRequest) -> HttpAnswer:
        params = request.path_params
        return outcome_answer(await self._administration.set_default(params["model_name"], params["model_version"]))

    async def ready(self, request: HttpRequest) -> HttpAnswer:
        name = request.path_params["model_name"]
        return json_answer(200, {"name": name, "ready": self._models.find(name).ready})


def _model(request: HttpRequest) -> tuple[str, str | None]:
    """/models/MODEL[/VERSION]"""
    name = request.path_params["model_name"]
    if not name:
        raise ResourceNotFound
    return name, request.path_params.get("model_version")
