"""KServe's V1 protocol over HTTP (docs/kserve.md).

Models written for other servers get tensors; TorchServe handlers get the body (`torchserve.py`).
"""

from __future__ import annotations

from ts.protocol.frames import Input
from ts_frontend.errors import ServeError, Unimplemented
from ts_frontend.http.errors import ErrorDialect, refusal
from ts_frontend.http.request import HttpAnswer, HttpRequest, compact_json
from ts_frontend.http.torchserve import HttpInference, json_of_model
from ts_frontend.models.health import Health
from ts_frontend.models.model import Model
from ts_frontend.models.registry import Registry
from ts_frontend.open_inference.requests import count_items, refused
from ts_frontend.scheduling.stream import chunks

#: The adapter of programs, the only one with explanations.
PROGRAM = "program"


class HttpKServe:
    """Calls of models for other servers, with KServe's errors; `torchserve` answers those of TorchServe handlers."""

    def __init__(self, models: Registry, health: Health, torchserve: HttpInference) -> None:
        self._models, self._health = models, health
        self._torchserve = torchserve

    async def alive(self, request: HttpRequest) -> HttpAnswer:
        return compact_json(200, {"status": "alive"})

    async def list_models(self, request: HttpRequest) -> HttpAnswer:
        return compact_json(200, {"models": sorted(model.name for model in self._models.defaults())})

    async def ready(self, request: HttpRequest) -> HttpAnswer:
        name = request.path_params["model_name"]
        ready = self._health.serves(self._models.find(name))
        return compact_json(200 if ready else 503, {"name": name, "ready": ready})

    async def predict(self, request: HttpRequest) -> HttpAnswer:
        model = self._models.find(request.path_params["model_name"])
        of_tensors = model.adapter or model.is_language_model
        return await (self._ask(model, "v1", request) if of_tensors else self._torchserve.predict_kserve(request))

    async def explain(self, request: HttpRequest) -> HttpAnswer:
        model = self._models.find(request.path_params["model_name"])
        if model.adapter not in ("", PROGRAM):
            return _refusal(Unimplemented(f"Model {model.name} gives no explanations"))
        if model.adapter:
            return await self._ask(model, "v1;explain", request)
        return await self._torchserve.explain_kserve(request)

    async def _ask(self, model: Model, form: str, request: HttpRequest) -> HttpAnswer:
        try:
            body = await request.body()
            await count_items(model, body)
            job = model.submit(
                [Input("", f"\0{form}", body)],
                headers=request.for_handler(),
                request_id=request.request_id,
                stream=False,
            )
            request.when_gone(job.cancel)
            found = [piece async for pieces in chunks(job) for piece in pieces if len(piece)]
            if len(found) != 1:
                raise refused(len(found))
        except ServeError as error:
            return _refusal(error)
        return json_of_model(found[0], job.headers)


def _refusal(error: ServeError) -> HttpAnswer:
    return refusal(error, ErrorDialect.OPEN_INFERENCE)
