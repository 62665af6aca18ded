"""The HTTP inference API: paths to models, bodies to inputs, answers back (docs/inference-api.md).

The method is ignored: GET, PUT or DELETE predict like POST.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Final
from urllib.parse import parse_qsl

from ts.protocol import forms
from ts.protocol.frames import Buffer, Input, Pairs
from ts_frontend.errors import HandlerFailed, InvalidArgument, ServeError
from ts_frontend.http.errors import ErrorDialect, refusal
from ts_frontend.http.request import (
    JSON,
    NO_DOCUMENT,
    Header,
    HttpAnswer,
    HttpRequest,
    Parameters,
    json_answer,
    query_pairs,
)
from ts_frontend.job import Job, shared_headers
from ts_frontend.models.health import Health
from ts_frontend.models.model import Registry
from ts_frontend.open_inference import requests as tensor_requests
from ts_frontend.open_inference.requests import WHOLE_BYTES_MAX
from ts_frontend.scheduling.queues import SequenceHeaders
from ts_frontend.scheduling.stream import chunks, resumed
from ts_frontend.telemetry.metrics.registry import MetricsRegistry
from ts_frontend.telemetry.metrics.system import Gpus
from ts_frontend.telemetry.metrics.text import CONTENT_TYPE, OPEN_CONTENT_TYPE, preferred

PREDICT: Final = ("explain", "False")
EXPLAIN: Final = ("explain", "True")
#: The handler's `url_path` for a path that ends with the model.
_WITHOUT_REST: Final = {explain: shared_headers([explain, ("url_path", "")]) for explain in (PREDICT, EXPLAIN)}

#: Headers that only the server sets.
_RESERVED: Final = frozenset(
    {
        *("x-request-id", "content-length", "transfer-encoding", "connection", "keep-alive", "upgrade", "te"),
        *("trailer", *(name.decode() for name, _ in NO_DOCUMENT)),
    }
)
_NAME: Final = re.compile(r"[0-9A-Za-z!#$%&'*+.^_`|~-]+")
_VALUE: Final = re.compile(r"[\x20-\x7e\x80-\xff\t]*")


class HttpInference:
    """TorchServe's inference API. `at_startup` names the models that were loaded when the server started; `keys`: the
    headers that name a request's sequence."""

    def __init__(
        self, models: Registry, health: Health, at_startup: Callable[[], list[str]], keys: SequenceHeaders
    ) -> None:
        self._models = models
        self._health = health
        self._at_startup = at_startup
        self._keys = keys

    async def ping(self, request: HttpRequest) -> HttpAnswer:
        healthy, report = await self._health.health()
        return json_answer(200 if healthy else 500, report)

    def predictions(self, request: HttpRequest) -> Awaitable[HttpAnswer]:
        return self._of_path(request, PREDICT)

    def explanations(self, request: HttpRequest) -> Awaitable[HttpAnswer]:
        return self._of_path(request, EXPLAIN)

    def _of_path(self, request: HttpRequest, explain: tuple[str, str]) -> Awaitable[HttpAnswer]:
        params = request.path_params
        rest = params.get("url_path")
        more = [explain, ("url_path", rest)] if rest else _WITHOUT_REST[explain]
        return self._predict(request, params["model_name"], params.get("model_version"), more)

    async def of_kserve(self, request: HttpRequest, explain: tuple[str, str]) -> HttpAnswer:
        """Answers by a path of KServe's v1 with PREDICT or EXPLAIN, and with TorchServe's form of errors."""
        name = request.path_params["model_name"]
        try:
            body = await request.body()
            await tensor_requests.count_items(self._models.find(name), body)
            return await answer_of(self._submit(request, name, None, [explain], (), body))
        except ServeError as error:
            return refusal(error, ErrorDialect.TORCHSERVE, told=request.told)

    async def explain_v2(self, request: HttpRequest) -> HttpAnswer:
        return await self.of_v2(request, EXPLAIN)

    async def of_v2(self, request: HttpRequest, explain: tuple[str, str]) -> HttpAnswer:
        """The same by a path of v2: the handler gets the body unchanged, and its `timeout` and sequence count."""
        name = request.path_params["model_name"]
        try:
            body = await request.body()
            small = len(body) <= WHOLE_BYTES_MAX
            given = tensor_requests.of_json(body) if small else await tensor_requests.of_large_json(body)
            await tensor_requests.count_items(self._models.find(name), body)
            more, deadline_s = tensor_requests.scheduled(
                self._models.find(name), given, [explain], math.inf, self._keys
            )
            return await answer_of(self._submit(request, name, None, more, (), body, deadline_s))
        except ServeError as error:
            return refusal(error, ErrorDialect.TORCHSERVE, told=request.told)

    async def with_query(self, request: HttpRequest) -> HttpAnswer:
        """Answers /models/MODEL/invoke and /MODEL[/VERSION]/predict, with the query's parameters as further inputs."""
        params = request.path_params
        inputs = _query_inputs(request)
        return await self._predict(request, params["model_name"], params.get("model_version"), [PREDICT], inputs)

    async def invocations(self, request: HttpRequest) -> HttpAnswer:
        return await self.invoked(request, await request.body())

    async def invoked(self, request: HttpRequest, body: bytes) -> HttpAnswer:
        """Predicts with the model that the query or the form names, or the only one of the start."""
        name = Parameters(query_pairs(request)).text("model_name")
        if name is None:
            name = self.only_model() or _form_field(request, body, "model_name")
        if name is None:
            raise InvalidArgument("Parameter model_name is required.")
        return await answer_of(self._submit(request, name, None, [PREDICT], _query_inputs(request), body))

    def only_model(self) -> str | None:
        """The name of the only model that was loaded when the server started."""
        names = set(self._at_startup())
        return names.pop() if len(names) == 1 else None

    # --- predicting

    async def _predict(
        self, request: HttpRequest, name: str, version: str | None, more: Pairs, inputs: Sequence[Input] = ()
    ) -> HttpAnswer:
        body = await request.body()
        return await answer_of(self._submit(request, name, version, more, inputs, body))

    def _submit(
        self,
        request: HttpRequest,
        name: str,
        version: str | None,
        more: Pairs,
        inputs: Sequence[Input],
        body: bytes,
        deadline_s: float = math.inf,
    ) -> Job:
        """Submits a request to a model. `more`: headers for the handler besides the client's."""
        model = self._models.find(name, version)
        content_type = request.header(b"content-type")
        if content_type and forms.is_form(content_type):
            check_form(content_type, body)
        job = model.submit(
            [*inputs, Input("body", content_type, body)],
            headers=request.for_handler(more),
            deadline_s=deadline_s,
            request_id=request.request_id,
            stream=True,
            version_named=bool(version),
        )
        request.when_gone(job.cancel)
        return job


async def answer_of(job: Job) -> HttpAnswer:
    """Returns the complete answer if it has only one piece, else a stream of pieces."""
    whole = await job.whole()
    if job.status < 200:
        job.cancel()
        raise HandlerFailed(500, f"The handler set status {job.status}, which can't end an answer")
    headers = handler_headers(job.headers) if job.headers else ()
    if whole is not None and len(whole) < 2:
        return HttpAnswer(job.status, headers, whole[0] if whole else b"")
    pieces = chunks(job)
    return HttpAnswer(job.status, headers, resumed(await anext(pieces), pieces))


def handler_headers(pairs: Pairs) -> list[Header]:
    """Returns the headers that a handler set, without those that HTTP can't carry or that only the server sets."""
    return [header for pair in pairs if (header := _header_of(*pair)) is not None]


@lru_cache(maxsize=64)
def _header_of(name: str, value: str) -> Header | None:
    lower = name.lower()
    if lower in _RESERVED or not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
        return None
    return lower.encode(), value.encode("latin-1")


def json_of_model(body: Buffer, pairs: Pairs) -> HttpAnswer:
    """Returns a model's answer as JSON, unless its headers name another content type."""
    if not pairs:
        return HttpAnswer(200, (JSON,), body)
    headers = handler_headers(pairs)
    is_named = any(name == JSON[0] for name, _ in headers)
    return HttpAnswer(200, headers if is_named else (JSON, *headers), body)


def _query_inputs(request: HttpRequest) -> list[Input]:
    return [Input(name, "", value.encode()) for name, value in query_pairs(request)]


def check_form(content_type: str, body: bytes) -> None:
    try:
        forms.check(content_type, body)
    except forms.MalformedForm as error:
        raise InvalidArgument(str(error)) from None


def _form_field(request: HttpRequest, body: bytes, name: str) -> str | None:
    content_type = request.header(b"content-type")
    if not forms.is_form(content_type):
        return None
    check_form(content_type, body)
    found = [part.data for part in forms.parts(content_type, body) if part.name == name]
    return found[-1].decode("utf-8", "replace") or None if found else None


FIELDS_MAX: Final = 1000


class HttpMetrics:
    """The metrics API. Like TorchServe's, it answers any method."""

    def __init__(self, registry: MetricsRegistry, gpus: Gpus) -> None:
        self._registry, self._gpus = registry, gpus
        #: Gathers the figures of other frontends, which the registry joins.
        self.gather: Callable[[], Awaitable[None]] | None = None

    async def read(self, request: HttpRequest) -> HttpAnswer:
        """Answers in Prometheus' text format, or OpenMetrics if preferred: the metrics named in `name[]`, or all."""
        await self._gpus.fresh()
        if self.gather is not None:
            await self.gather()
        names, registry = wanted(request.query), self._registry
        if preferred(request.header(b"accept")):
            kind, text = OPEN_CONTENT_TYPE, registry.openmetrics(names)
        else:
            kind, text = CONTENT_TYPE, registry.text(names)
        return HttpAnswer(200, ((b"content-type", kind.encode()),), text.encode("utf-8", "replace"))


def wanted(query: bytes) -> frozenset[str]:
    """Returns the values of `name[]` in a query string; an empty set means all metrics."""
    try:
        fields = parse_qsl(query.decode("utf-8", "replace"), max_num_fields=FIELDS_MAX)
    except ValueError:
        fields = []
    return frozenset(value for key, value in fields if key == "name[]")
