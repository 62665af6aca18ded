"""The API description: `OPTIONS /` and `/api-description` say what a listener answers, `OPTIONS` of a model what it
takes. OpenAPI 3.0.1, shorter than TorchServe's: every path with its parameters, and one form of errors for all.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ts_frontend.config.parameters import REGISTER, REGISTER_WORKFLOW, SCALE
from ts_frontend.errors import ModelNotFound
from ts_frontend.http.request import Header, HttpAnswer, HttpRequest, Route, Serve, json_answer
from ts_frontend.models.registry import Registry


class Operation(NamedTuple):
    """One method of a path; `query`: its parameters, all optional but `url`. `id` "": made of method and path. `takes`:
    the content types of its body, if it has one."""

    path: str
    method: str
    summary: str
    query: Sequence[str] = ()
    id: str = ""
    takes: Sequence[str] = ()


_INPUT = ("application/json", "application/octet-stream", "multipart/form-data")
_DESCRIPTION = "The OpenAPI description of what is served here"
INFERENCE = (
    Operation("/", "options", _DESCRIPTION, (), "apiDescription"),
    Operation("/api-description", "get", _DESCRIPTION, (), "api-description"),
    Operation("/ping", "get", "Whether the server is healthy", (), "ping"),
    Operation("/predictions/{model_name}", "post", "Predict with the default version", (), "predictions", _INPUT),
    Operation("/predictions/{model_name}", "options", "The description of a model", (), "describePredictions"),
    Operation(
        *("/predictions/{model_name}/{model_version}", "post", "Predict with a version", (), "version_predictions"),
        _INPUT,
    ),
    Operation("/explanations/{model_name}", "post", "Explain with the default version", (), "explanations", _INPUT),
    Operation(
        *("/explanations/{model_name}/{model_version}", "post", "Explain with a version", (), "version_explanations"),
        _INPUT,
    ),
    Operation("/v1/models/{model_name}:predict", "post", "Predict, KServe v1", (), "predict_v1", _INPUT),
    Operation("/v1/models/{model_name}:explain", "post", "Explain, KServe v1", (), "explain_v1", _INPUT),
    Operation("/v2/models/{model_name}/infer", "post", "Predict, KServe v2", (), "infer_v2", _INPUT),
    Operation("/v2/models/{model_name}/explain", "post", "Explain, KServe v2", (), "explain_v2", _INPUT),
    Operation("/invocations", "post", "Predict, as SageMaker asks", ("model_name",), "invocations", _INPUT),
    Operation(
        "/models/{model_name}/invoke", "post", "Predict, as SageMaker asks for one of many", (), "invoke", _INPUT
    ),
    Operation("/{model_name}/predict", "post", "Predict, as MMS had it", (), "predict", _INPUT),
    Operation(
        "/{model_name}/{model_version}/predict", "post", "The same with a version", (), "version_predict", _INPUT
    ),
    Operation("/wfpredict/{workflow_name}", "post", "Predict with a workflow", (), "wfpredict", _INPUT),
)
_REGISTER, _REGISTER_WORKFLOW, _SCALE = (
    tuple(row.name for row in table if row.http) for table in (REGISTER, REGISTER_WORKFLOW, SCALE)
)
_MODEL, _VERSION = "/models/{model_name}", "/models/{model_name}/{model_version}"
MANAGEMENT = (
    Operation("/", "options", _DESCRIPTION, (), "apiDescription"),
    Operation("/api-description", "get", _DESCRIPTION, (), "api-description"),
    Operation("/models", "get", "List models", ("limit", "next_page_token"), "listModels"),
    Operation("/models", "post", "Register a model", _REGISTER, "registerModel", ("application/json",)),
    Operation(_MODEL, "get", "Describe the default version", ("customized",), "describeModel"),
    Operation(_MODEL, "put", "Scale the default version's workers", _SCALE, "setAutoScale"),
    Operation(_MODEL, "delete", "Unregister the default version", (), "unregisterModel"),
    Operation(_MODEL, "options", "The description of a model", (), "describeManagement"),
    Operation(_VERSION, "get", "Describe a version, or `all`", ("customized",), "version_describeModel"),
    Operation(_VERSION, "put", "Scale a version's workers", _SCALE, "version_setAutoScale"),
    Operation(_VERSION, "delete", "Unregister a version", (), "version_unregisterModel"),
    Operation(f"{_VERSION}/set-default", "put", "Make a version the default", (), "setDefault"),
    Operation("/v1/models/{model_name}", "get", "Whether a model is ready, KServe v1", (), "ready_v1"),
    Operation("/workflows", "get", "List workflows", ("limit", "next_page_token"), "listWorkflows"),
    Operation("/workflows", "post", "Register a workflow", _REGISTER_WORKFLOW, "registerWorkflow"),
    Operation("/workflows/{workflow_name}", "get", "Describe a workflow", (), "describeWorkflow"),
    Operation("/workflows/{workflow_name}", "delete", "Unregister a workflow", (), "unregisterWorkflow"),
)
METRICS = (
    Operation("/", "options", _DESCRIPTION, (), "apiDescription"),
    Operation("/api-description", "get", _DESCRIPTION, (), "api-description"),
    Operation("/metrics", "get", "Metrics, as Prometheus reads them", ("name[]",), "metrics"),
)

_NUMBER, _FLAG, _TEXT = {"type": "integer"}, {"type": "boolean"}, {"type": "string"}
#: Parameters that aren't texts.
_SCHEMAS: dict[str, dict[str, Any]] = {
    **{row.name: _NUMBER if row.kind is int else _FLAG for row in (*REGISTER, *SCALE) if row.kind is not str},
    **dict.fromkeys(("limit", "next_page_token"), _NUMBER),
    "customized": _FLAG,
    "name[]": {"type": "array", "items": _TEXT},
}
_ERROR = {
    "type": "object",
    "required": ["code", "type", "message"],
    "properties": {
        "code": {"type": "integer", "description": "The HTTP status"},
        "type": {"type": "string", "description": "The kind of error"},
        "message": {"type": "string", "description": "What was wrong"},
    },
}


class HttpDescription:
    """Answers OPTIONS; asked before the other routes of its listener."""

    def __init__(self, operations: Sequence[Operation], models: Registry, version: str) -> None:
        self._operations = operations
        self._models = models
        self._version = version

    def route(self, request: HttpRequest) -> Serve | None:
        segments = request.segments
        if segments == ["api-description"]:
            return self._all
        if request.method != "OPTIONS":
            return None
        if not any(segments):
            return self._all
        match segments:
            case ["predictions" | "explanations" | "models", _, *_] | ["v1" | "v2", "models", _, *_]:
                return self._of_model
        return None

    async def _all(self, request: HttpRequest) -> HttpAnswer:
        return json_answer(200, document("TorchServe APIs", self._version, self._operations))

    async def _of_model(self, request: HttpRequest) -> HttpAnswer:
        first, *rest = request.segments
        name = rest[1].rpartition(":")[0] or rest[1] if first in ("v1", "v2") else rest[0]
        if not name:
            raise ModelNotFound(name)
        self._models.find(name)
        found = [operation for operation in self._operations if "{model_name}" in operation.path]
        managed = [one for one in found if one.path.startswith(_MODEL) and one.id != "invoke"]
        if first == "models" and managed:
            return json_answer(200, document(f"RESTful Management API for: {name}", self._version, managed))
        rest_of = [operation for operation in found if operation not in managed]
        return json_answer(200, document(f"RESTful API for: {name}", self._version, rest_of))


def document(title: str, version: str, operations: Iterable[Operation]) -> dict[str, Any]:
    """An OpenAPI document of these operations; of equal ones (on a shared address) the first counts."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {}).setdefault(operation.method, _described(operation))
    info = {"title": title, "version": version}
    return {"openapi": "3.0.1", "info": info, "paths": paths, "components": {"schemas": {"Error": _ERROR}}}


def _described(operation: Operation) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    found: dict[str, Any] = {
        "description": operation.summary,
        "operationId": operation.id or f"{operation.method}{re.sub('[^a-z0-9]+', '_', operation.path)}",
        "parameters": [*_path_parameters(operation.path), *_query_parameters(operation.query)],
        "responses": {"200": {"description": "OK"}, "default": {"description": "An error", "content": error}},
    }
    if operation.takes:
        found["requestBody"] = {"content": {name: {} for name in operation.takes}}
    return found


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"in": "path", "name": name, "required": True, "schema": _TEXT} for name in re.findall(r"\{([^{}]+)\}", path)
    ]


def _query_parameters(names: Sequence[str]) -> list[dict[str, Any]]:
    return [{"in": "query", "name": name, "required": False, "schema": _SCHEMAS.get(name, _TEXT)} for name in names]


_JSON, _TENSORS = ("application/json",), ("application/json", "application/octet-stream")
_V2_MODEL, _V2_VERSION = "/v2/models/{model_name}", "/v2/models/{model_name}/versions/{model_version}"
_REGION = "sharedmemory/region/{region_name}"


def _of_models() -> Iterator[Operation]:
    """Each for a model, and for a version of it."""
    for rest, method, summary, takes in (
        ("", "get", "A model's versions, inputs and outputs", ()),
        ("/ready", "get", "Whether a model is ready", ()),
        ("/config", "get", "A model's configuration, in Triton's words", ()),
        ("/stats", "get", "What a model's requests took", ()),
        ("/infer", "post", "Predict from tensors", _TENSORS),
        ("/infer_stream", "post", "The same, with an event for each answer", _TENSORS),
        ("/generate", "post", "Text in, text out", _JSON),
        ("/generate_stream", "post", "The same, with an event for each answer", _JSON),
    ):
        for path in (_V2_MODEL, _V2_VERSION):
            if path + rest != f"{_V2_MODEL}/infer":  # which TorchServe has
                yield Operation(path + rest, method, summary, (), "", takes)


def _settings(path: str, what: str) -> tuple[Operation, Operation]:
    return (
        Operation(path, "get", f"{what}; with a management key"),
        Operation(path, "post", "The same, changed; with a management key", (), "", _JSON),
    )


def _shared_memory(kind: str) -> tuple[Operation, ...]:
    return (
        Operation(f"/v2/{kind}sharedmemory/status", "get", f"Regions of {kind} shared memory"),
        Operation(f"/v2/{kind}{_REGION}/status", "get", "One of them"),
        Operation(f"/v2/{kind}{_REGION}/register", "post", "Let tensors lie there", (), "", _JSON),
        Operation(f"/v2/{kind}{_REGION}/unregister", "post", "No longer"),
        Operation(f"/v2/{kind}sharedmemory/unregister", "post", "None of them any longer"),
    )


OPEN_INFERENCE = (
    Operation("/v2", "get", "The server's name, version and extensions"),
    Operation("/v2/health/live", "get", "Whether the server runs"),
    Operation("/v2/health/ready", "get", "Whether the server can serve"),
    Operation("/v2/models", "get", "The names of the models"),
    Operation("/v2/models/stats", "get", "What the requests of all models took"),
    *_of_models(),
    Operation("/v2/repository/index", "post", "The models that are there", (), "", _JSON),
    Operation("/v2/repository/models/{model_name}/load", "post", "Load a model; with a management key", (), "", _JSON),
    Operation("/v2/repository/models/{model_name}/unload", "post", "Unload it; with a management key"),
    *_settings("/v2/logging", "What is logged"),
    *_settings("/v2/trace/setting", "What is traced"),
    *_settings(f"{_V2_MODEL}/trace/setting", "What is traced of a model"),
    *_shared_memory("system"),
    *_shared_memory("cuda"),
)
OPENAI = (
    Operation("/v1/models", "get", "The names of the models, for OpenAI's and KServe's clients"),
    Operation("/v1/models/{model_name}", "get", "One of them, and whether it is ready", (), "ready_v1"),
    Operation("/v1/completions", "post", "Complete a text, as OpenAI's API does", (), "", _JSON),
    Operation("/v1/chat/completions", "post", "The same for a chat", (), "", _JSON),
)
#: With `kserve_mode`.
KSERVE = (Operation("/", "get", "Whether the server runs, KServe"),)


HTML: Header = (b"content-type", b"text/html; charset=utf-8")
PAGES = (["docs"], ["v2", "docs"])
DOCUMENTS = (["openapi.json"], ["v2", "docs", "dataplane.json"])
TITLE = "torchrelay's HTTP APIs"
_STYLE = (
    "body{font:16px/1.5 sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #ccc;padding:.4rem;text-align:left}"
    "code{font:14px monospace}"
)


class HttpDocs:
    """`operations`: what the listener answers."""

    def __init__(self, operations: Sequence[Operation], version: str) -> None:
        self._document = document(TITLE, version, operations)
        self._page = _page(operations, version).encode()

    def routes(self, enabled: bool) -> list[Route]:
        return [self.route] if enabled else []

    def route(self, request: HttpRequest) -> Serve | None:
        if request.method not in ("GET", "HEAD"):
            return None
        if request.segments in PAGES:
            return self._shown
        return self._described if request.segments in DOCUMENTS else None

    async def _shown(self, request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(200, (HTML,), self._page)

    async def _described(self, request: HttpRequest) -> HttpAnswer:
        return json_answer(200, self._document)


def _page(operations: Sequence[Operation], version: str) -> str:
    rows = "".join(
        f"<tr><td><code>{operation.method.upper()}</code></td><td><code>{html.escape(operation.path)}</code></td>"
        f"<td>{html.escape(operation.summary)}</td></tr>"
        for operation in operations
    )
    head = f'<meta charset="utf-8"><title>{TITLE}</title><style>{_STYLE}</style>'
    about = f'<h1>{TITLE}</h1><p>Version {html.escape(version)}. <a href="/openapi.json">OpenAPI</a></p>'
    table = f"<table><tr><th>Method</th><th>Path</th><th>What it does</th></tr>{rows}</table>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{about}{table}</body></html>\n'
