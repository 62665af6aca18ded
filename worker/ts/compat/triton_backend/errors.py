"""The error object and the exception of Triton Python models."""

from __future__ import annotations

from ts.protocol.text import name_of, said, text_of
from ts.utils.util import PredictionException


class TritonError:
    """An error as part of a response. `code` is one of the numbers below."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = str(message), code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code

    def __str__(self) -> str:
        return self._message


class TritonModelException(Exception):
    """Raised by a model in initialize, execute or finalize."""


#: The statuses of these errors on the way to the client.
_HTTP = {
    TritonError.UNKNOWN: 520,
    TritonError.NOT_FOUND: 404,
    TritonError.INVALID_ARG: 400,
    TritonError.UNAVAILABLE: 503,
    TritonError.UNSUPPORTED: 501,
    TritonError.ALREADY_EXISTS: 409,
    TritonError.CANCELLED: 499,
}


_CODES = {status: code for code, status in _HTTP.items()} | {
    413: TritonError.INVALID_ARG,
    429: TritonError.UNAVAILABLE,
    504: TritonError.UNAVAILABLE,
}


def of_status(status: int, message: str) -> TritonError:
    """The error of a failed call, for the calling model. `status`: an HTTP status."""
    return TritonError(message, _CODES.get(status, TritonError.INTERNAL))


def as_failure(error: object) -> Exception:
    """The exception with the error's HTTP status, which the runtime turns into an answer. The runtime's own
    exceptions are returned unchanged."""
    if isinstance(error, TritonError):
        return PredictionException(error.message(), _HTTP.get(error.code(), 500))
    if isinstance(error, Exception) and not isinstance(error, TritonModelException):
        known = isinstance(error, (PredictionException, MemoryError)) or "CUDA" in text_of(error)
        return error if known else PredictionException(said(error), 500)
    return PredictionException(text_of(error) or name_of(error), 500)
