"""Azure ML's paths: /, /score and /swagger.json, with the ids of a request both ways (docs/platforms.md).

The model's handler answers /score and /swagger.json, since only it knows what the script's `run` takes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from ts.protocol.frames import Input
from ts_frontend.errors import InvalidArgument, NoWorker, ServeError
from ts_frontend.http.errors import ErrorDialect, HttpError, ResourceNotFound, refusal
from ts_frontend.http.request import Header, HttpAnswer, HttpRequest
from ts_frontend.http.torchserve import answer_of
from ts_frontend.models.health import Health
from ts_frontend.models.registry import Registry

#: The built-in handler that answers /swagger.json.
SCORE_SCRIPT: Final = "score_script"
ID_CHARACTERS_MAX: Final = 100
REQUEST_ID, CLIENT_ID, OLD_ID = b"x-request-id", b"x-ms-client-request-id", b"x-ms-request-id"
#: A trace's id of other services, which is only handed back.
TRACE_ID: Final = b"traceid"


class IdTooLong(HttpError):
    """A request's id in a header of Azure ML's is too long."""

    remedy = "Send a shorter id."
    http_status, type_name = 431, "RequestHeaderFieldsTooLargeException"

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} has more than {ID_CHARACTERS_MAX} characters")


class HttpAzureML:
    """The paths of the only model. `at_startup` names the models that were loaded when the server started; `version`:
    the value of the header x-ms-server-version, "" for none."""

    def __init__(
        self, models: Registry, health: Health, at_startup: Callable[[], Sequence[str]], version: str = ""
    ) -> None:
        self._models, self._health, self._at_startup = models, health, at_startup
        self._version = version

    async def healthy(self, request: HttpRequest) -> HttpAnswer:
        return await self._identified(request, self._healthy)

    async def score(self, request: HttpRequest) -> HttpAnswer:
        return await self._identified(request, self._score)

    async def swagger(self, request: HttpRequest) -> HttpAnswer:
        return await self._identified(request, self._swagger)

    async def _healthy(self, request: HttpRequest) -> HttpAnswer:
        models = [self._models.find(name) for name in self._at_startup()]
        if not models or not all(map(self._health.serves, models)):
            raise NoWorker("The model isn't ready")
        return HttpAnswer(200, ((b"content-type", b"text/plain"),), b"Healthy")

    async def _score(self, request: HttpRequest) -> HttpAnswer:
        return await self._ask(request, self._name(), "/score")

    async def _swagger(self, request: HttpRequest) -> HttpAnswer:
        name = self._name()
        if self._models.find(name).archive.handler != SCORE_SCRIPT:
            raise ResourceNotFound(f"Model {name} has no description: it is no script with init and run")
        return await self._ask(request, name, "/swagger.json")

    def _name(self) -> str:
        names = set(self._at_startup())
        if len(names) != 1:
            raise InvalidArgument(f"This path is that of an only model, and the server started with {len(names)}")
        return names.pop()

    async def _ask(self, request: HttpRequest, name: str, path: str) -> HttpAnswer:
        """The model's answer. Its handler gets the body as it came, and method, path and query as headers."""
        line = [(":method", request.method), (":path", path), (":query", request.query.decode("latin-1"))]
        job = self._models.find(name).submit(
            [Input("body", "", await request.body())],
            headers=request.for_handler(line),
            request_id=request.request_id,
            stream=True,
            counted=path == "/score",
        )
        request.when_gone(job.cancel)
        return await answer_of(job)

    # --- headers

    async def _identified(
        self, request: HttpRequest, serve: Callable[[HttpRequest], Awaitable[HttpAnswer]]
    ) -> HttpAnswer:
        ids: Sequence[Header] = ()
        try:
            ids = _ids(request)
            answer = await serve(request)
        except ServeError as error:
            answer = refusal(error, ErrorDialect.AZUREML, told=request.told)
        more = [*ids, *((TRACE_ID, value) for value in request.values(TRACE_ID)[-1:])]
        if self._version:
            more.append((b"x-ms-server-version", self._version.encode("latin-1", "replace")))
        own = [pair for pair in answer.headers if pair[0] not in dict(more)]
        return answer._replace(headers=(*own, *more))


def _ids(request: HttpRequest) -> list[Header]:
    """The headers with the ids of the client: each of its two headers stands in for the other, and the request's own id
    for both. Raises IdTooLong."""
    for name in (REQUEST_ID, OLD_ID, CLIENT_ID):
        if len(request.header(name)) > ID_CHARACTERS_MAX:
            raise IdTooLong(name.decode())
    old, client = (request.by_name.get(name, b"") for name in (OLD_ID, CLIENT_ID))
    found = [(OLD_ID, old or client or request.request_id.encode())]
    return [*found, (CLIENT_ID, client or old)] if client or old else found
