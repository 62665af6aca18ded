"""HTTP paths that models declare: `@custom_handler` of MLServer's runtimes (docs/mlserver.md)."""

from __future__ import annotations

from functools import partial

from ts.protocol.frames import Input
from ts_frontend.config.keys import KeyKind
from ts_frontend.http.errors import ErrorDialect
from ts_frontend.http.open_inference import body_of
from ts_frontend.http.request import HttpAnswer, HttpRequest
from ts_frontend.http.routing import Effect, Match
from ts_frontend.http.torchserve import answer_of
from ts_frontend.models.model import ROUTE_MARK, Model
from ts_frontend.models.registry import Registry

#: Prefixes of the server's own paths; a model can't declare a path below them.
RESERVED = frozenset({"predictions", "explanations", "ping", "models", "v1", "workflows", "wfpredict", "metrics"})
#: Headers about the body's encoding; the model gets the body decoded.
_ENCODING = b"content-encoding"
#: The keys for models' paths: those for inference.
_MATCH = Match(Effect.RUNS, False, False, ErrorDialect.OPEN_INFERENCE, (KeyKind.INFERENCE,))


class HttpCustomHandlers:
    """The paths of models' default versions. If two models declare the same path, the first one has it."""

    def __init__(self, models: Registry) -> None:
        self._models = models

    def find(self, method: str, path: str) -> Match | None:
        if path.partition("/")[2].partition("/")[0] in RESERVED:
            return None
        found = {
            one.method: model
            for model in reversed(self._models.defaults())
            for one in reversed(model.routes)
            if one.fits(path)
        }
        if method in found:
            return _MATCH._replace(serve=partial(_asked, found[method]))
        return _MATCH._replace(allowed=sorted(found)) if found else None


async def _asked(model: Model, request: HttpRequest) -> HttpAnswer:
    headers = [
        (name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers if name != _ENCODING
    ]
    line = {":method": request.method, ":path": request.path, ":query": request.query.decode("latin-1")}
    job = model.submit(
        [Input("", ROUTE_MARK, await body_of(request))],
        headers=[*headers, *line.items()],
        request_id=request.request_id,
        stream=True,
        alone=True,
        counted=False,
    )
    request.when_gone(job.cancel)
    return await answer_of(job)
