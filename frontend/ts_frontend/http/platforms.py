"""The paths of SageMaker and Vertex AI: `/invocations` with sessions, Vertex's prediction, and Triton's binary form in
both (docs/platforms.md). The other calls of these platforms are the server's usual ones."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from typing import Any

from ts_frontend.errors import Code, InvalidArgument, ModelNotFound, ServeError
from ts_frontend.http.errors import ResourceNotFound
from ts_frontend.http.kserve_v1 import HttpKServe
from ts_frontend.http.management import HttpManagement
from ts_frontend.http.open_inference import HttpOpenInference
from ts_frontend.http.request import Header, HttpAnswer, HttpRequest
from ts_frontend.http.routing import Effect, RouteTable
from ts_frontend.http.torchserve import HttpInference
from ts_frontend.models.registry import Registry
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


class HttpPlatforms:
    """`sessions` None: there are none. `generates`: a model of Triton's format generates texts at /invocations; else it
    infers from tensors."""

    def __init__(
        self,
        models: Registry,
        inference: HttpInference,
        tensors: HttpOpenInference,
        kserve: HttpKServe,
        management: HttpManagement,
        *,
        sessions: Sessions | None,
        generates: bool,
    ) -> None:
        self._models, self._inference, self._tensors, self._kserve = models, inference, tensors, kserve
        self._sessions, self._generates, self._management = sessions, generates, management
        #: The routes of the listener, for Vertex's redirect.
        self.routes: RouteTable | None = None

    # --- SageMaker

    async def invocations(self, request: HttpRequest) -> HttpAnswer:
        """Predicts with the only model, or with the one that the query names."""
        name = self._only_model()
        if name is not None and self._is_tritons(name):
            return await self._infer(request, name)
        body = await request.body()
        if self._sessions is not None:
            session = request.header(SESSION_ID)
            asked = _session_call(body)
            if asked == "NEW_SESSION":
                return self._sessions.begin()
            if asked == "CLOSE":
                return self._sessions.close(session)
            if session:
                self._sessions.check(session)
        return await self._inference.invoked(request, body)

    async def list_adapters(self, request: HttpRequest) -> HttpAnswer:
        return await self._management.list_adapters(self._of_only_model(request))

    async def load_adapter(self, request: HttpRequest) -> HttpAnswer:
        return await self._management.load_adapter(self._of_only_model(request))

    async def unload_adapter(self, request: HttpRequest) -> HttpAnswer:
        return await self._management.unload_adapter(self._of_only_model(request))

    def _of_only_model(self, request: HttpRequest) -> HttpRequest:
        name = self._only_model()
        if name is None:
            raise ModelNotFound("the only model; there are several, or none")
        request.path_params = {**request.path_params, "model_name": name}
        return request

    async def invoke(self, request: HttpRequest) -> HttpAnswer:
        """Predicts with one of several models."""
        name = request.path_params["model_name"]
        return await (self._infer(request, name) if self._is_tritons(name) else self._inference.with_query(request))

    def _only_model(self) -> str | None:
        """The only model of the start; of a model repository, the only one that is served."""
        names = {model.name for model in self._models.defaults()}
        return self._inference.only_model() or (names.pop() if len(names) == 1 else None)

    def _is_tritons(self, name: str) -> bool:
        return self._models.find(name).adapter == "triton"

    async def _infer(self, request: HttpRequest, name: str) -> HttpAnswer:
        request.path_params = {"model_name": name}
        binary = _BINARY.fullmatch(request.header(b"content-type").strip())
        if binary is not None:
            length = (LENGTH_HEADER, binary[1].encode())
            request.headers, request.by_name = [*request.headers, length], {**request.by_name, LENGTH_HEADER: length[1]}
        elif self._generates:
            return await self._tensors.generate(request)
        answer = await self._tensors.infer(request)
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
        return await self._kserve.predict(request)

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
