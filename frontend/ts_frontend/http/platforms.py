"""The paths of hosting platforms (docs/platforms.md): SageMaker's and Vertex AI's `/invocations` with sessions,
Vertex's prediction, and Triton's binary form in both; Azure ML's /, /score and /swagger.json, with the ids of a request
both ways; MLflow's /version. The other calls of these platforms are the server's usual ones."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime, timedelta
from importlib import metadata
from itertools import takewhile
from typing import Any, Final

import ts.version
from ts.protocol.frames import Input
from ts_frontend.errors import Code, InvalidArgument, ModelNotFound, NoWorker, ServeError
from ts_frontend.http.errors import ErrorDialect, HttpError, ResourceNotFound, refusal
from ts_frontend.http.management import HttpManagement
from ts_frontend.http.open_inference import HttpKServe, HttpOpenInference, submitted
from ts_frontend.http.request import JSON, Header, HttpAnswer, HttpRequest
from ts_frontend.http.routing import Effect, RouteTable
from ts_frontend.http.torchserve import HttpInference, answer_of
from ts_frontend.models.health import Health
from ts_frontend.models.model import Registry
from ts_frontend.open_inference.requests import LENGTH_HEADER

SESSION_ID = b"x-amzn-sagemaker-session-id"
NEW_SESSION, CLOSED_SESSION = b"x-amzn-sagemaker-new-session-id", b"x-amzn-sagemaker-closed-session-id"
REDIRECT = b"x-vertex-ai-triton-redirect"
#: Open sessions of one server; each costs some 200 bytes.
SESSIONS_MAX = 100_000
#: The largest body that may be a call for a session.
_CALL_BYTES_MAX = 256
#: Triton's content type for tensors after a JSON header of that size.
_BINARY = re.compile(r"application/vnd\.(?:sagemaker|vertex-ai)-triton\.binary\+json\s*;\s*json-header-size=(\d{1,10})")
_TEXT: Header = (b"content-type", b"text/plain; charset=utf-8")


class SessionsFull(ServeError):
    remedy = "Close sessions, or lower `session_expires_s`."
    code, http_status, type_name = Code.RESOURCE_EXHAUSTED, 424, "FailedDependencyException"


class Sessions:
    """SageMaker's sessions. Each ends `expires_s` after its begin, or when it is closed."""

    def __init__(self, expires_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self._expires_s, self._now_s = expires_s, now_s
        self._ends: dict[str, float] = {}  # in the order of their ends

    def begin(self) -> HttpAnswer:
        now_s = self._now_s()
        for one in [one for one, _ in takewhile(lambda item: item[1] <= now_s, self._ends.items())]:
            del self._ends[one]
        if len(self._ends) >= SESSIONS_MAX:
            raise SessionsFull(f"{SESSIONS_MAX} sessions are open, the most that are possible")
        session = str(uuid.uuid4())
        self._ends[session] = now_s + self._expires_s
        end = datetime.now(UTC) + timedelta(seconds=self._expires_s)
        value = f"{session}; Expires={end:%Y-%m-%dT%H:%M:%SZ}"
        return HttpAnswer(200, (_TEXT, (NEW_SESSION, value.encode())), f"Session {session} created".encode())

    def check(self, session: str) -> None:
        """Raises InvalidArgument for a session that isn't open."""
        if self._ends.get(session, 0.0) <= self._now_s():
            self._ends.pop(session, None)
            raise InvalidArgument(f"Bad request: session not found: {session[:80]}")

    def close(self, session: str) -> HttpAnswer:
        self.check(session)
        del self._ends[session]
        return HttpAnswer(200, (_TEXT, (CLOSED_SESSION, session.encode())), f"Session {session} closed".encode())


@dataclass(eq=False)
class HttpPlatforms:
    """`sessions` None: there are none. `generates`: a model of Triton's format generates texts at /invocations; else it
    infers from tensors."""

    models: Registry
    inference: HttpInference
    tensors: HttpOpenInference
    kserve: HttpKServe
    management: HttpManagement
    _: KW_ONLY
    sessions: Sessions | None
    generates: bool
    #: The routes of the listener, for Vertex's redirect.
    routes: RouteTable | None = field(default=None, init=False)

    # --- SageMaker

    async def invocations(self, request: HttpRequest) -> HttpAnswer:
        """Predicts with the only model, or with the one that the query names."""
        name = self._only_model()
        if name is not None and self._is_tritons(name):
            return await self._infer(request, name)
        body = await request.body()
        if self.sessions is not None:
            session = request.header(SESSION_ID)
            asked = _session_call(body)
            if asked == "NEW_SESSION":
                return self.sessions.begin()
            if asked == "CLOSE":
                return self.sessions.close(session)
            if session:
                self.sessions.check(session)
        return await self.inference.invoked(request, body)

    async def list_adapters(self, request: HttpRequest) -> HttpAnswer:
        return await self.management.list_adapters(self._of_only_model(request))

    async def load_adapter(self, request: HttpRequest) -> HttpAnswer:
        return await self.management.load_adapter(self._of_only_model(request))

    async def unload_adapter(self, request: HttpRequest) -> HttpAnswer:
        return await self.management.unload_adapter(self._of_only_model(request))

    def _of_only_model(self, request: HttpRequest) -> HttpRequest:
        name = self._only_model()
        if name is None:
            raise ModelNotFound("the only model; there are several, or none")
        request.path_params = {**request.path_params, "model_name": name}
        return request

    async def invoke(self, request: HttpRequest) -> HttpAnswer:
        """Predicts with one of several models."""
        name = request.path_params["model_name"]
        return await (self._infer(request, name) if self._is_tritons(name) else self.inference.with_query(request))

    def _only_model(self) -> str | None:
        """The only model of the start; of a model repository, the only one that is served."""
        names = {model.name for model in self.models.defaults()}
        return self.inference.only_model() or (names.pop() if len(names) == 1 else None)

    def _is_tritons(self, name: str) -> bool:
        return self.models.find(name).adapter == "triton"

    async def _infer(self, request: HttpRequest, name: str) -> HttpAnswer:
        request.path_params = {"model_name": name}
        binary = _BINARY.fullmatch(request.header(b"content-type").strip())
        if binary is not None:
            length = (LENGTH_HEADER, binary[1].encode())
            request.headers, request.by_name = [*request.headers, length], {**request.by_name, LENGTH_HEADER: length[1]}
        elif self.generates:
            return await self.tensors.generate(request)
        answer = await self.tensors.infer(request)
        return answer if binary is None else _binary(answer, binary[0])

    # --- Vertex AI

    async def predict(self, request: HttpRequest) -> HttpAnswer:
        """Predicts with the only model: `{"instances": …}` or, with a model of Triton's, tensors. The header REDIRECT
        names one of the server's other paths."""
        path = request.header(REDIRECT)
        if path:
            return await self._redirected(request, f"/{path.strip('/')}")
        name = self._only_model()
        if name is None:
            raise ModelNotFound("the only model; there are several, or none")
        if self._is_tritons(name):
            return await self._infer(request, name)
        request.path_params = {"model_name": name}
        return await self.kserve.predict(request)

    async def _redirected(self, request: HttpRequest, path: str) -> HttpAnswer:
        assert self.routes is not None
        match = self.routes.find("POST", path)
        if match.serve is None:
            match = self.routes.find("GET", path)
        if match.serve is None or match.effect > Effect.RUNS or not path.startswith("/v2"):
            raise ResourceNotFound(f"{REDIRECT.decode()}: {path[:200]} is no path that runs or describes a model")
        request.path_params = match.params
        return await match.serve(request)


def _session_call(body: bytes) -> str:
    """The `requestType` of a body that calls for a session, and has nothing else; "" for any other."""
    if len(body) > _CALL_BYTES_MAX or b'"requestType"' not in body:
        return ""
    try:
        found: Any = json.loads(body)
    except ValueError:
        return ""
    return str(found["requestType"]) if isinstance(found, dict) and found.keys() == {"requestType"} else ""


def _binary(answer: HttpAnswer, asked: str) -> HttpAnswer:
    """An answer with binary tensors, in the content type of the request."""
    length = dict(answer.headers).get(LENGTH_HEADER)
    if length is None:
        return answer
    kind = f"{asked.partition(';')[0].strip()};json-header-size={length.decode()}"
    others = [header for header in answer.headers if header[0] not in (b"content-type", LENGTH_HEADER)]
    return answer._replace(headers=(*others, (b"content-type", kind.encode())))


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
        given, model = Input("body", "", await request.body()), self._models.find(name)
        return await answer_of(submitted(request, model, given, line, stream=True, counted=path == "/score"))

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


#: The packages that have MLflow's version, whole and without the parts for training.
_PACKAGES = ("mlflow", "mlflow-skinny")


class HttpMLflow:
    """The version that MLflow's clients ask for: that of the package mlflow, or the server's own without one."""

    def __init__(self) -> None:
        self._version = next(filter(None, map(_installed, _PACKAGES)), ts.version.__version__)

    async def version(self, request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(200, (JSON,), self._version.encode())


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
