"""The HTTP management API: register, scale, describe, list, unregister (docs/management-api.md)."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Any

from ts_frontend.config.parameters import REGISTER, SCALE, CallParameter
from ts_frontend.errors import InvalidArgument
from ts_frontend.http.errors import MethodNotAllowed, ResourceNotFound
from ts_frontend.http.request import HttpAnswer, HttpRequest, Parameters, check_json_size, json_answer, query_pairs
from ts_frontend.models.adapters import Adapters
from ts_frontend.models.description import LIST_LIMIT
from ts_frontend.models.health import Health
from ts_frontend.models.manager import ModelManager, Outcome
from ts_frontend.models.registry import Registry

log = logging.getLogger(__name__)


def outcome_answer(outcome: Outcome) -> HttpAnswer:
    more = {"warnings": list(outcome.warnings)} if outcome.warnings else {}
    return json_answer(outcome.http_status, {"status": outcome.status, **more})


def page_asked(parameters: Parameters) -> tuple[int, int]:
    return _integer_or(parameters, "limit", LIST_LIMIT), _integer_or(parameters, "next_page_token", 0)


def _integer_or(parameters: Parameters, name: str, default: int) -> int:
    """Returns a paging parameter, or `default` if it isn't given or, as in TorchServe, isn't a number."""
    try:
        value = parameters.integer(name)
    except InvalidArgument:
        return default
    return default if value is None else value


async def register_parameters(request: HttpRequest) -> Parameters:
    if request.header(b"content-type").partition(";")[0].strip().lower() == "application/json":
        return _json_parameters(await request.body())
    return Parameters(query_pairs(request))


def _json_parameters(body: bytes) -> Parameters:
    check_json_size(body)
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


def given(table: Iterable[CallParameter], parameters: Parameters) -> dict[str, Any]:
    """The values of a call's parameters by name, or their defaults. Raises InvalidArgument."""
    rows = [row for row in table if row.http]
    found = {row.name: _value(row, parameters) for row in rows}
    for row in rows:
        if found[row.name] == 0 and row.zero_needs in found and not found[row.zero_needs]:
            log.warning("Parameter %s is 0: ignored, since no model loads in 0 seconds", row.name)
            found[row.name] = row.default
    return found


def _value(row: CallParameter, parameters: Parameters) -> Any:
    if row.required:
        return parameters.required(row.name)
    if row.kind is bool:
        return parameters.flag(row.name, bool(row.default))
    if row.kind is int:
        value = parameters.tuning(row.name) if row.tuning else parameters.integer(row.name)
        return row.default if value is None else value
    return parameters.text(row.name)


class HttpManagement:
    """`model_api` False: models can't be registered and unregistered (405)."""

    def __init__(self, manager: ModelManager, models: Registry, health: Health, *, model_api: bool = True) -> None:
        self._manager = manager
        self._adapters = Adapters(manager)
        self._models, self._health = models, health
        self._model_api = model_api

    def _check_model_api(self) -> None:
        if not self._model_api:
            raise MethodNotAllowed

    async def list_models(self, request: HttpRequest) -> HttpAnswer:
        parameters = Parameters(query_pairs(request))
        limit, token = page_asked(parameters)
        return json_answer(200, self._manager.list_models(limit=limit, next_page_token=token))

    async def register(self, request: HttpRequest) -> HttpAnswer:
        self._check_model_api()
        asked = given(REGISTER, await register_parameters(request))
        return outcome_answer(await self._manager.register(asked.pop("url"), **asked))

    async def scale(self, request: HttpRequest) -> HttpAnswer:
        parameters = Parameters(query_pairs(request))
        name, version = _model(request)
        version = version or parameters.text("model_version")
        return outcome_answer(await self._manager.scale(name, version=version, **given(SCALE, parameters)))

    async def describe(self, request: HttpRequest) -> HttpAnswer:
        name, version = _model(request)
        customized = Parameters(query_pairs(request)).flag("customized", False)
        return json_answer(200, await self._manager.describe(name, version=version, customized=customized))

    async def unregister(self, request: HttpRequest) -> HttpAnswer:
        self._check_model_api()
        name, version = _model(request)
        return outcome_answer(await self._manager.unregister(name, version=version))

    async def list_adapters(self, request: HttpRequest) -> HttpAnswer:
        found = self._adapters.listed(*_model(request))
        return json_answer(200, {"adapters": [{"name": name, "src": source} for name, source in found.items()]})

    async def load_adapter(self, request: HttpRequest) -> HttpAnswer:
        """The adapter's name and its folder have the names that SageMaker gives them."""
        asked = await register_parameters(request)
        return outcome_answer(
            await self._adapters.load(*_model(request), asked.required("name"), asked.required("src"))
        )

    async def unload_adapter(self, request: HttpRequest) -> HttpAnswer:
        return outcome_answer(await self._adapters.unload(*_model(request), request.path_params["adapter_name"]))

    async def set_default(self, request: HttpRequest) -> HttpAnswer:
        params = request.path_params
        return outcome_answer(await self._manager.set_default(params["model_name"], params["model_version"]))

    async def ready(self, request: HttpRequest) -> HttpAnswer:
        name = request.path_params["model_name"]
        return json_answer(200, {"name": name, "ready": self._health.serves(self._models.find(name))})


def _model(request: HttpRequest) -> tuple[str, str | None]:
    """/models/MODEL[/VERSION]"""
    name = request.path_params["model_name"]
    if not name:
        raise ResourceNotFound
    return name, request.path_params.get("model_version")
