"""HTTP paths of models' own: `@custom_handler` of MLServer's runtimes (docs/mlserver.md)."""

from __future__ import annotations

from functools import partial

from ts.protocol.frames import Input
from ts_frontend.errors import ServeError
from ts_frontend.http.app import MethodNotAllowed
from ts_frontend.http.open_inference import body_of, refusal
from ts_frontend.http.request import HttpAnswer, HttpRequest, Serve
from ts_frontend.http.torchserve import answer_of
from ts_frontend.models.model import Model
from ts_frontend.models.registry import Registry

#: Where no model's path begins: these are the server's, also for models that aren't there.
OWN = frozenset({"predictions", "explanations", "ping", "models", "v1", "workflows", "wfpredict", "metrics"})
#: In which a body came; it is decoded when the model gets it.
_ENCODING = b"content-encoding"


class HttpRoutes:
    """Paths of default versions only. Of two models with one path, it is the first one's."""

    def __init__(self, models: Registry) -> None:
        self._models = models

    def route(self, request: HttpRequest) -> Serve | None:
        if request.segments and request.segments[0] in OWN:
            return None
        found = [
            (model, one.method) for model in self._models.defaults() for one in model.routes if one.fits(request.path)
        ]
        if not found:
            return None
        model = next((model for model, method in found if method == request.method), None)
        return _refused if model is None else partial(_asked, model)


async def _refused(request: HttpRequest) -> HttpAnswer:
    return refusal(MethodNotAllowed())


async def _asked(model: Model, request: HttpRequest) -> HttpAnswer:
    headers = [
        (name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers if name != _ENCODING
    ]
    line = {":method": request.method, ":path": request.path, ":query": request.query.decode("latin-1")}
    try:
        job = model.submit(
            [Input("", "\0route", await body_of(request))],
            headers=[*headers, *line.items()],
            request_id=request.request_id,
            stream=True,
            alone=True,
            counted=False,
        )
        request.when_gone(job.cancel)
        return await answer_of(job)
    except ServeError as error:
        return refusal(error)
