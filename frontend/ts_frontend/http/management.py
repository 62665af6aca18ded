"""The HTTP management API: models (docs/management-api.md), the rollouts of their new versions (docs/rollouts.md), and
workflows, whose predictions are on the inference listener (docs/workflows.md)."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from ts.protocol import forms
from ts.protocol.frames import Input, Pairs
from ts_frontend.config.parameters import REGISTER, REGISTER_WORKFLOW, SCALE, CallParameter
from ts_frontend.errors import ClientGone, HandlerFailed, InvalidArgument, ServeError
from ts_frontend.http.errors import MethodNotAllowed, ResourceNotFound
from ts_frontend.http.request import (
    JSON,
    Header,
    HttpAnswer,
    HttpRequest,
    Parameters,
    check_json_size,
    json_answer,
    query_pairs,
)
from ts_frontend.http.torchserve import check_form, handler_headers
from ts_frontend.models.adapters import Adapters
from ts_frontend.models.health import Health
from ts_frontend.models.manager import LIST_LIMIT, ModelManager, Outcome
from ts_frontend.models.model import Registry
from ts_frontend.rollouts.manager import Rollouts
from ts_frontend.rollouts.rule import read_settings
from ts_frontend.tasks import owned
from ts_frontend.workflows.manager import Reply, WorkflowManager

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


class HttpRollouts:
    """The calls of the management API; the answer to each is the rollout as it is then."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    async def status(self, request: HttpRequest) -> HttpAnswer:
        return json_answer(200, self._rollouts.status(request.path_params["model_name"]))

    async def start(self, request: HttpRequest) -> HttpAnswer:
        given = read_settings(await request.body())
        return json_answer(200, self._rollouts.start(request.path_params["model_name"], given))

    async def act(self, request: HttpRequest) -> HttpAnswer:
        params = request.path_params
        return json_answer(200, self._rollouts.act(params["model_name"], params["action"]))


#: Answers of several nodes with more bytes in total are parsed as JSON in a thread.
JSON_AT_ONCE_BYTES = 65_536


class UnusableAnswer(ServeError):
    """The answers of the last nodes can't be combined into one."""

    remedy = "Fix the workflow's last functions: each must answer with JSON or text."


class HttpWorkflows:
    """`model_api` False: workflows, like models, can't be registered and unregistered."""

    def __init__(self, workflows: WorkflowManager, *, model_api: bool) -> None:
        self._workflows = workflows
        self._model_api = model_api

    def _check_model_api(self) -> None:
        if not self._model_api:
            raise MethodNotAllowed

    # --- management

    async def list_workflows(self, request: HttpRequest) -> HttpAnswer:
        limit, token = page_asked(Parameters(query_pairs(request)))
        return json_answer(200, self._workflows.list_workflows(limit=limit, next_page_token=token))

    async def register(self, request: HttpRequest) -> HttpAnswer:
        self._check_model_api()
        asked = given(REGISTER_WORKFLOW, await register_parameters(request))
        return outcome_answer(await self._workflows.register(asked.pop("url"), **asked))

    async def describe(self, request: HttpRequest) -> HttpAnswer:
        return json_answer(200, self._workflows.describe(request.path_params["workflow_name"]))

    async def unregister(self, request: HttpRequest) -> HttpAnswer:
        self._check_model_api()
        outcome = await self._workflows.unregister(request.path_params["workflow_name"])
        return outcome_answer(outcome)

    # --- predictions

    async def predict(self, request: HttpRequest) -> HttpAnswer:
        workflow = self._workflows.find(request.path_params["workflow_name"])
        body = await request.body()
        content_type = request.header(b"content-type")
        if content_type and forms.is_form(content_type):
            check_form(content_type, body)
        inputs = [Input("body", content_type, body)]
        run = owned(workflow.predict(inputs, headers=request.for_handler(), request_id=request.request_id))
        request.when_gone(partial(_cancel, run))
        try:
            await asyncio.wait({run})
            if run.cancelled():
                raise ClientGone
            return await _answer(run.result())
        finally:
            run.cancel()
            del run  # breaks the cycle of its exception, this frame and the task


def _cancel(run: asyncio.Task[Mapping[str, Reply]]) -> None:
    run.cancel()


async def _answer(leaves: Mapping[str, Reply]) -> HttpAnswer:
    if len(leaves) == 1:
        (reply,) = leaves.values()
        if reply.status < 200:
            raise HandlerFailed(500, f"The handler set status {reply.status}, which can't end an answer")
        return HttpAnswer(reply.status, _headers(reply.headers), reply.body)
    bodies = {name: bytes(reply.body) for name, reply in leaves.items()}
    if sum(map(len, bodies.values())) <= JSON_AT_ONCE_BYTES:
        return _joined(bodies)
    return await asyncio.to_thread(_joined, bodies)


def _headers(pairs: Pairs) -> list[Header]:
    """Returns the headers that the handler set, with JSON as the content type unless it set another."""
    own = handler_headers(pairs)
    return own if any(name == JSON[0] for name, _ in own) else [JSON, *own]


def _joined(bodies: Mapping[str, bytes]) -> HttpAnswer:
    return json_answer(200, {name: _member(name, body) for name, body in bodies.items()})


def _member(name: str, body: bytes) -> Any:
    try:
        text = body.decode()
    except UnicodeDecodeError:
        raise UnusableAnswer(
            f"The answer of node {name} is neither JSON nor UTF-8 text: it can't be a member of a JSON object"
        ) from None
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return text


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
