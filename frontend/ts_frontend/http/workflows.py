"""Workflows over HTTP: predictions on the inference listener, the rest on the management one (docs/workflows.md)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from ts.protocol import forms
from ts.protocol.frames import Input, Pairs
from ts_frontend.config.parameters import REGISTER_WORKFLOW
from ts_frontend.errors import ClientGone, HandlerFailed, ServeError
from ts_frontend.http.errors import MethodNotAllowed
from ts_frontend.http.management import given, outcome_answer, page_asked, register_parameters
from ts_frontend.http.request import JSON, Header, HttpAnswer, HttpRequest, Parameters, json_answer, query_pairs
from ts_frontend.http.torchserve import check_form, handler_headers
from ts_frontend.tasks import owned
from ts_frontend.workflows.manager import WorkflowManager
from ts_frontend.workflows.workflow import Reply

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
    return json_answer(200, {name: _value(name, body) for name, body in bodies.items()})


def _value(name: str, body: bytes) -> Any:
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
