"""Errors over HTTP: those that only HTTP has, and each protocol's form of all errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum

from ts_frontend.errors import Code, HandlerFailed, LimitExceeded, ModelNotFound, Quarantined, ServeError, WorkerDied
from ts_frontend.http.request import JSON, NOT_FOUND, Header, HttpAnswer, compact_json, error_body


class ErrorDialect(Enum):
    """The protocol that determines the form of errors."""

    TORCHSERVE = "TorchServe"
    OPEN_INFERENCE = "Open Inference Protocol"
    OPENAI = "OpenAI"
    AZUREML = "Azure ML"
    MLFLOW = "MLflow"


class HttpError(ServeError):
    """An error with additional headers in its answer."""

    remedy = "Correct the path, the method or the header that the message names."
    headers: tuple[Header, ...] = ()


class ResourceNotFound(HttpError):
    remedy = "Correct the path; `/docs` and `/openapi.json` show them all."
    code, http_status, type_name = Code.NOT_FOUND, 404, "ResourceNotFoundException"

    def __init__(self, message: str = NOT_FOUND, hint: Callable[[], str] | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class MethodNotAllowed(HttpError):
    """`allowed`: the methods of the path, if known."""

    remedy = "Use a method that the path has."
    code, http_status, type_name = Code.UNIMPLEMENTED, 405, "MethodNotAllowedException"

    def __init__(self, *allowed: str) -> None:
        super().__init__("Requested method is not allowed, please refer to API document.")
        self.headers = ((b"allow", ", ".join(allowed).encode()),) if allowed else ()


class Unauthorized(HttpError):
    """A missing or invalid key, in protocols other than TorchServe's."""

    remedy = "Send a valid key, as `Authorization: Bearer KEY`."
    code, http_status, type_name = Code.UNAUTHENTICATED, 401, "InvalidKeyException"
    headers = ((b"www-authenticate", b"Bearer"),)


class BadParameter(HttpError):
    """An invalid request in OpenAI's API: `parameter` is the member at fault, `reason` the error's code."""

    remedy = "Correct the parameter that the message names."
    code, http_status, type_name = Code.INVALID_ARGUMENT, 400, "BadRequestException"

    def __init__(self, message: str, parameter: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.parameter, self.reason = parameter, reason


class UnknownEncoding(HttpError):
    """A body with an unsupported content-encoding."""

    remedy = "Send the body uncompressed, or with an encoding that the message names."
    code, http_status, type_name = Code.UNIMPLEMENTED, 501, "NotImplementedException"
    headers = ((b"accept-encoding", b"gzip, deflate"),)


class ForeignOrigin(ServeError):
    """A page of another origin manages the server, or shows a model's answer, through the browser."""

    remedy = "Allow the page with `cors_allowed_origin`."
    code, http_status, type_name = Code.PERMISSION_DENIED, 403, "ForeignOriginException"


class ForeignHost(ServeError):
    """The request's host name isn't the server's."""

    remedy = "Allow the name with `allowed_hosts`."
    code, http_status, type_name = Code.PERMISSION_DENIED, 403, "ForeignHostException"


class UnsupportedMediaType(ServeError):
    remedy = "Send `Content-Type: application/json`."
    code, http_status, type_name = Code.INVALID_ARGUMENT, 415, "UnsupportedMediaTypeException"


def refusal(error: ServeError, dialect: ErrorDialect, *, told: bool = False) -> HttpAnswer:
    """Returns the answer for an error. Retry-After is in whole seconds, if the error has a time to retry. `told`: the
    caller may see the names of what is served."""
    answer = _FORMS[dialect](error, error.told() if told else error.message)
    seconds = error.retry_after_s if error.http_status in (429, 503) else None
    headers = error.headers if isinstance(error, HttpError) else ()
    if seconds is not None:
        headers = (*headers, (b"retry-after", b"%d" % max(1, math.ceil(seconds))))
        if isinstance(error, LimitExceeded):  # OpenAI's clients read it first
            headers = (*headers, (b"retry-after-ms", b"%d" % max(1, math.ceil(seconds * 1000))))
    return answer._replace(headers=(*answer.headers, *headers)) if headers else answer


def _torchserve(error: ServeError, message: str) -> HttpAnswer:
    return HttpAnswer(error.http_status, (JSON,), error_body(error.http_status, error.type_name, message))


def _open_inference(error: ServeError, message: str) -> HttpAnswer:
    return compact_json(_status(error), {"error": message})


#: OpenAI's `type` and `code` by status.
_OPENAI: dict[int, tuple[str, str | None]] = {
    401: ("authentication_error", "invalid_api_key"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
}


def _openai(error: ServeError, message: str) -> HttpAnswer:
    status = _status(error)
    kind, reason = _OPENAI.get(status, ("server_error" if status >= 500 else "invalid_request_error", None))
    parameter = None
    if isinstance(error, BadParameter):
        parameter, reason = error.parameter, error.reason
    elif isinstance(error, ModelNotFound):
        parameter, reason = "model", "model_not_found"
    told = {"message": message, "type": kind, "param": parameter, "code": reason}
    return compact_json(status, {"error": told})


#: The errors of a model's own code, or of the process that ran it.
_OF_MODELS = (HandlerFailed, WorkerDied, Quarantined)


def _azureml(error: ServeError, message: str) -> HttpAnswer:
    answer = compact_json(_status(error), {"message": message})
    failed = b"True" if isinstance(error, _OF_MODELS) else b"False"
    return answer._replace(headers=(*answer.headers, (b"x-ms-run-function-failed", failed)))


#: MLflow's codes by status; others below 500 are BAD_REQUEST, others above INTERNAL_ERROR.
_MLFLOW: dict[int, str] = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "ENDPOINT_NOT_FOUND",
    409: "RESOURCE_CONFLICT",
    429: "REQUEST_LIMIT_EXCEEDED",
    499: "CANCELLED",
    501: "NOT_IMPLEMENTED",
    503: "TEMPORARILY_UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def _mlflow(error: ServeError, message: str) -> HttpAnswer:
    status = _status(error)
    code = _MLFLOW.get(status, "INTERNAL_ERROR" if status >= 500 else "BAD_REQUEST")
    return compact_json(status, {"error_code": code, "message": message})


def _status(error: ServeError) -> int:
    """Returns an error's HTTP status; 500 instead of a status outside of 400 to 599, which a handler may set."""
    return error.http_status if 400 <= error.http_status < 600 else 500


_FORMS: dict[ErrorDialect, Callable[[ServeError, str], HttpAnswer]] = {
    ErrorDialect.TORCHSERVE: _torchserve,
    ErrorDialect.OPEN_INFERENCE: _open_inference,
    ErrorDialect.OPENAI: _openai,
    ErrorDialect.AZUREML: _azureml,
    ErrorDialect.MLFLOW: _mlflow,
}
