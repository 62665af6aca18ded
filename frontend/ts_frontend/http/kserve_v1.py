"""KServe's V1 protocol over HTTP (docs/kserve.md).

Models written for other servers are asked with tensors; TorchServe's handlers get the body, by `http_inference.py`.
"""

from __future__ import annotations

from functools import partial

from ts.protocol.frames import Input
from ts_frontend.errors import ModelNotFound, ServeError, Unimplemented
from ts_frontend.http.open_inference import refusal
from ts_frontend.http.request import HttpAnswer, HttpRequest, Serve, compact_json
from ts_frontend.models.model import Model
from ts_frontend.models.registry import Registry
from ts_frontend.open_inference.requests import refused

#: The adapter of programs; the others have no explanations.
PROGRAM = "program"


class HttpKServe:
    """`route` has the paths that only KServe's own servers have on this port: `/`, `/v1/models`, a model's readiness;
    `predicting` the calls of models that aren't TorchServe's."""

    def __init__(self, models: Registry) -> None:
        self._models = models

    def route(self, request: HttpRequest) -> Serve | None:
        method = request.method
        match request.segments:
            case [] | [""] if method in ("GET", "HEAD"):
                return self._alive
            case ["v1", "models"] if method in ("GET", "HEAD"):
                return self._list
            case ["v1", "models", name] if method in ("GET", "HEAD"):
                return partial(self._ready, name)
            case ["v1", "models", call] if call.endswith((":predict", ":explain")):
                return self._missing(call.rpartition(":")[0])
        return None

    def predicting(self, request: HttpRequest) -> Serve | None:
        """For `/v1/models/NAME:VERB`."""
        name, _, verb = request.segments[2].rpartition(":")
        try:
            model = self._models.find(name)
        except ModelNotFound:
            return None
        adapter = model.adapter
        if verb == "explain" and adapter not in ("", PROGRAM):
            return partial(_answered, refusal(Unimplemented(f"Model {name} gives no explanations")))
        if adapter:
            return partial(self._predict, model, "v1;explain" if verb == "explain" else "v1")
        return None

    def _missing(self, name: str) -> Serve | None:
        """KServe's form of the refusal for a model that isn't there."""
        try:
            self._models.find(name)
        except ModelNotFound as error:
            return partial(_answered, refusal(error))
        return None

    async def _alive(self, request: HttpRequest) -> HttpAnswer:
        return compact_json(200, {"status": "alive"})

    async def _list(self, request: HttpRequest) -> HttpAnswer:
        return compact_json(200, {"models": sorted(model.name for model in self._models.defaults())})

    async def _ready(self, name: str, request: HttpRequest) -> HttpAnswer:
        try:
            ready = self._models.find(name).ready
        except ModelNotFound as error:
            return refusal(error)
        return compact_json(200 if ready else 503, {"name": name, "ready": ready})

    async def _predict(self, model: Model, form: str, request: HttpRequest) -> HttpAnswer:
        try:
            job = model.submit(
                [Input("", f"\0{form}", await request.body())],
                headers=[(key.decode("latin-1"), value.decode("latin-1")) for key, value in request.headers],
                request_id=request.request_id,
                stream=False,
            )
            request.when_gone(job.cancel)
            found = [piece async for pieces in job.chunks() for piece in pieces if len(piece)]
            if len(found) != 1:
                raise refused(len(found))
        except ServeError as error:
            return refusal(error)
        return HttpAnswer(200, [(name.encode(), value.encode("latin-1")) for name, value in job.headers], found[0])


async def _answered(answer: HttpAnswer, request: HttpRequest) -> HttpAnswer:
    return answer
