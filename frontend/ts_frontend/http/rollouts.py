"""The rollouts of new versions over HTTP: /models/MODEL/rollout (docs/rollouts.md)."""

from __future__ import annotations

from ts_frontend.http.request import HttpAnswer, HttpRequest, json_answer
from ts_frontend.rollouts.manager import Rollouts
from ts_frontend.rollouts.rule import read_settings


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
