"""The API description: `OPTIONS /` and `/api-description` say what a listener answers, `OPTIONS` of a model what it
takes. OpenAPI 3.0.1, shorter than TorchServe's: the paths and their parameters, without schemas of the answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from ts_frontend.errors import ModelNotFound
from ts_frontend.ingress.http_call import HttpAnswer, HttpRequest, Serve
from ts_frontend.services.http_answers import json_answer

MODEL, VERSION, WORKFLOW = "model_name", "model_version", "workflow_name"


class Operation(NamedTuple):
    """One method of a path; `query`: its optional parameters."""

    path: str
    method: str
    summary: str
    query: Sequence[str] = ()


INFERENCE = (
    Operation("/", "options", "This description"),
    Operation("/api-description", "get", "This description"),
    Operation("/ping", "get", "Whether the server is healthy"),
    Operation("/predictions/{model_name}", "post", "Predict with the default version"),
    Operation("/predictions/{model_name}/{model_version}", "post", "Predict with a version"),
    Operation("/explanations/{model_name}", "post", "Explain with the default version"),
    Operation("/v1/models/{model_name}:predict", "post", "Predict, KServe v1"),
    Operation("/v2/models/{model_name}/infer", "post", "Predict, KServe v2"),
    Operation("/wfpredict/{workflow_name}", "post", "Predict with a workflow"),
)
_REGISTER = (
    *("url", "model_name", "handler", "runtime", "batch_size", "max_batch_delay", "initial_workers", "synchronous"),
    *("response_timeout", "startup_timeout"),
)
_REGISTER_WORKFLOW = ("url", "workflow_name", "response_timeout", "startup_timeout")
_SCALE = ("min_worker", "max_worker", "synchronous")
MANAGEMENT = (
    Operation("/models", "get", "List models", ("limit", "next_page_token")),
    Operation("/models", "post", "Register a model", _REGISTER),
    Operation("/models/{model_name}", "get", "Describe the default version", ("customized",)),
    Operation("/models/{model_name}", "put", "Scale the default version's workers", _SCALE),
    Operation("/models/{model_name}", "delete", "Unregister the default version"),
    Operation("/models/{model_name}/{model_version}", "get", "Describe a version", ("customized",)),
    Operation("/models/{model_name}/{model_version}", "put", "Scale a version's workers", _SCALE),
    Operation("/models/{model_name}/{model_version}", "delete", "Unregister a version"),
    Operation("/models/{model_name}/{model_version}/set-default", "put", "Make a version the default"),
    Operation("/v1/models/{model_name}", "get", "Whether a model is ready, KServe v1"),
    Operation("/workflows", "get", "List workflows", ("limit", "next_page_token")),
    Operation("/workflows", "post", "Register a workflow", _REGISTER_WORKFLOW),
    Operation("/workflows/{workflow_name}", "get", "Describe a workflow"),
    Operation("/workflows/{workflow_name}", "delete", "Unregister a workflow"),
)
METRICS = (Operation("/metrics", "get", "Metrics, as Prometheus reads them", ("name[]",)),)


class Models(Protocol):
    """Where models are found by name (`ts_frontend.models.registry.Registry`)."""

    def find(self, name: str, version: str | None = None) -> object: ...


class HttpDescription:
    """Answers OPTIONS; asked before the other routes of its listener."""

    def __init__(self, operations: Sequence[Operation], models: Models, version: str) -> None:
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
        return json_answer(200, document(f"RESTful API for: {name}", self._version, found))


def document(title: str, version: str, operations: Sequence[Operation]) -> dict[str, Any]:
    """An OpenAPI document of these operations."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = {
            "description": operation.summary,
            "parameters": [*_path_parameters(operation.path), *_query_parameters(operation.query)],
            "responses": {"200": {"description": "OK"}, "default": {"description": "code, type and message, in JSON"}},
        }
    return {"openapi": "3.0.1", "info": {"title": title, "version": version}, "paths": paths}


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"in": "path", "name": name, "required": True, "schema": {"type": "string"}}
        for name in (MODEL, VERSION, WORKFLOW)
        if f"{{{name}}}" in path
    ]


def _query_parameters(names: Sequence[str]) -> list[dict[str, Any]]:
    return [{"in": "query", "name": name, "required": name == "url", "schema": {"type": "string"}} for name in names]
