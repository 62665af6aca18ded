"""Runs Azure ML's `score.py`: `init()` once, and `run()` for each request, by itself.

The contract is that of Azure's inference server (docs/platforms.md). `run` gets the body as text, or the parameters of
a GET as JSON; with inference_schema's decorators, the members of a JSON object; with `@rawhttp`, Flask's request.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import parse_qs

from ts.context import Context
from ts.handler_utils.utils import as_sent, needed, streamed
from ts.utils.util import PredictionException

SCRIPT, MODULE, JSON = "score.py", "entry_module", "application/json"
FAILED, TIME = "x-ms-run-function-failed", "x-ms-run-fn-exec-ms"
#: The modules whose `rawhttp` marks a run function.
_RAW = ("azureml_inference_server_http.api.aml_request", "azureml.contrib.services.aml_request")
#: The versions of OpenAPI by the values of /swagger.json's `version`, and the script's own files for each.
_VERSIONS = {"2": "2.0", "2.0": "2.0", "3": "3.0", "3.0": "3.0", "3.1": "3.1"}
_FILES = {"2.0": ("swagger.json", "swagger2.json"), "3.0": ("swagger3.json",), "3.1": ("swagger3.1.json",)}
_ANYTHING = {"type": "object", "example": {}}


class ScoreScript:
    """The handler. The server says a request's method, path and query in the headers `:method`, `:path` and `:query`;
    without them, it is a POST to /score."""

    def __init__(self) -> None:
        self._run: Callable[..., Any] = len
        self._parameters: list[inspect.Parameter] = []
        self._takes_headers = self._is_raw = self._has_schema = False
        self._root = Path()

    def initialize(self, context: Context) -> None:
        """Imports the script and calls its init. Raises ValueError for unfit functions; its own exceptions pass."""
        folder = Path(context.system_properties["model_dir"])
        model = (context.manifest or {}).get("model", {})
        self._root = Path(os.environ.get("AML_APP_ROOT") or folder)
        source = os.environ.get("AZUREML_SOURCE_DIRECTORY")
        sys.path += [str(self._root), *([str(self._root / source)] if source else [])]
        module = _imported(folder / (model.get("modelFile") or SCRIPT))
        # A generated script in front of the user's own only hands the arguments on, without a schema's types.
        own = getattr(module, "driver_module", None)
        self._run = own.run if isinstance(own, ModuleType) and hasattr(own, "run") else module.run
        self._read_signature()
        module.init()

    def _read_signature(self) -> None:
        given = list(inspect.signature(self._run).parameters.values())
        if any(one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) for one in given):
            raise ValueError("run takes arguments by name: no *args, **kwargs or positional-only arguments")
        self._parameters = [one for one in given if one.name != "request_headers"]
        self._takes_headers = len(given) > len(self._parameters)
        if not self._parameters:
            raise ValueError("run has no argument for the data")
        self._is_raw = any(getattr(sys.modules.get(name), "_rawHttpRequested", False) for name in _RAW)
        schemas = sys.modules.get("inference_schema.schema_util")
        self._has_schema = schemas is not None and schemas.is_schema_decorated(self._run)
        if self._is_raw and self._has_schema:
            raise ValueError("run has the decorators of rawhttp and of a schema: only one of them can give it the data")

    def handle(self, data: Sequence[Any], context: Context) -> list[Any]:
        """The answers of a batch; one that failed has its status, and its traceback is in the log."""
        return [self._answer(idx, row, context) for idx, row in enumerate(data)]

    def _answer(self, idx: int, row: Mapping[str, Any], context: Context) -> Any:
        headers = context.get_all_request_header(idx)
        answer = _Answer(idx, context)
        try:
            if headers.get(":path") == "/swagger.json":
                return answer.json(200, self._swagger(headers))
            method = headers.get(":method") or "POST"
            if method == "OPTIONS" and not self._is_raw:
                return answer.text(200, "")
            arguments = self._arguments(method, headers, as_sent(row.get("body", row.get("data"))))
        except PredictionException as error:
            return answer.json(error.error_code, {"message": error.message})
        begun_s = time.perf_counter()
        try:
            result = self._run(**arguments)
        except Exception:
            traceback.print_exc()
            return answer.json(500, {"message": "run() of the scoring script failed; the log says why"}, failed=True)
        took_ms = f"{(time.perf_counter() - begun_s) * 1000:.3f}"
        if (flask := sys.modules.get("flask")) is not None and isinstance(result, flask.Response):
            return answer.response(result, took_ms)
        try:
            text = json.dumps({} if result is None else result)
        except (TypeError, ValueError):
            traceback.print_exc()
            return answer.json(500, {"message": "The result of run() has no JSON; the log says why"})
        return answer.text(200, text, JSON, took_ms)

    # --- what run gets

    def _arguments(self, method: str, headers: Mapping[str, Any], body: Any) -> dict[str, Any]:
        """The arguments of run. Raises PredictionException."""
        sent = {name.title(): value for name, value in headers.items() if name[0] != ":" and isinstance(value, str)}
        more = {"request_headers": sent} if self._takes_headers else {}
        name, query = self._parameters[0].name, headers.get(":query") or ""
        data = body.encode() if isinstance(body, str) else body
        if self._is_raw:
            return {name: _flask_request(method, query, sent, data), **more}
        if method not in ("GET", "POST"):
            raise PredictionException(f"Method {method} is not allowed", 405)
        if self._has_schema:
            value = _of_query(query) if method == "GET" else _of_json(sent.get("Content-Type", ""), data)
            return {one.name: _member(value, one) for one in self._parameters} | more
        if method == "GET":
            return {name: json.dumps(_of_query(query)), **more}
        try:
            return {name: data.decode(), **more}
        except UnicodeDecodeError as error:
            raise PredictionException(f"The body is not UTF-8: {error}", 400) from None

    # --- the description

    def _swagger(self, headers: Mapping[str, Any]) -> Any:
        """The script's own description, or one that is made from its schemas. Raises PredictionException."""
        asked = parse_qs(headers.get(":query") or "").get("version", ["2"])[0]
        version = _VERSIONS.get(asked, "")
        for file in (self._root / name for name in _FILES.get(version, ())):
            if file.is_file():
                return json.loads(file.read_text(encoding="utf-8"))
        schemas: Any = sys.modules.get("inference_schema.schema_util") if self._has_schema else None
        if not version or (schemas is not None and version not in schemas.get_supported_versions(self._run)):
            there = ", ".join(
                dict.fromkeys(_VERSIONS.values()) if schemas is None else schemas.get_supported_versions(self._run)
            )
            raise PredictionException(f"There is no description of version {asked[:80]}, but of {there}", 404)
        if schemas is None:
            return _document(version, _ANYTHING, _ANYTHING)
        return _document(version, schemas.get_input_schema(self._run), schemas.get_output_schema(self._run))


class _Answer:
    """One request's answer: sets its status and headers, and returns its body."""

    def __init__(self, idx: int, context: Context) -> None:
        self._idx, self._context = idx, context

    def json(self, status: int, value: Any, *, failed: bool = False) -> str:
        return self.text(status, json.dumps(value), JSON, failed=failed)

    def text(self, status: int, body: str, content_type: str = "", took_ms: str = "", *, failed: bool = False) -> str:
        more = {"content-type": content_type, TIME: took_ms}
        self._set(status, {FAILED: str(failed), **{name: text for name, text in more.items() if text}})
        return body

    def response(self, found: Any, took_ms: str) -> Any:
        """The body of a Flask response; a streamed one is sent in its pieces."""
        headers = {name: ", ".join(found.headers.getlist(name)) for name, _ in found.headers}
        if found.status_code >= 500:
            headers = {name: text for name, text in headers.items() if name.lower() != FAILED} | {FAILED: "True"}
        self._set(found.status_code, {**headers, TIME: took_ms})
        return streamed(self._idx, found.iter_encoded(), self._context) if found.is_streamed else found.get_data()

    def _set(self, status: int, headers: Mapping[str, str]) -> None:
        self._context.set_response_status(status, idx=self._idx)
        for name, text in headers.items():
            self._context.set_response_header(self._idx, name, text)


def _imported(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(MODULE, file)
    assert spec is not None and spec.loader is not None, file
    sys.modules[MODULE] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    missing = [f"{name}()" for name in ("init", "run") if not callable(getattr(module, name, None))]
    if missing:
        raise ValueError(f"{file.name} has no {' and no '.join(missing)}")
    return module


def _of_query(query: str) -> dict[str, Any]:
    """The parameters by name, read as JSON where they are; several of one name are a list."""
    found = {name: [_value(text) for text in texts] for name, texts in parse_qs(query, keep_blank_values=True).items()}
    return {name: values[0] if len(values) == 1 else values for name, values in found.items()}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _of_json(content_type: str, body: bytes) -> dict[str, Any]:
    """The members of a JSON object. Raises PredictionException."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != JSON and not (kind.startswith("application/") and kind.endswith("+json")):
        raise PredictionException(f"Content-Type is {content_type[:80] or 'missing'}, and must be {JSON}", 415)
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise PredictionException(
            f"The body is no JSON: {error}" if body else "The body is empty, not a JSON object", 400
        ) from None
    if not isinstance(found, dict):
        raise PredictionException(f"The body is a JSON {type(found).__name__}, not an object", 400)
    return found


def _member(value: Mapping[str, Any], parameter: inspect.Parameter) -> Any:
    found = value.get(parameter.name, parameter.default)
    if found is parameter.empty:
        raise PredictionException(f"The argument {parameter.name!r} of run is missing", 400)
    return found


def _flask_request(method: str, query: str, headers: Mapping[str, str], body: bytes) -> Any:
    flask, test = (needed(name, "flask", "A run function with @rawhttp") for name in ("flask", "werkzeug.test"))
    builder = test.EnvironBuilder("/score", method=method, query_string=query, headers=dict(headers), data=body)
    return flask.Request(builder.get_environ())


def _document(version: str, given: Any, answered: Any) -> dict[str, Any]:
    """A description of the paths in OpenAPI's `version`, with the schemas of the body and of the answer."""
    old = version == "2.0"
    place, name = "definitions" if old else "components/schemas", os.environ.get("SERVICE_NAME") or "ML service"
    prefix = os.environ.get("SERVICE_PATH_PREFIX", "").strip("/")
    key = {"Bearer": {"type": "apiKey", "name": "Authorization", "in": "header"}}
    error = {"type": "object", "properties": {"message": {"type": "string"}}}
    schemas = {"ServiceInput": given, "ServiceOutput": answered, "ErrorResponse": error}

    def content(schema: Mapping[str, Any], kind: str = JSON) -> dict[str, Any]:
        return {"schema": schema} if old else {"content": {kind: {"schema": schema}}}

    def operation(name: str, result: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        answers = {"200": {"description": "The answer", **result}, "default": {"description": "The error", **failure}}
        return {"operationId": name, "responses": answers, **more}

    def named(schema: str) -> dict[str, str]:
        return {"$ref": f"#/{place}/{schema}"}

    failure, text = content(named("ErrorResponse")), {"type": "string"}
    body = content(named("ServiceInput"))
    asked = {"parameters": [{"name": "body", "in": "body", **body}]} if old else {"requestBody": body}
    choice = {"name": "version", "in": "query", **(text if old else {"schema": text})}
    paths = {
        "": {"get": operation("ServiceHealthCheck", content(text, "text/plain"))},
        "score": {
            "post": operation("RunMLService", content(named("ServiceOutput")), security=[{"Bearer": []}], **asked)
        },
        "swagger.json": {"get": operation("GetSwaggerSpec", content({"type": "object"}), parameters=[choice])},
    }
    head = (
        {"swagger": "2.0", "consumes": [JSON], "produces": [JSON]}
        if old
        else {"openapi": {"3.0": "3.0.3"}.get(version, "3.1.0")}
    )
    more = (
        {"definitions": schemas, "securityDefinitions": key}
        if old
        else {"components": {"schemas": schemas, "securitySchemes": key}}
    )
    info = {"title": name, "version": os.environ.get("SERVICE_VERSION") or "1.0"}
    return {
        **head,
        "info": info,
        "paths": {f"/{prefix}/{path}" if prefix else f"/{path}": one for path, one in paths.items()},
        **more,
    }
